"""Text in pieces: whole characters, stop strings never sent and never held back for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moeless.engine.messages import Progress
from moeless.engine.request import CompletionOutput, SamplingParams
from moeless.engine.server.assembly import Assembly
from tests.engine.serving import make_sequence


@pytest.fixture(scope="session")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


def run(tokenizer: Any, tokens: list[int], params: SamplingParams, eos_ids: tuple[int, ...] = ()) -> list[str]:
    """The pieces for a sequence that gets `tokens`, as the engine and the assembly make them together."""
    sequence = make_sequence(0, [5], params, tokenizer=tokenizer, eos_ids=eos_ids)
    assembly, pieces = Assembly(tokenizer, params), []
    for token in tokens:
        sequence.append(token)
        output = None
        if sequence.finish_reason is not None:
            output = CompletionOutput(
                index=0, token_ids=(), text="", finish_reason=sequence.finish_reason, stop_reason=sequence.stop_reason
            )
        progress = Progress("0", 0, token, None, sequence.finish_reason, output)
        pieces.append(assembly.push(progress).text)
        if output is not None:
            break
    return pieces


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=40), data=st.data())
def test_pieces_make_the_text(tokenizer: Any, text: str, data: st.DataObject) -> None:
    tokens = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(tokens)
    params = SamplingParams(max_tokens=len(tokens), temperature=0, skip_special_tokens=False)
    pieces = run(tokenizer, tokens, params)
    assert "".join(pieces) == whole
    assert len(pieces) == len(tokens)  # one a token, empty inside a character
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 4))]
    stopped = "".join(run(tokenizer, tokens, SamplingParams(max_tokens=len(tokens), stop=stop)))
    if "\ufffd" not in whole:
        assert stopped == whole[: whole.index(stop)]
    kept = SamplingParams(max_tokens=len(tokens), stop=stop, include_stop_str_in_output=True)
    assert "".join(run(tokenizer, tokens, kept)).startswith(stopped)


def test_incomplete_characters_are_held_back(tokenizer: Any) -> None:
    tokens = tokenizer("a🙂b")["input_ids"]
    pieces = run(tokenizer, tokens, SamplingParams(max_tokens=len(tokens)))
    assert len(pieces) > 3
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    cut = run(tokenizer, tokens[:2], SamplingParams(max_tokens=2))
    assert cut[-1].endswith("\ufffd")  # nothing more comes: what there is is shown


def test_what_might_begin_a_stop_string_waits(tokenizer: Any) -> None:
    tokens = tokenizer("one two three")["input_ids"]
    params = SamplingParams(max_tokens=len(tokens), stop=["two four"])
    pieces = run(tokenizer, tokens, params)
    assert "".join(pieces) == "one two three"
    sent_before_three = "".join(pieces[:-1])
    assert not sent_before_three.endswith("two")


def test_stop_tokens_have_no_text_unless_asked_for(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    tokens = [*tokenizer("ab")["input_ids"], eos]
    hidden = SamplingParams(max_tokens=9, skip_special_tokens=False)
    assert "".join(run(tokenizer, tokens, hidden, (eos,))) == "ab"
    shown = SamplingParams(max_tokens=9, skip_special_tokens=False, include_stop_str_in_output=True)
    assert "".join(run(tokenizer, tokens, shown, (eos,))) == "ab" + tokenizer.decode([eos])
