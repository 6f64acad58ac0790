"""Processor time of the decisions on the critical path, and of a plan with them, on synthetic loads.

    python benchmarks/policy.py [--cases 60] [--json FILE]

Times are of this thread only, the least of seven repeats a case, so that other programs count little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "policy"))

from cases import GPT_OSS_H200, ring_cases, skewed_loads

from moeless.policy.balancers import make_balancer
from moeless.policy.config import BALANCERS
from moeless.policy.flow import balanced
from moeless.policy.layout import Layout
from moeless.policy.roofline import roofline
from moeless.policy.types import EpShape

SIZES = ((32, 8, 40), (64, 8, 72), (64, 8, 80), (256, 64, 320))


def cpu_us(work: Callable[[], object]) -> float:
    """Microseconds of this thread's processor time in `work`."""
    start = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - start)


def split_us(sizes: tuple[int, int, int], split: str, num_cases: int) -> list[float]:
    """The time of one split for each random case."""
    shape = EpShape(*sizes)
    found = []
    for counts_E, placement in ring_cases(shape, num_cases):
        layout = Layout(placement, shape.num_ranks)
        if split == "balanced":
            run = partial(balanced, counts_E, layout)
        else:
            run = partial(roofline, counts_E, layout, GPT_OSS_H200)
        found.append(min(cpu_us(run) for _ in range(7)))
    return found


def decision_us(name: str, num_iterations: int = 240) -> float:
    """Plan, split and observe together, mean of a layer and iteration at E=64, G=8, 72 slots."""
    shape, rng = EpShape(64, 8, 72), np.random.default_rng(0)
    loads = [skewed_loads(rng, 64, 4096) for _ in range(num_iterations)]
    balancer = make_balancer(name, shape, 1, GPT_OSS_H200)
    resident = balancer.initial(0)

    def run() -> None:
        nonlocal resident
        for i, counts_E in enumerate(loads):
            resident = balancer.plan(i, 0, counts_E.astype(float), resident).placement
            balancer.observe(i, 0, counts_E, balancer.split(0, counts_E, resident))

    return cpu_us(run) / num_iterations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=60, help="random cases a size")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    result: dict[str, dict[str, float]] = {"split_us": {}, "decision_us": {}}
    for sizes in SIZES:
        for split in ("balanced", "roofline"):
            times = split_us(sizes, split, args.cases)
            name = f"{split} E={sizes[0]} G={sizes[1]} slots={sizes[2]}"
            result["split_us"][name] = float(np.median(times))
            print(f"{name}: median {np.median(times):.0f} us, 90 % {np.quantile(times, 0.9):.0f} us")
    for balancer in BALANCERS:
        result["decision_us"][balancer] = decision_us(balancer)
        print(f"plan, split and observe, {balancer}: {result['decision_us'][balancer]:.0f} us a layer and iteration")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
