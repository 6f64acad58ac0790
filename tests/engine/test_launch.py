"""Rank processes: they start, sleep without using the CPU, say what went wrong, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeless import LLM, SamplingParams
from moeless.config.engine import EngineConfig
from moeless.engine.launch import RankProcesses, TorchrunPlace
from moeless.errors import CheckpointError, RankError, UsageError
from tests.tiny import save_tiny_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    save_tiny_checkpoint("mixtral", folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    with LLM(str(checkpoint), kv_tokens=256) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), ep=2, kv_tokens=256, step_timeout=10) as llm:
        yield llm


def process_ids(llm: LLM) -> list[int]:
    return [process.pid for process in llm._backend._ranks.processes.values()]  # type: ignore[attr-defined]


def cpu_s(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def is_running(process_id: int) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_answer_sleep_and_end(llm: LLM, expected: list[tuple[int, ...]]) -> None:
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    ids = process_ids(llm)
    time.sleep(0.5)
    before, begin = [cpu_s(i) for i in ids], time.monotonic()
    time.sleep(3)
    shares = [(cpu_s(i) - b) / (time.monotonic() - begin) for i, b in zip(ids, before, strict=True)]
    assert max(shares) < 0.02, f"idle ranks use {shares} of a core"
    for prompt, tokens in zip(PROMPTS, expected, strict=True):  # one request leaves one of the ranks without
        assert llm.generate([prompt], PARAMS)[0].outputs[0].token_ids == tokens
    statistics = llm.statistics()
    assert len(statistics["ranks"]) == 2
    assert sum(rank["idle_steps"] for rank in statistics["ranks"]) > 0
    llm.close()
    llm.close()
    assert not any(map(is_running, ids))


def test_a_killed_rank_is_named_and_the_others_end(llm: LLM) -> None:
    ids = process_ids(llm)
    os.kill(ids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        llm.generate(PROMPTS, PARAMS)
    assert time.monotonic() - begin < 30
    assert not any(map(is_running, ids))


@pytest.mark.slow
def test_a_starter_that_dies_takes_its_ranks_along(checkpoint: Path) -> None:
    code = (
        "import os, sys; from moeless import LLM\n"
        f"llm = LLM({str(checkpoint)!r}, ep=2, kv_tokens=256)\n"
        "print(*[p.pid for p in llm._backend._ranks.processes.values()], flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, stdout=subprocess.PIPE, text=True)
    ids = [int(word) for word in done.stdout.split()]
    assert len(ids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, ids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, ids))


def test_what_goes_wrong_on_a_rank_reaches_the_user(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        RankProcesses().start_group(EngineConfig(model=str(checkpoint / "nothing"), ep=2))


@pytest.mark.slow
def test_torchrun_ranks_run_one_program_and_each_gets_all_outputs(
    checkpoint: Path, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; from moeless import LLM, SamplingParams\n"
        f"with LLM({str(checkpoint)!r}, ep=2, kv_tokens=256) as llm:\n"
        f"    outputs = llm.generate({PROMPTS}, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))\n"
        "sys.exit(0 if [o.outputs[0].token_ids for o in outputs] == "
        f"{expected} else 1)\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(program)], env={**os.environ, **common, "RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_the_environment_of_torchrun() -> None:
    environment = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    place = TorchrunPlace.of(environment)
    assert place == TorchrunPlace(rank=3, size=8, local_rank=3, host="host", port=29_500)
    assert TorchrunPlace.of({"RANK": "3"}) is None
    with pytest.raises(UsageError, match="not a number"):
        TorchrunPlace.of({**environment, "RANK": "x"})
