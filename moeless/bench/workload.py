"""Routes and arrivals -> the expert loads of iterations, as a scheduler would batch them.

Every composer returns one array of token indices into the routes for each iteration; `loads_of` counts them.

Legend: T tokens of the routes, L MoE layers, K experts a token, E experts, I iterations, B streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeless.bench.arrivals import Arrivals
from moeless.errors import DataError
from moeless.trace.loads import PHASES, LoadTrace
from moeless.trace.routes import Phase, Routes, count_experts, drop_sequences

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The tokens of each iteration (indices into the routes) and the phase each iteration is in."""

    tokens: list[Indices]
    phases: list[Phase]


def closed_loop(routes: Routes, num_streams: int, num_iterations: int, seed: int) -> Batches:
    """Decoding by B streams, each taking a new random sequence as soon as its last one ends: B tokens an iteration.

    The first sequences are entered somewhere in their middle, as if the loop had always been running.
    """
    rng = np.random.default_rng(seed)
    starts, ends = routes.offsets[:-1], routes.offsets[1:]
    usable = np.flatnonzero(ends > starts)
    chosen = rng.choice(usable, num_streams)
    position = starts[chosen] + (rng.random(num_streams) * 0.9 * (ends - starts)[chosen]).astype(np.int64)
    end = ends[chosen]
    tokens = []
    for _ in range(num_iterations):
        tokens.append(position.copy())
        position += 1
        over = np.flatnonzero(position >= end)
        if len(over):
            chosen = rng.choice(usable, len(over))
            position[over], end[over] = starts[chosen], ends[chosen]
    return Batches(tokens=tokens, phases=["decode"] * num_iterations)


def prompt_batches(routes: Routes, num_prompts: int, num_iterations: int) -> Batches:
    """Prefill of `num_prompts` whole sequences an iteration, in the order of the routes, round and round."""
    num_sequences = len(routes.offsets) - 1
    tokens = []
    for i in range(num_iterations):
        picked = (i * num_prompts + np.arange(num_prompts)) % num_sequences
        tokens.append(np.concatenate([np.arange(routes.offsets[s], routes.offsets[s + 1]) for s in picked]))
    return Batches(tokens=tokens, phases=["prefill"] * num_iterations)


def token_chunks(routes: Routes, tokens_per_iteration: int, num_iterations: int) -> Batches:
    """Consecutive tokens of the routes, as many an iteration; the incomplete last chunk is left out, then round again.

    Raises:
        DataError: fewer tokens than one chunk.
    """
    num_chunks = routes.num_tokens // tokens_per_iteration
    if not num_chunks:
        raise DataError(
            f"{routes.name}: has {routes.num_tokens} tokens, fewer than one iteration of {tokens_per_iteration}"
        )
    firsts = np.arange(num_iterations) % num_chunks * tokens_per_iteration
    return Batches(
        tokens=[first + np.arange(tokens_per_iteration) for first in firsts], phases=[routes.phase] * num_iterations
    )


def continuous_batches(
    routes: Routes, arrivals: Arrivals, *, num_iterations: int, iteration_s: float, max_tokens: int, seed: int
) -> Batches:
    """Continuous batching: requests join when they have arrived, and leave when all their tokens are out.

    An iteration takes `iteration_s` whatever is in it, so that all balancers see the same batches. Decoding requests
    come first, one token each; the room left up to `max_tokens` goes to prompts in order of arrival, in chunks. Routes
    of one phase stand for that phase alone: the other takes no tokens and no time. A request's tokens are consecutive
    ones of the routes from a random sequence's start on. Iterations without any token are left out.
    """
    prompts, outputs = _phase_lengths(routes, arrivals)
    position = _random_starts(routes, len(arrivals), seed)
    num_waiting_from = 0
    waiting: list[int] = []
    running: list[int] = []
    batches = Batches(tokens=[], phases=[])
    now = 0.0
    while len(batches.tokens) < num_iterations:
        while num_waiting_from < len(arrivals) and arrivals.times_s_N[num_waiting_from] <= now:
            waiting.append(num_waiting_from)
            num_waiting_from += 1
        if not waiting and not running:
            if num_waiting_from == len(arrivals):
                break
            now = float(arrivals.times_s_N[num_waiting_from])
            continue
        decoding = running[:max_tokens]
        taken = [(request, 1) for request in decoding]
        room = max_tokens - len(decoding)
        while waiting and room > 0:
            chunk = min(room, int(prompts[waiting[0]]))
            taken.append((waiting[0], chunk))
            prompts[waiting[0]] -= chunk
            room -= chunk
            if prompts[waiting[0]] > 0:
                break
            running.append(waiting.pop(0))
        _append(batches, routes, position, taken, len(decoding))
        for request in decoding:
            outputs[request] -= 1
        running = [request for request in running if outputs[request] > 0]
        now += iteration_s
    return batches


