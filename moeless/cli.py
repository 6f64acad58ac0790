"""The command line: flags -> configuration -> one call -> print.

Every command is a plain function of its configuration dataclass; `_add_command` makes its flags from the dataclass's
fields. Heavy imports live inside the command bodies so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from moeless import __version__
from moeless.config.bench_serve import BenchServeConfig
from moeless.config.finetune import FinetuneConfig
from moeless.config.join import JoinConfig
from moeless.config.layers import LayersConfig
from moeless.config.options import Config, flag_name
from moeless.config.predictors import PredictorsConfig
from moeless.config.profile import ProfileConfig
from moeless.config.report import ReportConfig
from moeless.config.serve import ServeConfig
from moeless.config.simulate import SimulateConfig
from moeless.errors import MoelessError, UsageError

app = typer.Typer(
    name="moeless",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Predict the expert loads of Mixture-of-Experts models, and serve them with experts that scale on demand.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure, simulate and compare.")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Entry of the program: options that go before the command."""
    if version:
        print(__version__)
        raise typer.Exit


def profile(config: ProfileConfig) -> None:
    """Measure how predictable the expert loads of a model are, and how skewed, on real input."""
    from moeless.train.profile_report import print_profile
    from moeless.train.profiling import run_profile

    result = run_profile(config)
    _emit(config, result, print_profile)


def serve(config: ServeConfig) -> None:
    """Serve a model over HTTP as OpenAI's API does, its experts scaled and placed over the ranks on demand.

    Ends on SIGTERM or Ctrl-C when running requests are done; a second signal ends it at once.
    """
    from moeless.engine.server.serve import run_serve

    run_serve(config)


def join(config: JoinConfig) -> None:
    """Lend ranks of this host to a `moeless serve` on another one."""
    from moeless.engine.join import run_join

    run_join(config)


def simulate(config: SimulateConfig) -> None:
    """Tell from a routing trace which balancing method would pay, by how much, or that none would."""
    from moeless.bench.simulate import run_simulate
    from moeless.bench.simulate_print import print_simulate

    result = run_simulate(config, show_progress=not config.json_output)
    _emit(config, result, print_simulate)


def layers(config: LayersConfig) -> None:
    """Measure a MoE layer on real ranks under every balancer, on real routes; or what its parts cost here."""
    from moeless.bench.layers import run_layers
    from moeless.bench.layers_print import print_layers

    _emit(config, run_layers(config), print_layers)


def bench_serve(config: BenchServeConfig) -> None:
    """Put load on a server over HTTP, or on one started for each balancer in turn: latencies, throughput, experts."""
    from moeless.bench.serve import run_bench_serve
    from moeless.bench.serve_print import print_bench_serve

    _emit(config, run_bench_serve(config), print_bench_serve)


def report(config: ReportConfig) -> None:
    """Put all result files of a folder on one self-contained HTML page."""
    from moeless.bench.report import print_report, run_report

    _emit(config, run_report(config), print_report)


def finetune(config: FinetuneConfig) -> None:
    """Train tiny predictors of expert loads, only for the layers whose own router falls short, and keep them."""
    from moeless.train.finetune import run_finetune
    from moeless.train.finetune_report import print_finetune

    if (result := run_finetune(config)) is not None:
        _emit(config, result, print_finetune)


def predictors(config: PredictorsConfig) -> None:
    """Compare predictors of expert loads on the same held-out tokens: accuracy, size, time to train and to predict."""
    from moeless.bench.predictors import run_bench_predictors
    from moeless.bench.predictors_report import print_predictors

    _emit(config, run_bench_predictors(config), print_predictors)


def _emit(config: Config, result: dict[str, Any], print_tables: Callable[[dict[str, Any]], None]) -> None:
    if config.json_output:
        print(json.dumps(result, allow_nan=False))
    else:
        print_tables(result)


def _add_command(
    group: typer.Typer, config_class: type[Config], run: Callable[[Any], None], name: str | None = None
) -> None:
    """Register `run` as a command, by its own name or `name`, whose flags are the fields of `config_class`."""

    def command(**values: Any) -> None:
        run(config_class(**values))

    hints = get_type_hints(config_class)
    fields = [f for f in dataclasses.fields(config_class) if f.init]
    parameters = [_parameter(f, hints[f.name]) for f in sorted(fields, key=lambda f: not f.metadata["positional"])]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    group.command(name or run.__name__.replace("_", "-"), help=run.__doc__)(command)


def _parameter(config_field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    metadata = config_field.metadata
    info: Any
    if metadata["positional"]:
        info = typer.Argument(help=metadata["help"], metavar=metadata.get("metavar"))
    else:
        name = flag_name(config_field)
        names = [f"{name}/--no-{name[2:]}"] if hint is bool and config_field.default is True else [name]
        info = typer.Option(
            *names, help=metadata["help"], rich_help_panel=metadata["group"], metavar=metadata["metavar"]
        )
    default = inspect.Parameter.empty if config_field.default is dataclasses.MISSING else config_field.default
    return inspect.Parameter(
        config_field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )


_add_command(app, ProfileConfig, profile)
_add_command(app, FinetuneConfig, finetune)
_add_command(app, ServeConfig, serve)
_add_command(app, JoinConfig, join)
_add_command(bench, PredictorsConfig, predictors)
_add_command(bench, SimulateConfig, simulate)
_add_command(bench, LayersConfig, layers)
_add_command(bench, BenchServeConfig, bench_serve, "serve")
_add_command(bench, ReportConfig, report)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr (exit code 1, or 2 for a wrong flag)."""
    try:
        app()
    except MoelessError as error:
        print(f"moeless: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        print("moeless: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
