"""How a configuration field says what its command-line flag is.

A command's configuration is a frozen dataclass; each field carries help text, bounds and group in its metadata, and
`moeless.cli` makes the flag from that. So a flag can't drift from its field, and a value is checked in one place
whether it comes from the command line or from Python.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moeless.errors import UsageError


def option(
    help: str,
    *,
    default: Any = MISSING,
    group: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    flag: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A field with a `--flag`; `minimum` and `maximum` are inclusive bounds of its value."""
    metadata = {
        "help": help,
        "group": group,
        "minimum": minimum,
        "maximum": maximum,
        "flag": flag,
        "metavar": metavar,
        "positional": False,
    }
    return field(default=default, metadata=metadata)


def argument(help: str, *, default: Any = MISSING, metavar: str | None = None) -> Any:
    """A field given by position."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "positional": True})


def flag_name(config_field: dataclasses.Field[Any]) -> str:
    """What the user types for a field: `--max-tokens`, or `MODEL` for a positional one."""
    if config_field.metadata["positional"]:
        return config_field.metadata.get("metavar") or config_field.name.upper()
    return config_field.metadata.get("flag") or "--" + config_field.name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of all configurations: checks bounds and choices, and names the flag when one is wrong."""

    json_output: bool = option("Print one JSON document on stdout instead of tables.", default=False, flag="--json")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for config_field in dataclasses.fields(self):
            value = getattr(self, config_field.name)
            if value is not None:
                _check(config_field, hints[config_field.name], value)


def _check(config_field: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    name, metadata = flag_name(config_field), config_field.metadata
    minimum, maximum = metadata.get("minimum"), metadata.get("maximum")
    if minimum is not None and not value >= minimum:
        raise UsageError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and not value <= maximum:
        raise UsageError(f"{name} must be at most {maximum}, got {value}")
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    if choices and value not in choices:
        raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def parse_int_set(name: str, text: str, minimum: int) -> tuple[int, ...]:
    """`1-3,5` as (1, 2, 3, 5): ascending, without repeats.

    Raises:
        UsageError: `text` is not such a list, or has a number below `minimum`.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.strip().endswith("-"):
            raise UsageError(f"{name} takes numbers and ranges such as 1-3,5, got {text!r}")
        low, high = int(first), int(last or first)
        if low < minimum or high < low or high > 10_000:
            raise UsageError(f"{name} takes ascending numbers from {minimum}, got {text!r}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def parse_names(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """`static,eplb` as ("static", "eplb"), each one of `known`, in the order given.

    Raises:
        UsageError: an unknown or repeated name, or none at all.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in names if part not in known]
    if unknown or not names or len(set(names)) < len(names):
        raise UsageError(f"{name} takes a comma-separated list out of {', '.join(known)}, got {text!r}")
    return names
