"""Small steps from a placement to a better one: swaps, moves, added and replaced replicas.

Legend: K samples, E experts, G ranks, R slots in use (replicas), and one empty slot for every rank that has room.

All steps are screened by their first-order gain, which two matrix products give: how much load would leave the ranks
that are slow in a sample, times how slow they are. The few best are priced by the real split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeless.policy.cost import CostModel
from moeless.policy.portfolio import price, rank_times
from moeless.policy.types import EpShape, Floats, Ints, Placement, as_mask, moves, num_replicas

# Width of the soft maximum that says which ranks are slow, relative to the slowest.
_SOFTNESS = 0.01

# Samples that all screened steps are priced on before the best of them are priced on all samples.
_NUM_PROBES = 4


@dataclass(frozen=True)
class StepPrice:
    """When a step is worth it.

    It must gain `min_gain` of the time, `us_per_copy` for every replica to load, and `num_errors` standard errors of
    the gain over the samples: with few tokens an iteration most gains on a handful of samples are luck.
    """

    min_gain: float = 0.0
    us_per_copy: float = 0.0
    num_errors: float = 0.0


def improve(
    placement: Placement,
    samples_KE: Ints,
    shape: EpShape,
    cost: CostModel,
    steps: int,
    step_price: StepPrice = StepPrice(),
    resident: Placement | None = None,
    num_tries: int = 8,
) -> tuple[Placement, float]:
    """At most `steps` best steps from `placement`. Returns the placement and its mean time on the samples in us.

    Args:
        resident: replicas that need no copy; `placement` by default.
        num_tries: screened steps that are priced for each step made.
    """
    resident = placement if resident is None else resident
    bound = cost.bound_us(samples_KE, shape.num_ranks)
    probes_KE = samples_KE[:: max(1, len(samples_KE) // _NUM_PROBES)]
    times_KG = rank_times(placement, samples_KE, shape.num_ranks, cost)
    num_copies = len(moves(resident, placement)[0])
    for _ in range(steps):
        now_K = times_KG.max(1)
        if now_K.mean() <= bound * 1.002:
            break
        options = proposals(placement, times_KG, samples_KE, shape, cost)[:num_tries]
        copies = [len(moves(resident, option)[0]) - num_copies for option in options]
        probed = sorted(
            (price(option, probes_KE, shape.num_ranks, cost) + step_price.us_per_copy * num, i)
            for i, (option, num) in enumerate(zip(options, copies, strict=True))
        )
        best_gain, best = 0.0, None
        for _, i in probed[:2]:
            option_KG = rank_times(options[i], samples_KE, shape.num_ranks, cost)
            gain_K = now_K - option_KG.max(1)
            error = float(gain_K.std()) / len(gain_K) ** 0.5
            due = step_price.us_per_copy * copies[i] + step_price.num_errors * error
            gain = float(gain_K.mean()) - due - (step_price.min_gain + 1e-9) * float(now_K.mean())
            if gain > best_gain:
                best_gain, best = gain, (options[i], option_KG, num_copies + copies[i])
        if best is None:
            break
        placement, times_KG, num_copies = best
    return placement, float(times_KG.max(1).mean())


def proposals(
    placement: Placement, times_KG: Floats, samples_KE: Ints, shape: EpShape, cost: CostModel
) -> list[Placement]:
    """Placements one step away, the most promising first."""
    picture = Picture(placement, times_KG, cost.expert_us(samples_KE), shape)
    found = _swaps(picture) + _additions(picture)
    found.sort(key=lambda entry: -entry[0])
    return list(dict.fromkeys(option for _, option in found))


class Picture:
    """A placement under load: what stands where, and which ranks are slow.

    Attributes:
        on_EG: replicas.
        pressure_KG: the price of one more microsecond on a rank: a soft version of "is the slowest", rows sum to 1.
    """

    def __init__(self, placement: Placement, times_KG: Floats, loads_KE: Floats, shape: EpShape) -> None:
        """`times_KG` are the ranks' times under the split, `loads_KE` the experts' times undivided, us."""
        self.placement = placement
        self.times_KG = times_KG
        self.loads_KE = loads_KE
        self.shape = shape
        self.on_EG = as_mask(placement, shape.num_ranks)
        top_K1 = times_KG.max(1, keepdims=True)
        pressure_KG = np.exp((times_KG - top_K1) / np.maximum(_SOFTNESS * top_K1, 1e-30))
        self.pressure_KG: Floats = pressure_KG / pressure_KG.sum(1, keepdims=True)

    def addition_gains(self) -> Floats:
        """First-order gain of one more replica of an expert on a rank [E, G], us; 0 where it has one already.

        What may flow there is limited by half the gap between the slowest host and that rank.
        """
        hosts = self.placement
        slowest_KE = np.stack([self.times_KG[:, ranks].max(1) for ranks in hosts], axis=1)
        pressure_KE = np.stack([self.pressure_KG[:, ranks].max(1) for ranks in hosts], axis=1)
        gap_KEG = np.maximum(slowest_KE[:, :, None] - self.times_KG[:, None, :], 0) * 0.5
        flow_KEG = np.minimum((self.loads_KE / self.on_EG.sum(1))[:, :, None], gap_KEG)
        gain_EG = (flow_KEG * np.maximum(pressure_KE[:, :, None] - self.pressure_KG[:, None, :], 0)).mean(0)
        return _rounded(np.where(self.on_EG, 0.0, gain_EG))


def _swaps(picture: Picture, most: int = 8) -> list[tuple[float, Placement]]:
    """Exchange the replica in slot i of a slow rank with that in slot j elsewhere, or move it to an empty slot."""
    on_EG, times_KG, pressure_KG = picture.on_EG, picture.times_KG, picture.pressure_KG
    expert_R, rank_R = np.nonzero(on_EG)
    empty_G = np.flatnonzero(on_EG.sum(0) < picture.shape.slots_per_rank)
    load_KR = picture.loads_KE[:, expert_R] / on_EG.sum(1)[expert_R]
    expert_J = np.concatenate([expert_R, np.full(len(empty_G), -1)])
    rank_J = np.concatenate([rank_R, empty_G])
    load_KJ = np.concatenate([load_KR, np.zeros((len(load_KR), len(empty_G)))], axis=1)
    slow = np.argsort(-_rounded(pressure_KG.mean(0)), kind="stable")[: max(4, picture.shape.num_ranks // 8)]
    from_R = np.flatnonzero(np.isin(rank_R, slow))
    i, j = (index.ravel() for index in np.meshgrid(from_R, np.arange(len(expert_J)), indexing="ij"))
    legal = ~on_EG[expert_R[i], rank_J[j]] & ((expert_J[j] < 0) | ~on_EG[expert_J[j], rank_R[i]])
    i, j = i[legal], j[legal]
    source, target = rank_R[i], rank_J[j]
    moved_K = load_KR[:, i] - load_KJ[:, j]
    receiver = np.where(moved_K > 0, times_KG[:, target], times_KG[:, source])
    # The level falls by the load moved times the difference in pressure, unless the receiver then overshoots it.
    room = times_KG.max(1, keepdims=True) - receiver - np.abs(moved_K)
    gain = _rounded(np.minimum(moved_K * (pressure_KG[:, source] - pressure_KG[:, target]), room).mean(0))
    found = []
    for t in np.argsort(-gain, kind="stable")[:most].tolist():
        changes = [(int(expert_R[i[t]]), int(source[t]), int(target[t]))]
        if expert_J[j[t]] >= 0:
            changes.append((int(expert_J[j[t]]), int(target[t]), int(source[t])))
        found.append((float(gain[t]), _changed(picture.placement, changes)))
    return found


def _additions(picture: Picture, most: int = 8) -> list[tuple[float, Placement]]:
    """Add a replica in a free slot, or in the place of another expert's spare replica on that rank."""
    shape, placement = picture.shape, picture.placement
    copies_E, used_G = picture.on_EG.sum(1), picture.on_EG.sum(0)
    gain_EG = picture.addition_gains()
    has_room = num_replicas(placement) < shape.num_slots
    found = []
    for t in np.argsort(-gain_EG, axis=None, kind="stable")[:most].tolist():
        expert, rank = divmod(t, shape.num_ranks)
        gain = float(gain_EG[expert, rank])
        if gain <= 0:
            break
        if has_room and used_G[rank] < shape.slots_per_rank:
            found.append((gain, _changed(placement, [(expert, -1, rank)])))
            continue
        for spare in np.flatnonzero(picture.on_EG[:, rank] & (copies_E > 1)).tolist():
            lost = 0.05 * float(picture.loads_KE[:, spare].mean())
            found.append((gain - lost, _changed(placement, [(expert, -1, rank), (spare, rank, -1)])))
    return found


def _rounded(gain_us: Floats) -> Floats:
    """Gains without their last digits, in which processors with other vector units differ: ties stay ties."""
    return np.round(gain_us, 6)


def _changed(placement: Placement, changes: list[tuple[int, int, int]]) -> Placement:
    """`placement` with (expert, from rank, to rank) carried out; -1 is nowhere."""
    hosts = list(placement)
    for expert, source, target in changes:
        ranks = set(hosts[expert]) - {source}
        hosts[expert] = tuple(sorted(ranks | {target} if target >= 0 else ranks))
    return tuple(hosts)
