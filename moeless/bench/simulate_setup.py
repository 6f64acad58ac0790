"""From a simulate configuration to what is simulated: the loads of every iteration, and the machine they run on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moeless.bench.arrivals import poisson_arrivals, read_arrivals
from moeless.bench.simulate_predict import halve
from moeless.bench.simulate_replay import ReplaySettings
from moeless.bench.workload import (
    Batches,
    closed_loop,
    continuous_batches,
    loads_of,
    prompt_batches,
    second_batches,
    switch_domain,
    token_chunks,
)
from moeless.config.simulate import SimulateConfig
from moeless.errors import DataError, UsageError
from moeless.policy.cost import CLUSTERS, MODELS, Cluster, CostModel, ModelShape, cost_of
from moeless.policy.types import EpShape
from moeless.trace.formats import read_trace
from moeless.trace.loads import LoadTrace
from moeless.trace.routes import Routes

T = TypeVar("T", Cluster, ModelShape)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The loads to simulate, the routes they were composed of (None for a trace of counts) and what to know of them."""

    trace: LoadTrace
    routes: Routes | None
    training: Routes | None
    description: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes, cost model and clockwork of the simulated ranks."""

    shape: EpShape
    cost: CostModel
    settings: ReplaySettings
    notes: tuple[str, ...]


def load_source(config: SimulateConfig) -> Routes | LoadTrace:
    """Read the trace and keep the layers asked for. A trace of this engine with token ids can be batched anew.

    Raises:
        DataError: see `trace.formats.read_trace`.
        UsageError: a layer that is not there.
    """
    source = read_trace(config.routes, config.num_experts)
    if isinstance(source, LoadTrace) and source.ids_TLK is not None and _composes(config):
        source = source.to_routes()
    if config.layer_numbers is None:
        return source
    if isinstance(source, Routes):
        return source.select_layers(config.layer_numbers)
    if max(config.layer_numbers) >= source.num_layers:
        raise UsageError(f"layer {max(config.layer_numbers)} is not in {source.name!r}, which has {source.num_layers}")
    return source.select(layers=config.layer_numbers)


def build_workload(config: SimulateConfig, source: Routes | LoadTrace) -> Workload:
    """Compose the iterations, or take them as recorded.

    Raises:
        UsageError: a flag that has no effect on this kind of trace.
        DataError: too little in the trace for what is asked.
    """
    if isinstance(source, LoadTrace):
        return _recorded_workload(config, source)
    training = None
    if config.predictor_name == "conditional":
        if config.distance >= source.num_layers:
            raise UsageError(
                f"--distance {config.distance} leaves no layer to predict: the routes have {source.num_layers} layers"
            )
        training, source = halve(source)
    if config.predictor_name == "recorded":
        raise UsageError("--predictor recorded needs a trace with predicted counts, not one of token ids")
    if config.scenario == "switch":
        halves = switch_domain(source, *config.switch_labels)
        counts = (config.iterations - config.iterations // 2, config.iterations // 2)
        parts = [
            (routes, _compose(config, routes, n, config.seed + i))
            for i, (routes, n) in enumerate(zip(halves, counts, strict=True))
        ]
    else:
        parts = [(source, _compose(config, source, config.iterations, config.seed))]
    trace = loads_of(parts, source.name)
    notes = [*source.notes]
    if trace.num_iterations < config.iterations:
        notes.append(f"the workload ended after {trace.num_iterations} of {config.iterations} iterations")
    if (config.arrivals or config.rate) and source.phase != "mixed":
        other = "prompts" if source.phase == "decode" else "outputs"
        notes.append(f"these are {source.phase} routes only, so the requests' {other} take no part")
    wrong = {"decode": config.prompts, "prefill": config.streams}.get(source.phase)
    if wrong is not None:
        notes.append(f"these routes were recorded in {source.phase}; the other phase may route otherwise")
    return Workload(
        trace=trace, routes=source, training=training, description=_describe(config, source), notes=tuple(notes)
    )


def build_machine(config: SimulateConfig, trace: LoadTrace, top_k: int | None) -> Machine:
    """The cluster with the model's expert size.

    Raises:
        UsageError: an unknown cluster or model, or sizes that do not fit.
        CapacityError: fewer slots than experts.
    """
    cluster = _preset("--cluster", config.cluster, CLUSTERS, Cluster)
    num_ranks = config.ranks or cluster.num_ranks
    model_name, model, notes = _model(config, trace, top_k)
    cost = cost_of(model, cluster)
    if config.cost == "linear":
        cost = replace(cost, floor_us=0.0)
    num_slots = config.slots_per_layer or (-(-trace.num_experts // num_ranks) + 1) * num_ranks
    shape = EpShape(num_experts=trace.num_experts, num_ranks=num_ranks, num_slots=num_slots)
    settings = ReplaySettings(
        num_ranks=num_ranks,
        slots_per_rank=shape.slots_per_rank,
        distance=config.distance,
        other_us=config.other_us,
        free_copies=config.copies == "free",
        cold_start=config.start == "cold",
    )
    origin = "from data sheets" if config.cluster in CLUSTERS else "as that file says"
    size = f"expert size of {model_name}: {cost.expert_bytes / 1e6:.1f} MB"
    notes += (f"{size}; rates of {config.cluster} {origin}",)
    return Machine(shape=shape, cost=cost, settings=settings, notes=notes)


def _composes(config: SimulateConfig) -> bool:
    composers = (config.streams, config.prompts, config.tokens_per_iteration, config.arrivals, config.rate)
    return any(value is not None for value in composers)


def _recorded_workload(config: SimulateConfig, trace: LoadTrace) -> Workload:
    if _composes(config) or config.scenario == "switch":
        raise UsageError(f"{str(config.routes)!r} holds counts of iterations as they ran; they cannot be batched anew")
    if config.predictor_name == "conditional":
        raise UsageError("--predictor conditional needs a trace with the experts of each token, not counts")
    if trace.num_iterations <= config.warmup:
        raise UsageError(f"--warmup {config.warmup} leaves nothing of the trace's {trace.num_iterations} iterations")
    kept = trace.select(num_iterations=config.iterations)
    description = f"{kept.num_iterations} iterations as recorded"
    return Workload(trace=kept, routes=None, training=None, description=description, notes=trace.notes)


def _compose(config: SimulateConfig, routes: Routes, num_iterations: int, seed: int) -> Batches:
    if config.arrivals is not None or config.rate is not None:
        return _compose_arrivals(config, routes, num_iterations)
    if config.streams is not None:
        return closed_loop(routes, config.streams, num_iterations, seed)
    if config.prompts is not None:
        return prompt_batches(routes, config.prompts, num_iterations)
    if config.tokens_per_iteration is not None:
        return token_chunks(routes, config.tokens_per_iteration, num_iterations)
    if routes.phase == "decode":
        return closed_loop(routes, 64, num_iterations, seed)
    if routes.phase == "prefill":
        return prompt_batches(routes, 16, num_iterations)
    return token_chunks(routes, min(32, routes.num_tokens), num_iterations)


def _compose_arrivals(config: SimulateConfig, routes: Routes, num_iterations: int) -> Batches:
    if config.arrivals is not None:
        arrivals = read_arrivals(config.arrivals)
    else:
        assert config.rate is not None
        lengths = routes.lengths_S[routes.lengths_S > 0]
        arrivals = poisson_arrivals(config.rate, lengths, max(1_000, num_iterations), config.seed)
    if config.batching == "second":
        return second_batches(routes, arrivals, num_iterations=num_iterations, seed=config.seed)
    return continuous_batches(
        routes,
        arrivals,
        num_iterations=num_iterations,
        iteration_s=config.iteration_ms / 1e3,
        max_tokens=config.max_batch_tokens,
        seed=config.seed,
    )


def _describe(config: SimulateConfig, routes: Routes) -> str:
    if config.arrivals is not None or config.rate is not None:
        source = config.arrivals.name if config.arrivals is not None else f"Poisson {config.rate:g}/s"
        return f"{config.batching} batching of {source}"
    text = f"{config.tokens_per_iteration or 32} consecutive tokens an iteration"
    if config.streams is not None or (routes.phase == "decode" and not _composes(config)):
        text = f"{config.streams or 64} streams decoding, closed loop"
    elif config.prompts is not None or (routes.phase == "prefill" and not _composes(config)):
        text = f"prefill of {config.prompts or 16} prompts an iteration"
    return text + (f", switching from {' to '.join(config.switch_labels)}" if config.scenario == "switch" else "")


def _model(config: SimulateConfig, trace: LoadTrace, top_k: int | None) -> tuple[str, ModelShape, tuple[str, ...]]:
    """The model's name and shape, and a note when the routes are another model's."""
    if config.model_shape is None:
        fits = [
            name
            for name, shape in MODELS.items()
            if shape.num_experts == trace.num_experts
            and top_k in (None, shape.top_k)
            and trace.num_layers <= shape.num_layers
        ]
        if len(fits) != 1:
            found = f"{trace.num_layers} layers, {trace.num_experts} experts, k {top_k or 'unknown'}"
            raise UsageError(f"give --model-shape ({', '.join(MODELS)} or a JSON file): the routes have {found}")
        return fits[0], MODELS[fits[0]], ()
    model = _preset("--model-shape", config.model_shape, MODELS, ModelShape)
    if model.num_experts == trace.num_experts and top_k in (None, model.top_k):
        return config.model_shape, model, ()
    note = (
        f"only the size of an expert is {config.model_shape}'s: the routes are another model's, with "
        f"{trace.num_experts} experts, so no number here is a result of {config.model_shape}"
    )
    return config.model_shape, model, (note,)


def _preset(flag: str, text: str, presets: dict[str, T], kind: type[T]) -> T:
    """A preset by name, or one read from a JSON file with the fields of its class."""
    if text in presets:
        return presets[text]
    path = Path(text)
    if path.suffix != ".json":
        raise UsageError(f"{flag} must be one of {', '.join(presets)} or a .json file, got {text!r}")
    types = {f.name: f.type for f in dataclasses.fields(kind)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wrong = [k for k in content if k not in types] + [k for k in required if k not in content]
        wrong += [k for k, v in content.items() if k in types and not _positive(v, whole=types[k] == "int")]
        if wrong:
            raise ValueError(f"needs positive numbers {', '.join(required)}; wrong or missing: {', '.join(wrong)}")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{flag} {text}: {error}") from error
    return kind(**content)


def _positive(value: Any, *, whole: bool) -> bool:
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(np.isfinite(value)) and value > 0
