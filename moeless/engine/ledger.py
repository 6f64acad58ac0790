"""What every unfinished completion was asked for and has been given so far, and which rank runs it.

The ledger is what makes a rank's death a pause instead of an error: the prompt, the parameters, the seed and the tokens
made so far are enough to go on anywhere, with the same tokens. Plain data; knows nothing of processes or clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moeless.engine.messages import Progress
from moeless.engine.request import TokenLogprobs
from moeless.engine.submission import Submission


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One completion. Times are of one monotonic clock, in seconds."""

    submission: Submission
    arrived_s: float
    rank: int | None = None
    """None: waits for a rank."""
    made: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    queue_s: float = 0.0
    num_losses: int = 0
    """Working groups of ranks that were lost under it since its last token."""

    def resumption(self) -> Submission:
        """What a rank needs to go on with it."""
        return replace(self.submission, made=list(self.made))

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.submission.prompt) + len(self.made)


class Ledger:
    """The unfinished completions by request."""

    def __init__(self) -> None:
        self._requests: dict[str, dict[int, Entry]] = {}
        self.num_live = 0
        """Completions that have not ended."""

    def add(self, submissions: Sequence[Submission], now_s: float) -> list[Entry]:
        """Enter completions; their request ids are new."""
        entries = [Entry(submission=submission, arrived_s=now_s) for submission in submissions]
        for entry in entries:
            self._requests.setdefault(entry.submission.request_id, {})[entry.submission.index] = entry
        self.num_live += len(entries)
        return entries

    def take(self, progress: Progress, now_s: float) -> Entry | None:
        """Note a completion's new token, and strike it out if it has ended; None when nobody wants it any more."""
        entry = self._requests.get(progress.request_id, {}).get(progress.index)
        if entry is None:
            return None
        if progress.token is not None:
            entry.made.append(progress.token)
            entry.num_losses = 0
            if progress.logprobs is not None:
                entry.logprobs.append(progress.logprobs)
            if entry.first_s is None:
                entry.first_s, entry.queue_s = now_s, progress.queue_s or 0.0
        if progress.finish_reason is not None:
            self._strike(entry)
        return entry

    def remove(self, request_id: str) -> list[Entry]:
        """Strike out what is left of a request."""
        entries = list(self._requests.get(request_id, {}).values())
        for entry in entries:
            self._strike(entry)
        return entries

    def entries(self) -> list[Entry]:
        """All unfinished completions, the oldest request first."""
        return [entry for request in self._requests.values() for entry in request.values()]

    def least_loaded(self, num_ranks: int) -> int:
        """The rank with the fewest completions, among those the one with the fewest tokens."""
        loads = [[0, 0, rank] for rank in range(num_ranks)]
        for entry in self.entries():
            if entry.rank is not None:
                loads[entry.rank][0] += 1
                loads[entry.rank][1] += entry.num_tokens
        return min(loads)[2]

    def _strike(self, entry: Entry) -> None:
        request = self._requests[entry.submission.request_id]
        del request[entry.submission.index]
        if not request:
            del self._requests[entry.submission.request_id]
        self.num_live -= 1
