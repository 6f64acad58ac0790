"""The ledger: what is needed to go on anywhere, and nothing for those that have ended."""

from __future__ import annotations

from moeless.engine.ledger import Ledger
from moeless.engine.messages import Progress
from moeless.engine.request import SamplingParams
from moeless.engine.submission import Submission


def submissions(request_id: str, lengths: list[int]) -> list[Submission]:
    params = SamplingParams(n=len(lengths))
    return [
        Submission(request_id=request_id, index=i, prompt=[1] * length, params=params, seed=9)
        for i, length in enumerate(lengths)
    ]


def test_a_resumption_is_the_submission_and_what_was_made() -> None:
    ledger = Ledger()
    (entry,) = ledger.add(submissions("a", [3]), now_s=1.0)
    for step, token in enumerate((7, 8), start=2):
        assert ledger.take(Progress("a", 0, token, queue_s=0.25 if step == 2 else None), float(step)) is entry
    resumption = entry.resumption()
    assert (resumption.prompt, resumption.made, resumption.seed) == ([1, 1, 1], [7, 8], 9)
    assert (entry.first_s, entry.queue_s) == (2.0, 0.25)
    ledger.take(Progress("a", 0, 9), 4.0)
    assert resumption.made == [7, 8]  # a copy


def test_what_has_ended_or_was_dropped_is_forgotten() -> None:
    ledger = Ledger()
    ledger.add(submissions("a", [1, 1]), 0.0)
    ledger.add(submissions("b", [1]), 0.0)
    ledger.take(Progress("a", 1, 5, finish_reason="length"), 1.0)
    assert ledger.num_live == 2
    assert ledger.take(Progress("a", 1, 5), 1.0) is None
    assert len(ledger.remove("a")) == 1
    assert ledger.remove("a") == []
    assert [entry.submission.request_id for entry in ledger.entries()] == ["b"]
    assert ledger.take(Progress("gone", 0, 5), 1.0) is None


def test_losses_are_forgiven_by_a_token() -> None:
    ledger = Ledger()
    (entry,) = ledger.add(submissions("a", [1]), 0.0)
    entry.num_losses = 2
    ledger.take(Progress("a", 0, 5), 1.0)
    assert entry.num_losses == 0


def test_the_least_loaded_rank_has_fewest_completions_then_fewest_tokens() -> None:
    ledger = Ledger()
    for entry, rank in zip(ledger.add(submissions("a", [50, 5, 5]), 0.0), (0, 1, 2), strict=True):
        entry.rank = rank
    assert ledger.least_loaded(3) == 1
    assert ledger.least_loaded(4) == 3
    for entry in ledger.add(submissions("b", [1, 1]), 0.0):
        entry.rank = 1
    assert ledger.least_loaded(3) == 2
