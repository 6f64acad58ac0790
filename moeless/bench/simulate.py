"""`moeless bench simulate`: which balancing method would pay for a trace of routed experts on a given cluster.

Every number is modelled from the routes given, and says so. Balancers and cost model are those of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from moeless import metrics
from moeless.bench.simulate_predict import predict_loads
from moeless.bench.simulate_replay import Replay, replay
from moeless.bench.simulate_rows import make_row, settled_after
from moeless.bench.simulate_setup import Machine, Workload, build_machine, build_workload, load_source
from moeless.bench.simulate_sweep import sweep_points, sweep_row
from moeless.bench.simulate_verdict import verdict
from moeless.config.simulate import SimulateConfig
from moeless.files import require_writable, write_json
from moeless.policy.balancers import make_balancer
from moeless.policy.config import BALANCERS, BalancerConfig
from moeless.result import result_header
from moeless.trace.loads import LoadTrace
from moeless.trace.plans import slot_map, write_sglang, write_tensorrt
from moeless.trace.routes import Routes

SCHEMA = "moeless.simulate/1"


def run_simulate(config: SimulateConfig, *, show_progress: bool = False) -> dict[str, Any]:
    """Simulate, and write `simulate.json` and its pictures to `config.out`.

    Raises:
        UsageError, DataError, CapacityError: see `simulate_setup`.
    """
    require_writable(config.out)
    source = load_source(config)
    methods = {name: _method(config, BALANCERS[name]) for name in ("static", *config.balancer_names)}
    points = sweep_points(config, source, methods)
    with _progress(show_progress, 1 + len(points)) as begin:
        workload = build_workload(config, source)
        machine = build_machine(config, workload.trace, _top_k(workload))
        runs = run_methods(config, workload, machine, methods, begin("balancers"))
        history = _history_run(config, workload, machine, begin("history alone"))
        sweeps = [
            {"sweep": sweep, "value": value, "balancers": _sweep_rows(point, source, varied, begin(f"{sweep} {value}"))}
            for sweep, value, point, varied in points
        ]
    rows = _rows(config, workload, machine, methods, runs)
    result = result_header(SCHEMA, "simulated", config)
    result |= {
        "routes": _describe_routes(workload),
        "machine": _describe_machine(machine),
        "notes": [*workload.notes, *machine.notes],
        "balancers": rows,
        "sweeps": sweeps,
        "verdict": verdict(rows, history),
    }
    if config.scenario == "switch":
        start = workload.trace.num_iterations - workload.trace.num_iterations // 2
        settled = {row["name"]: settled_after(row["timeline"]["time_over_bound"], start) for row in rows}
        result["switch"] = {"iteration": start, "settled_after": settled}
    write_json(config.out / "simulate.json", result)
    if config.export_plan is not None:
        _export_plan(config, machine, runs["moeless-roofline"])
    if config.plots:
        from moeless.bench.simulate_plots import draw_simulate

        draw_simulate(result, config.out)
    return result


def run_methods(
    config: SimulateConfig,
    workload: Workload,
    machine: Machine,
    methods: dict[str, BalancerConfig],
    advance: Callable[[float], None],
) -> dict[str, Replay]:
    """Replay the workload under each method.

    Args:
        advance: told the share of the work done since it was last called.
    """
    trace = workload.trace
    predicted = predict_loads(
        config.predictor_name,
        trace,
        distance=config.distance,
        noise=config.noise,
        seed=config.seed,
        training=workload.training,
    )
    step = 1 / (len(methods) * trace.num_iterations)
    return {
        name: replay(
            trace,
            predicted,
            make_balancer(method, machine.shape, trace.num_layers, machine.cost),
            machine.cost,
            machine.settings,
            lambda: advance(step),
        )
        for name, method in methods.items()
    }


def _method(config: SimulateConfig, method: BalancerConfig) -> BalancerConfig:
    """A balancer with this run's threshold and interval.

    Free copies cost nothing, so plans are made anew from every prediction; and when that is the truth, from it alone.
    """
    method = replace(method, cv_threshold=config.cv_threshold)
    if config.interval is not None and method.interval > 0:
        method = replace(method, interval=config.interval)
    if config.copies == "timed" or method.loads != "predicted":
        return method
    method = replace(method, copy_price=0.0, min_gain=0.0)
    if config.predictor_name == "history":
        return method
    loads = "true" if config.predictor_name == "actual" else method.loads
    return replace(method, loads=loads, interval=0)


def _history_run(
    config: SimulateConfig, workload: Workload, machine: Machine, advance: Callable[[float], None]
) -> dict[str, Any] | None:
    """moeless-roofline without predictions, to tell what they are worth; None where the rows have none anyway."""
    if config.predictor_name == "history" or "moeless-roofline" not in config.balancer_names:
        return None
    plain = replace(config, predictor="history")
    methods = {name: _method(plain, BALANCERS[name]) for name in ("static", "moeless-roofline")}
    runs = run_methods(plain, workload, machine, methods, advance)
    return _rows(plain, workload, machine, methods, runs)[1]


def _sweep_rows(
    config: SimulateConfig,
    source: Routes | LoadTrace,
    methods: dict[str, BalancerConfig],
    advance: Callable[[float], None],
) -> list[dict[str, Any]]:
    workload = build_workload(config, source)
    machine = build_machine(config, workload.trace, _top_k(workload))
    methods = {"static": BALANCERS["static"]} | methods
    runs = run_methods(config, workload, machine, methods, advance)
    return [sweep_row(row) for row in _rows(config, workload, machine, methods, runs)]


def _rows(
    config: SimulateConfig,
    workload: Workload,
    machine: Machine,
    methods: dict[str, BalancerConfig],
    runs: dict[str, Replay],
) -> list[dict[str, Any]]:
    warmup = min(config.warmup, workload.trace.num_iterations - 1)
    return [
        make_row(name, methods[name].lossy, run, runs["static"], workload.trace, machine.cost, warmup)
        for name, run in runs.items()
    ]


def _export_plan(config: SimulateConfig, machine: Machine, run: Replay) -> None:
    assert config.export_plan is not None
    slots = np.array(
        [slot_map(hosts, machine.shape.num_ranks, machine.shape.slots_per_rank) for hosts in run.placements]
    )
    write = write_tensorrt if config.export_plan.suffix == ".yaml" else write_sglang
    write(config.export_plan, slots, config.export_first_layer)


def _top_k(workload: Workload) -> int | None:
    top_k = workload.trace.metadata.get("top_k")
    return None if top_k is None else int(top_k)


def _describe_routes(workload: Workload) -> dict[str, Any]:
    trace = workload.trace
    return {
        "name": trace.name,
        "workload": workload.description,
        "iterations": trace.num_iterations,
        "layers": trace.num_layers,
        "experts": trace.num_experts,
        "top_k": _top_k(workload),
        "tokens_per_iteration": round(float(trace.num_tokens_I.mean()), 2),
        "expert_cv": round(float(np.mean(metrics.coefficient_of_variation(trace.counts_ILE))), 4),
        "expert_max_over_mean": round(float(np.mean(metrics.max_over_mean(trace.counts_ILE))), 4),
    }


def _describe_machine(machine: Machine) -> dict[str, Any]:
    shape, cost = machine.shape, machine.cost
    return {
        "ranks": shape.num_ranks,
        "slots_per_layer": shape.num_slots,
        "floor_us": cost.floor_us,
        "alpha_us": cost.alpha_us,
        "beta_us": cost.beta_us,
        "latency_us": cost.latency_us,
        "expert_bytes": int(cost.expert_bytes),
        "copy_us": cost.copy_us,
    }


@contextmanager
def _progress(show: bool, num_stages: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """A progress bar on stderr. `begin(stage)` names a stage and gives the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not show, transient=True) as progress:
        task = progress.add_task("", total=num_stages)

        def begin(stage: str) -> Callable[[float], None]:
            progress.update(task, description=stage)
            return lambda share: progress.update(task, advance=share)

        yield begin
