"""Configuration of `moeless bench simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeless.config.options import Config, option, parse_int_set, parse_names
from moeless.errors import UsageError

# The balancers' own table is `policy.config.BALANCERS`; a test holds the two together.
BALANCER_NAMES = ("static", "eplb", "metro", "oracle", "bound", "moeless", "moeless-roofline")
SWEEPS = ("distance", "cv-threshold", "batch", "cost", "ablation")
_PREDICTORS = ("history", "recorded", "actual", "conditional", "noisy:S")
_COMPOSERS = ("streams", "prompts", "tokens_per_iteration", "arrivals", "rate")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Config):
    """Which balancing method would pay for this traffic on this cluster, from a trace of routed experts."""

    routes: Path = option(
        "Routing trace: per-token ids or counts, of this engine, vLLM, SGLang, TensorRT-LLM, CSV or JSONL.",
        group="Routes",
    )
    num_experts: int | None = option(
        "Experts a layer, where the trace does not say (default: largest id seen + 1).",
        default=None,
        minimum=1,
        group="Routes",
    )
    layers: str | None = option("Only these layers, such as 0-3,12.", default=None, group="Routes")

    iterations: int = option("Iterations to simulate.", default=200, minimum=2, group="Workload")
    warmup: int = option("First iterations that run but do not count.", default=32, minimum=0, group="Workload")
    streams: int | None = option(
        "Decode this many sequences together, closed loop (default for decode routes: 64).",
        default=None,
        minimum=1,
        group="Workload",
    )
    prompts: int | None = option(
        "Prefill this many prompts an iteration (default for prefill routes: 16).",
        default=None,
        minimum=1,
        group="Workload",
    )
    tokens_per_iteration: int | None = option(
        "Take this many consecutive tokens an iteration (default for other routes: 32).",
        default=None,
        minimum=1,
        group="Workload",
    )
    arrivals: Path | None = option("Requests from Azure's CSV or Mooncake's JSONL.", default=None, group="Workload")
    rate: float | None = option("Requests a second, Poisson.", default=None, minimum=0.001, group="Workload")
    batching: Literal["continuous", "second"] = option(
        "With arrivals: continuous batching, or the paper's batches of one second.",
        default="continuous",
        group="Workload",
    )
    iteration_ms: float = option(
        "With continuous batching: how long an iteration takes.", default=50.0, minimum=0.01, group="Workload"
    )
    max_batch_tokens: int = option(
        "With continuous batching: tokens of an iteration at most.", default=8_192, minimum=1, group="Workload"
    )
    scenario: Literal["stationary", "switch"] = option(
        "switch: after half the iterations the traffic changes domain.", default="stationary", group="Workload"
    )
    switch: str | None = option(
        "With --scenario switch: the two labels, such as gpqa,sorry_bench.", default=None, group="Workload"
    )
    seed: int = option("Seed of the workload and of noise.", default=0, minimum=0, group="Workload")

    cluster: str = option("8xa6000, 8xh200 or a JSON file of rates.", default="8xh200", group="Machine")
    ranks: int | None = option("Ranks, where they differ from the cluster's.", default=None, minimum=1, group="Machine")
    model_shape: str | None = option(
        "Model that gives an expert's size, or a JSON file (default: the known model with these experts and k).",
        default=None,
        group="Machine",
    )
    cost: Literal["roofline", "linear"] = option(
        "linear is the paper's alpha W; roofline adds the floor of reading an expert's weights.",
        default="roofline",
        group="Machine",
    )
    other_us: float = option("Time between two MoE layers.", default=40.0, minimum=0, group="Machine")
    copies: Literal["timed", "free"] = option(
        "timed: copies take their time and may be late; free: every plan is there at once.",
        default="timed",
        group="Machine",
    )
    start: Literal["warm", "cold"] = option(
        "cold: no expert is in memory at first (scale from zero).", default="warm", group="Machine"
    )

    balancers: str = option(
        f"Methods to compare with static, out of {', '.join(BALANCER_NAMES)}.",
        default="static,eplb,metro,oracle,moeless,moeless-roofline",
        group="Balancing",
    )
    predictor: str = option(
        "Where predicted loads come from: history, recorded, actual, noisy:S (the truth with a share S of error) or "
        "conditional (experts of layer l+d that follow those of layer l, learnt on half of the sequences).",
        default="history",
        group="Balancing",
    )
    distance: int = option("Prediction distance d in layers.", default=1, minimum=1, group="Balancing")
    slots_per_layer: int | None = option(
        "Room for replicas of a layer over all ranks (default: one spare slot a rank).",
        default=None,
        minimum=1,
        group="Balancing",
    )
    interval: int | None = option(
        "Iterations between plans of methods that plan now and then; 0: anew each time (default: each method's own).",
        default=None,
        minimum=0,
        group="Balancing",
    )
    cv_threshold: float = option("The paper's V.", default=0.2, minimum=0, group="Balancing")
    sweep: str | None = option(f"Also vary these: {', '.join(SWEEPS)}.", default=None, group="Balancing")
    batch_sizes: str = option(
        "Tokens an iteration for --sweep batch.",
        default="8,16,32,64,128,256,512,1024,2048,4096,8192",
        group="Balancing",
    )

    out: Path = option("Folder for simulate.json and the pictures.", default=Path("simulate"), group="Output")
    plots: bool = option("Draw pictures.", default=True, group="Output")
    export_plan: Path | None = option(
        "Write the last placement of moeless-roofline: .yaml for TensorRT-LLM, .json for SGLang.",
        default=None,
        group="Output",
    )
    export_first_layer: int = option(
        "Layers without experts before the first that has them, for the numbering of --export-plan.",
        default=0,
        minimum=0,
        group="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in _COMPOSERS if getattr(self, name) is not None]
        if len(given) > 1:
            flags = " and ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"{flags} exclude each other: each says how iterations are composed")
        self._check_effects(given)
        if self.warmup >= self.iterations:
            raise UsageError(f"--warmup {self.warmup} leaves nothing of --iterations {self.iterations}")
        if self.export_plan is not None and self.export_plan.suffix not in (".yaml", ".json"):
            raise UsageError(f"--export-plan must end in .yaml or .json, got {str(self.export_plan)!r}")
        if self.export_plan is not None and "moeless-roofline" not in self.balancer_names:
            raise UsageError("--export-plan needs moeless-roofline among --balancers")
        if self.export_plan is not None and self.layers is not None:
            raise UsageError("--export-plan needs a plan of all layers; leave out --layers")
        if self.export_first_layer and self.export_plan is None:
            raise UsageError("--export-first-layer has no effect without --export-plan")
        _ = self.predictor_name, self.noise, self.sweeps, self.balancer_names, self.layer_numbers, self.batch_list

    def _check_effects(self, given: list[str]) -> None:
        """Refuse flags that would be ignored."""
        arriving = bool({"arrivals", "rate"} & set(given))
        defaults = type(self).__dataclass_fields__
        for name in ("batching", "iteration_ms", "max_batch_tokens"):
            if not arriving and getattr(self, name) != defaults[name].default:
                raise UsageError(f"--{name.replace('_', '-')} has no effect without --arrivals or --rate")
        for name in ("iteration_ms", "max_batch_tokens"):
            if self.batching == "second" and getattr(self, name) != defaults[name].default:
                raise UsageError(f"--{name.replace('_', '-')} has no effect with --batching second")
        if (self.scenario == "switch") != (self.switch is not None):
            raise UsageError("--scenario switch and --switch FIRST,SECOND need each other")
        if self.scenario == "switch" and (arriving or self.tokens_per_iteration is not None):
            raise UsageError("--scenario switch works with --streams or --prompts only")
        if self.cv_threshold != defaults["cv_threshold"].default and "moeless" not in self.balancer_names:
            raise UsageError("--cv-threshold has no effect without moeless among --balancers")
        if self.batch_sizes != defaults["batch_sizes"].default and "batch" not in self.sweeps:
            raise UsageError("--batch-sizes has no effect without --sweep batch")

    @property
    def balancer_names(self) -> tuple[str, ...]:
        """The methods to compare, in the order given."""
        return parse_names("--balancers", self.balancers, BALANCER_NAMES)

    @property
    def sweeps(self) -> tuple[str, ...]:
        """The sweeps asked for."""
        return parse_names("--sweep", self.sweep, SWEEPS) if self.sweep is not None else ()

    @property
    def layer_numbers(self) -> tuple[int, ...] | None:
        """The layers to keep, None for all."""
        return parse_int_set("--layers", self.layers, minimum=0) if self.layers is not None else None

    @property
    def batch_list(self) -> tuple[int, ...]:
        """Tokens an iteration of the batch sweep, ascending."""
        return parse_int_set("--batch-sizes", self.batch_sizes, minimum=1)

    @property
    def switch_labels(self) -> tuple[str, str]:
        """The domains before and after the switch."""
        parts = [part.strip() for part in (self.switch or "").split(",")]
        if len(parts) != 2 or not all(parts):
            raise UsageError(f"--switch takes two labels such as gpqa,sorry_bench, got {self.switch!r}")
        return parts[0], parts[1]

    @property
    def predictor_name(self) -> str:
        """The predictor without its parameter."""
        name = self.predictor.split(":")[0]
        if self.predictor not in _PREDICTORS[:4] and name != "noisy":
            raise UsageError(f"--predictor must be one of {', '.join(_PREDICTORS)}, got {self.predictor!r}")
        return name

    @property
    def noise(self) -> float:
        """The S of noisy:S, 0 for other predictors."""
        name, _, text = self.predictor.partition(":")
        if name != "noisy":
            return 0.0
        try:
            noise = float(text)
        except ValueError:
            noise = -1.0
        if not 0 <= noise <= 1:
            raise UsageError(f"--predictor noisy:S takes S in [0, 1], such as noisy:0.4, got {self.predictor!r}")
        return noise
