"""The profiler's sums against brute force from raw ids, and `run_profile` end to end on the bundled model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_capture import CONFIG, documents, loaded_tiny, run

from moeless.config.profile import ProfileConfig
from moeless.errors import UsageError
from moeless.train.capture import plan_work
from moeless.train.profile_report import build_result
from moeless.train.profiler import HISTORY_ITERATIONS, Profiler
from moeless.train.profiling import run_profile
from moeless.train.rows import PHASE_NAMES, CapturedRows


@pytest.fixture(scope="module", params=["deepseek_v3", "llama4_text", "minimax_m2"])
def profiled(request: pytest.FixtureRequest) -> tuple[Profiler, list[CapturedRows]]:
    loaded, points = loaded_tiny(request.param)
    rows = run(loaded, points, plan_work(documents(), CONFIG, 512))
    profiler = Profiler(points, (1, 2))
    with torch.no_grad():
        for batch in rows:
            profiler.add(batch)
    return profiler, rows


def test_loads_sum_to_tokens_times_top_k(profiled: tuple[Profiler, list[CapturedRows]]) -> None:
    profiler, rows = profiled
    for phase in (0, 1):
        num_tokens = sum(int((r.phases == phase).sum()) for r in rows)
        assert profiler.num_tokens[phase] == num_tokens > 0
        for layer, point in enumerate(profiler.points):
            assert profiler.loads(phase, layer).sum() == num_tokens * point.top_k


def test_rows_agree_with_brute_force(profiled: tuple[Profiler, list[CapturedRows]]) -> None:
    profiler, rows = profiled
    result = build_result(profiler, "token-recall", 0.8)
    for row in result["rows"]:
        if row["predictor"] != "gate":
            continue
        source, target, phase = row["source_layer"], row["target_layer"], PHASE_NAMES.index(row["phase"])
        sets: list[tuple[int, set[int], set[int]]] = []
        for batch in rows:
            predicted = profiler.points[target].route(batch.channels["gate_input"][source])
            for p, a, i, f in zip(
                predicted, batch.channels["ids"][target], batch.iterations, batch.phases, strict=True
            ):
                if f == phase:
                    sets.append((int(i), set(p.tolist()), set(a.tolist())))
        assert row["token_recall"] == pytest.approx(np.mean([len(p & a) / len(a) for _, p, a in sets]))
        assert row["exact_set"] == pytest.approx(np.mean([p == a for _, p, a in sets]))
        overlaps = []
        for iteration in sorted({i for i, _, _ in sets}):
            p_load = Counter(e for i, p, _ in sets if i == iteration for e in p)
            a_load = Counter(e for i, _, a in sets if i == iteration for e in a)
            overlaps.append(sum(min(p_load[e], a_load[e]) for e in range(8)) / a_load.total())
        assert row["load_accuracy"] == pytest.approx(np.mean(overlaps))


def test_history_is_the_loads_of_the_iterations_before(profiled: tuple[Profiler, list[CapturedRows]]) -> None:
    profiler, _ = profiled
    loads_NE = profiler.loads(1, 0)
    overlaps = []
    for n in range(1, len(loads_NE)):
        seen = loads_NE[max(0, n - HISTORY_ITERATIONS) : n].sum(0)
        overlaps.append(np.minimum(seen / seen.sum(), loads_NE[n] / loads_NE[n].sum()).sum())
    summary = profiler.scores["history", 1, 0, 0].summary()
    assert summary is not None
    assert summary["load_accuracy"] == pytest.approx(np.mean(overlaps))


def test_batches_can_be_scored_in_any_division(profiled: tuple[Profiler, list[CapturedRows]]) -> None:
    """A spilled capture comes back in bigger pieces; the result must not change."""
    from moeless.train.rows import concatenate

    profiler, rows = profiled
    whole = Profiler(profiler.points, (1, 2))
    with torch.no_grad():
        whole.add(concatenate(rows))
    a, b = (build_result(p, "token-recall", 0.8) for p in (profiler, whole))
    assert a["load"] == b["load"]
    for x, y in zip(a["rows"], b["rows"], strict=True):
        assert x == pytest.approx(y)


def test_profile_of_the_bundled_model(demo_model: Path, tmp_path: Path) -> None:
    config = ProfileConfig(
        model=str(demo_model), max_tokens=1500, decode_tokens=128, distance="1,3", out=tmp_path, capture=tmp_path / "c"
    )
    result = run_profile(config)
    assert result == json.loads((tmp_path / "profile.json").read_text())
    assert result["source"] == "live"
    assert result["schema"] == "moeless.profile/1"
    for key in ("command", "versions", "model", "data", "num_tokens", "rows", "pearson", "load", "below_threshold"):
        assert key in result
    assert {r["predictor"] for r in result["rows"]} == {"gate", "gate-normed", "history"}
    assert {r["distance"] for r in result["rows"]} == {None, 1, 3}
    recall = {(r["target_layer"], r["distance"]): r["token_recall"] for r in result["rows"] if r["predictor"] == "gate"}
    assert recall[1, 1] < min(recall[layer, 1] for layer in range(2, 12))
    assert {"target_layer": 1, "distance": 1} in [
        {k: b[k] for k in ("target_layer", "distance")} for b in result["below_threshold"]
    ]
    assert all(Path(p).read_bytes().startswith(b"\x89PNG") for p in result["pictures"])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*(Path(p).name for p in result["pictures"]), "profile.json", "c"]
    )
    again = run_profile(config)  # from the kept capture, without running the text
    for row, first in zip(again["rows"], result["rows"], strict=True):
        assert row == pytest.approx(first)


def test_distance_beyond_the_models_depth(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs more than 12 MoE layers"):
        run_profile(ProfileConfig(model=str(demo_model), distance="12", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
