"""Which tokens of which sequences run in the next step.

First come, first served. Decoding sequences go first, then prompts, cut into chunks that fit the step's token budget.
When the key-value cache is full, the youngest sequence gives its room up and is computed again later; the oldest always
goes on, so every request ends. Knows nothing of models or tensors.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Protocol

from moeless.engine.sequence import Sequence

_MAX_AHEAD = 256
"""Tokens of room that a sequence gets for what it has yet to make."""


class RoomKeeper(Protocol):
    """What the scheduler needs of the key-value cache."""

    def reserve(self, sequence_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` of a sequence in all, or say no."""
        ...

    def release(self, sequence_id: int) -> None:
        """Give a sequence's room back."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens num_computed .. num_computed + num_new of a sequence."""

    sequence: Sequence
    num_new: int

    @property
    def is_last(self) -> bool:
        """Whether a new token follows: the chunk reaches the sequence's end."""
        return self.num_new == self.sequence.num_uncomputed


class Scheduler:
    """The waiting and the running sequences of one rank."""

    def __init__(self, kv: RoomKeeper, *, max_batch_tokens: int, max_seqs: int) -> None:
        self._kv = kv
        self._max_batch_tokens = max_batch_tokens
        self._max_seqs = max_seqs
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, before younger ones."""
        insort(self.waiting, sequence, key=lambda s: s.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence that has finished or is no longer wanted."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._kv.release(sequence.sequence_id)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks; empty only when there is no work."""
        preempted = self._make_room()
        budget, chunks = self._max_batch_tokens, []
        for sequence in sorted(self.running, key=lambda s: (s.num_uncomputed > 1, s.sequence_id)):
            if num_new := min(sequence.num_uncomputed, budget):
                chunks.append(Chunk(sequence, num_new))
                budget -= num_new
        while self.waiting and budget and len(self.running) < self._max_seqs and not preempted:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.running.append(self.waiting.pop(0))
            chunks.append(Chunk(sequence, min(sequence.num_uncomputed, budget)))
            budget -= chunks[-1].num_new
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Find room for a new sequence, with some ahead if there is so much, since growing may mean moving."""
        num_tokens, sequence_id = len(sequence.tokens), sequence.sequence_id
        ahead = min(sequence.max_tokens - sequence.num_output, _MAX_AHEAD)
        return self._kv.reserve(sequence_id, num_tokens + ahead) or self._kv.reserve(sequence_id, num_tokens)

    def _make_room(self) -> bool:
        """Give every running sequence room for its tokens, the oldest first; whether any had to be preempted."""
        before = self.num_preemptions
        for sequence in sorted(self.running, key=lambda s: s.sequence_id):
            while sequence in self.running and not self._kv.reserve(sequence.sequence_id, len(sequence.tokens)):
                self._preempt(max(self.running, key=lambda s: s.sequence_id))
        return self.num_preemptions > before and bool(self.running)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._kv.release(sequence.sequence_id)
        sequence.forget()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)
