"""moeless: predict expert loads of Mixture-of-Experts models, and serve them with experts that scale on demand."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeless.engine.llm import LLM
    from moeless.engine.request import RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the Python API when it is first asked for, so that `import moeless` and `--help` stay quick."""
    if name == "LLM":
        from moeless.engine.llm import LLM

        return LLM
    if name in ("SamplingParams", "RequestOutput"):
        from moeless.engine import request

        return getattr(request, name)
    raise AttributeError(f"module 'moeless' has no attribute {name!r}")