def second_batches(routes: Routes, arrivals: Arrivals, *, num_iterations: int, seed: int) -> Batches:
    """The paper's batching (section 6.1): all requests of one second are a batch, run to its end before the next.

    A batch is one prefill iteration of all its prompts, then decode iterations of those not yet finished.
    """
    prompts, outputs = _phase_lengths(routes, arrivals)
    position = _random_starts(routes, len(arrivals), seed)
    batches = Batches(tokens=[], phases=[])
    seconds = np.floor(arrivals.times_s_N).astype(np.int64)
    for second in np.unique(seconds):
        batch = np.flatnonzero(seconds == second)
        _append(batches, routes, position, [(int(r), int(prompts[r])) for r in batch], 0)
        for step in range(int(outputs[batch].max())):
            alive = batch[outputs[batch] > step]
            _append(batches, routes, position, [(int(r), 1) for r in alive], len(alive))
            if len(batches.tokens) >= num_iterations:
                break
        if len(batches.tokens) >= num_iterations:
            break
    return batches


def switch_domain(routes: Routes, first: str, second: str) -> tuple[Routes, Routes]:
    """The routes of the sequences labelled `first`, and of those labelled `second`.

    Raises:
        DataError: no sequence has such a label.
    """
    halves = []
    for text in (first, second):
        drop = np.ones(len(routes.offsets) - 1, bool)
        drop[routes.sequences_labelled(text)] = False
        halves.append(drop_sequences(routes, drop, f"not labelled {text!r}"))
    return halves[0], halves[1]


def loads_of(parts: list[tuple[Routes, Batches]], name: str) -> LoadTrace:
    """Count the experts of every iteration; the parts follow one another.

    Raises:
        DataError: no iteration at all.
    """
    counts, phases, sizes = [], [], []
    for routes, batches in parts:
        counts += [count_experts(routes.ids_TLK[tokens], routes.num_experts) for tokens in batches.tokens]
        phases += [PHASES.index(phase) for phase in batches.phases]
        sizes += [len(tokens) for tokens in batches.tokens]
    if not counts:
        raise DataError(f"{name}: the workload has no iteration with a token in it")
    first = parts[0][0]
    return LoadTrace(
        counts_ILE=np.stack(counts),
        phases_I=np.array(phases, np.uint8),
        num_tokens_I=np.array(sizes, np.int32),
        name=name,
        metadata={"top_k": first.top_k},
        notes=first.notes,
    )


def _phase_lengths(routes: Routes, arrivals: Arrivals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Prompt and output tokens of each request that these routes can stand for."""
    prompts, outputs = arrivals.prompt_tokens_N.copy(), arrivals.output_tokens_N.copy()
    if routes.phase == "decode":
        prompts[:] = 0
    if routes.phase == "prefill":
        outputs[:] = 0
    return prompts, outputs


def _random_starts(routes: Routes, num_requests: int, seed: int) -> NDArray[np.int64]:
    starts = routes.offsets[:-1][routes.lengths_S > 0]
    return np.random.default_rng(seed).choice(starts, num_requests)


def _append(
    batches: Batches, routes: Routes, position: NDArray[np.int64], taken: list[tuple[int, int]], num_decoding: int
) -> None:
    """Take so many tokens for each request from where it stands, and close the iteration unless it is empty."""
    pieces = [(position[request] + np.arange(count)) % routes.num_tokens for request, count in taken if count]
    for request, count in taken:
        position[request] += count
    if not pieces:
        return
    batches.tokens.append(np.concatenate(pieces))
    if num_decoding == len(pieces):
        batches.phases.append("decode")
    else:
        batches.phases.append("mixed" if num_decoding else "prefill")
