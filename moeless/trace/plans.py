"""Static plans for other engines: TensorRT-LLM's load balancer YAML and SGLang's expert location JSON.

Both say which expert sits in which physical slot of every layer; slots are numbered rank by rank. Legend: L MoE layers,
E experts, G ranks, P physical slots of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeless.errors import CapacityError, DataError
from moeless.files import write_text

Hosts = Sequence[Sequence[int]]
"""Of each expert the ranks that hold it."""


def slot_map(hosts: Hosts, num_ranks: int, slots_per_rank: int) -> list[int]:
    """The expert in each physical slot [P] of one layer.

    Both engines fill every slot, so one that the plan leaves free gets the lowest expert its rank does not hold yet
    (or, with more slots on a rank than experts, again the rank's own).

    Raises:
        CapacityError: a rank with more experts than slots.
    """
    slots = []
    for rank in range(num_ranks):
        held = [expert for expert, ranks in enumerate(hosts) if rank in ranks]
        if len(held) > slots_per_rank:
            raise CapacityError(f"rank {rank} holds {len(held)} experts but has {slots_per_rank} slots")
        spare = [expert for expert in range(len(hosts)) if expert not in held] + held
        free = slots_per_rank - len(held)
        slots += sorted(held + [spare[i % len(spare)] for i in range(free)])
    return slots


def hosts_of(slots_P: Sequence[int], num_experts: int, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The inverse of `slot_map`, fillers included: of each expert the ranks that hold it.

    Raises:
        DataError: slots that cannot be divided over the ranks, an id out of range, or an expert in no slot.
    """
    if len(slots_P) % num_ranks:
        raise DataError(f"{len(slots_P)} slots cannot be divided over {num_ranks} ranks")
    hosts: list[set[int]] = [set() for _ in range(num_experts)]
    for slot, expert in enumerate(slots_P):
        if not 0 <= expert < num_experts:
            raise DataError(f"slot {slot} holds expert {expert}, which is not below {num_experts}")
        hosts[expert].add(slot * num_ranks // len(slots_P))
    if not all(hosts):
        raise DataError(f"expert {next(e for e, ranks in enumerate(hosts) if not ranks)} is in no slot")
    return tuple(tuple(sorted(ranks)) for ranks in hosts)


def write_tensorrt(path: Path, slots_LP: NDArray[Any], first_layer: int = 0) -> None:
    """The value of TensorRT-LLM's `moe_config.load_balancer`, layers numbered from `first_layer`."""
    lines = [f"num_slots: {slots_LP.shape[1]}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {first_layer + layer}: {slots.tolist()}" for layer, slots in enumerate(slots_LP)]
    write_text(path, "\n".join(lines) + "\n")


def read_tensorrt_plan(path: Path) -> tuple[NDArray[np.int64], int]:
    """Slots [L, P] and the number of the first layer.

    Raises:
        DataError: not such a plan.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        layers = content["initial_global_assignments"]
        slots = np.array([layers[layer] for layer in sorted(layers)], np.int64)
        if slots.ndim != 2 or slots.shape[1] != content["num_slots"]:
            raise ValueError(f"rows of {slots.shape[1:]} slots where num_slots is {content['num_slots']}")
        return slots, min(layers)
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a TensorRT-LLM load balancer plan ({error})") from error


def write_sglang(path: Path, slots_LP: NDArray[Any], first_layer: int = 0) -> None:
    """The file of SGLang's `--init-expert-location`; it must hold nothing but the map.

    The map has a row for every layer of the model; those before `first_layer`, which have no experts, get experts in
    order.
    """
    num_slots = slots_LP.shape[1]
    unused = np.tile(np.arange(num_slots) % (int(slots_LP.max()) + 1), (first_layer, 1))
    rows = np.concatenate([unused, slots_LP])
    write_text(path, json.dumps({"physical_to_logical_map": rows.tolist()}) + "\n")


def read_sglang_plan(path: Path) -> NDArray[np.int64]:
    """Slots [L, P].

    Raises:
        DataError: not such a plan.
    """
    try:
        slots = np.array(json.loads(path.read_text(encoding="utf-8"))["physical_to_logical_map"], np.int64)
        if slots.ndim != 2:
            raise ValueError(f"a map of shape {slots.shape}, not [layers, slots]")
        return slots
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not an SGLang expert location ({error})") from error
