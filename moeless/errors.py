"""The errors a user can cause. A message says what is wrong, names the value, and says what to do about it.

`moeless.cli` turns each into one line on stderr (exit code 1, or 2 for `UsageError`), the server into an OpenAI-style
error body. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class MoelessError(Exception):
    """Base of every error that is reported to the user as one line."""


class UsageError(MoelessError):
    """A flag or configuration value that is wrong whatever the model and the data are (exit code 2)."""


class DataError(MoelessError):
    """Prompts, corpora or traces that cannot be used."""


class CheckpointError(MoelessError):
    """A model folder, shard, tokenizer or predictor folder that is missing, damaged or unsuitable."""


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of a kind that cannot work here, refused by name with the reason."""


class CapacityError(MoelessError):
    """Not enough disk, memory or slots for what was asked."""


class RankError(MoelessError):
    """A rank, or the way to it, failed while the group was working."""
