"""`moeless bench report`: everything on one page, nothing fetched, simulated never shown as measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeless.bench.report import print_report, run_report
from moeless.bench.report_html import MAX_ROWS, format_value
from moeless.bench.report_sections import describe
from moeless.bench.simulate import run_simulate
from moeless.config.report import ReportConfig
from moeless.config.simulate import SimulateConfig
from moeless.errors import DataError, UsageError
from tests.traces import skewed_ids


def write(path: Path, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_page_of_a_simulation_and_an_unknown_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "routes.npy", skewed_ids(600, num_experts=32, top_k=4))
    run_simulate(
        SimulateConfig(routes=tmp_path / "routes.npy", iterations=12, warmup=4, plots=False, out=tmp_path / "sim")
    )
    write(
        tmp_path / "x" / "odd.json",
        schema="moeless.odd/7",
        source="live",
        command="moeless odd <b>",
        speed={"tokens_per_s": 1234.5678},
        rows=[{"layer": i, "ms": {"mean": i / 3}, "cdf": [1, 2]} for i in range(MAX_ROWS + 5)],
    )
    (tmp_path / "broken.json").write_text("{")
    write(tmp_path / "other.json", name="not ours")
    summary = run_report(ReportConfig(folder=tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert [r["schema"] for r in summary["results"]] == ["moeless.simulate/1", "moeless.odd/7"]
    assert summary["skipped"] == [str(tmp_path / "broken.json"), str(tmp_path / "other.json")]
    assert not re.search(r"(src|href)=\"(?!data:|#)|<script|url\(|@import", page)
    simulated, odd = page.split('<section id="s1">')
    assert "simulated, not measured" in simulated
    assert "measured" not in simulated.replace("not measured", "")
    assert "verdict" not in odd
    assert json.loads((tmp_path / "sim" / "simulate.json").read_text())["verdict"]["reason"][:40] in simulated
    assert page.count("data:image/png;base64,") == len(summary["pictures"]) == 3
    assert all(Path(picture).exists() for picture in summary["pictures"])
    for text in ("moeless odd &lt;b&gt;", "1235", "ms.mean", "5 more rows in the file", "no section of its own"):
        assert text in odd
    print_report(summary)
    assert "simulate.json: moeless.simulate/1, simulated, 3 pictures" in capsys.readouterr().out
    again = run_report(ReportConfig(folder=tmp_path, plots=False))
    assert [r["num_pictures"] for r in again["results"]] == [0, 0]


def test_profile_section() -> None:
    rows = [
        {"predictor": "gate", "distance": 1, "phase": "prefill", "target_layer": t, "token_recall": r}
        for t, r in ((1, 0.5), (2, 0.9))
    ]
    result = {
        "schema": "moeless.profile/1",
        "source": "live",
        "metric": "token-recall",
        "threshold": 0.8,
        "rows": rows,
        "load": [{"layer": 0, "phase": "prefill", "cv": 1.5, "max_over_mean": 3.0, "num_iterations": 4}],
        "below_threshold": [{"target_layer": 1, "distance": 1, "accuracy": 0.5}],
        "model": {"name": "m"},
        "data": {"notes": []},
        "num_tokens": {"prefill": 9, "decode": 0},
    }
    section = describe("profile.json", result, [])
    assert section.headlines[0].startswith("1 (layer, distance) pairs are below token-recall 0.8")
    means = next(table for table in section.tables if "mean over layers" in table.title)
    assert means.rows == (("gate", 1, "prefill", 2, 0.7),)


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder of results"):
        run_report(ReportConfig(folder=tmp_path / "absent"))
    write(tmp_path / "a.json", schema="theirs")
    with pytest.raises(DataError, match="which has 1 other JSON files"):
        run_report(ReportConfig(folder=tmp_path))
    with pytest.raises(UsageError, match=r"--out must end in \.html"):
        ReportConfig(folder=tmp_path, out=tmp_path / "page.pdf")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "True"), (1234567, "1,234,567"), (0.123456, "0.1235"), (123456.7, "123,457"), ("a", "a")],
)
def test_values(value: Any, text: str) -> None:
    assert format_value(value) == text


def test_finetune_section_and_picture(tmp_path: Path) -> None:
    rows = [
        {"target_layer": t, "distance": 1, "source": "gate-input", "before": 0.5, "after": after, "verdict": verdict}
        for t, after, verdict in ((1, 0.9, "tuned"), (2, 0.5, "rejected"), (3, 0.9, "tuned"))
    ]
    unknown = {"target_layer": 0, "distance": 1, "source": None, "before": None, "after": None, "verdict": "no-source"}
    write(
        tmp_path / "finetune.json",
        schema="moeless.finetune/1",
        source="live",
        metric="token-recall",
        threshold=0.8,
        layers=[unknown, *rows],
        num_parameters=7,
    )
    summary = run_report(ReportConfig(folder=tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "4 predictors: 1 no-source, 2 tuned, 1 rejected (h = 0.8 of token-recall)" in page
    assert summary["results"][0]["num_pictures"] == 1


def test_layers_section_and_pictures(tmp_path: Path) -> None:
    stages = dict.fromkeys(("exchange_ms", "plan_ms", "dispatch_ms", "compute_ms", "combine_ms"), 0.2)
    rows = [
        {"name": name, "lossy": lossy, "layer_ms": {"mean": ms}, "over_static": ms, "modelled_layer_ms": 0.5}
        | {"layer_ms_cdf": [ms] * 101, **stages}
        for name, ms, lossy in (
            ("static", 1.0, False),
            ("oracle", 0.5, True),
            ("bound", 0.6, False),
            ("eplb", 0.9, False),
        )
    ]
    write(
        tmp_path / "layers.json",
        schema="moeless.layers/1",
        source="live",
        clock="wall time, slowest rank",
        calibration={"floor_us": 3.0},
        balancers=rows,
    )
    summary = run_report(ReportConfig(folder=tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "eplb has the fastest layer: 0.900 x static; clock: wall time, slowest rank" in page
    assert summary["results"][0]["num_pictures"] == 2
    write(
        tmp_path / "layers.json", schema="moeless.layers/1", source="live", clock="CPU", calibration={"floor_us": 3.0}
    )
    assert run_report(ReportConfig(folder=tmp_path))["results"][0]["num_pictures"] == 0  # a calibration alone


def test_predictors_section() -> None:
    rows = [
        {"predictor": name, "distance": 1, "token_recall": recall}
        for name, recall in (("gate", 0.7), ("tuned", 0.8), ("actual", 1.0))
    ]
    section = describe("p.json", {"schema": "moeless.bench.predictors/1", "source": "live", "rows": rows}, [])
    assert section.headlines == ("highest token recall by distance: d=1: tuned 0.800",)
