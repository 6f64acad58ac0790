"""The GPU check's own code, on the CPU at a small shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeless.bench import gpu_check
from moeless.policy.cost import Cluster

CPU = torch.device("cpu")

torch.set_num_threads(1)


def test_exactness_check_runs_on_any_device(tmp_path: Path) -> None:
    found = gpu_check.check_exact(CPU, tmp_path)
    assert found["tokens_equal"]
    assert found["largest_logit_difference"] < 1e-4
    assert found["cold_starts"][0] == 0 < found["cold_starts"][1]


def test_costs_and_cluster(tmp_path: Path) -> None:
    assert gpu_check.check_grouped(CPU, tmp_path, hidden=64, ffn=96)["close"]
    costs, cluster = gpu_check.measure_costs(CPU, tmp_path, hidden=64, ffn=96, dtype=torch.float32)
    assert costs["floor_us"] > 0
    assert costs["prediction_us"] > 0
    assert Cluster(**cluster).num_ranks == 8
    planning = gpu_check.measure_planning(costs)
    assert 0 < planning["split_median"] < 1e5


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs for minutes on a GPU; use make gpu-check")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
