"""Configuration of `moeless bench report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeless.config.options import Config, argument, option
from moeless.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """One page of all result files in a folder."""

    folder: Path = argument("Folder with result files (JSON), searched with its subfolders.", metavar="DIR")
    out: Path | None = option("The page to write (default: DIR/report.html).", default=None)
    plots: bool = option("Draw pictures.", default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page.suffix != ".html":
            raise UsageError(f"--out must end in .html, got {str(self.page)!r}")

    @property
    def page(self) -> Path:
        """Where the page goes; its pictures go to a folder of the same name beside it."""
        return self.out or self.folder / "report.html"
