"""Capture against plain forward passes: packing, decode, hooks, loads, spill and resume."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, tiny_model

from moeless.config.model import CaptureConfig
from moeless.errors import CapacityError, CheckpointError, DataError
from moeless.models.checkpoint import LoadedModel
from moeless.models.family import find_moe_layers
from moeless.models.probe import ProbedLayer, probe_layers
from moeless.train.capture import WorkItem, capture_batches, packing_is_exact, plan_work
from moeless.train.rows import DECODE, PREFILL, CapturedRows
from moeless.train.store import MANIFEST, CaptureStore
from moeless.train.taps import tapped
from moeless.train.tokens import TokenDocument

CONFIG = CaptureConfig(model="tiny", batch_tokens=64, max_length=40, decode_tokens=60, decode_batch=4)
BIG = 2**40


def documents(num: int = 9) -> list[TokenDocument]:
    rng = random.Random(0)
    ids = [tuple(rng.randrange(3, 128) for _ in range(rng.randint(5, 40))) for _ in range(num)]
    return [TokenDocument(index=100 + i, ids=t, prompt_ids=t[: max(4, len(t) // 2)]) for i, t in enumerate(ids)]


def loaded_tiny(family: str) -> tuple[LoadedModel, list[ProbedLayer]]:
    model = tiny_model(family)
    layers = find_moe_layers(model)
    points = probe_layers(model, layers, torch.device("cpu"))
    return LoadedModel(model=model, layers=layers, tokenizer=None, name=family), points


def run(loaded: LoadedModel, points: list[ProbedLayer], work: list[WorkItem], store: CaptureStore | None = None):
    channels = ("residual", "layer_input")
    return list(capture_batches(loaded, points, work, channels=channels, seed=0, store=store))


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_equals_each_document_alone(family: str) -> None:
    loaded, points = loaded_tiny(family)
    work = plan_work(documents(), CONFIG, max_positions=512)
    for item, rows in zip(work, run(loaded, points, work), strict=True):
        assert all(ids.numel() == rows.num_rows * p.top_k for ids, p in zip(rows.channels["ids"], points, strict=True))
        if item.phase == PREFILL:
            check_prefill(loaded, points, item, rows)
    assert {item.phase for item in work} == {PREFILL, DECODE}


def check_prefill(loaded: LoadedModel, points: list[ProbedLayer], item: WorkItem, rows: CapturedRows) -> None:
    assert rows.num_rows == sum(len(d.ids) for d in item.documents)
    for document in item.documents:
        here = rows.documents == document.index
        with tapped(points, ("residual", "layer_input")) as taps, torch.no_grad():
            loaded.model(torch.tensor([document.ids]), use_cache=False)
        for layer, tap in enumerate(taps):
            alone = {"gate_input": tap.gate_input[0], "layer_input": tap.layer_input[0]}
            if tap.residual:
                alone["residual"] = tap.residual[0]
            for name, expected in alone.items():
                torch.testing.assert_close(rows.channels[name][layer][here], expected, rtol=1e-4, atol=1e-4)
            own, used = rows.channels["ids"][layer][here].sort(-1).values, tap.ids[0].sort(-1).values
            assert torch.equal(own.long(), used)


def test_decode_rows_are_the_models_own_continuation() -> None:
    """Feeding prompt and continuation again in one pass routes the continuation the same way."""
    loaded, points = loaded_tiny("qwen3_moe")
    loaded.model.generation_config.eos_token_id = None
    work = [item for item in plan_work(documents(), CONFIG, 512) if item.phase == DECODE]
    for item, rows in zip(work, run(loaded, points, work), strict=True):
        prompts = torch.tensor([d.prompt_ids[-item.prompt_length :] for d in item.documents])
        whole = loaded.model.generate(prompts, max_new_tokens=item.num_steps, do_sample=False)
        with tapped(points, ()) as taps, torch.no_grad():
            loaded.model(whole, use_cache=False)
        for layer, tap in enumerate(taps):
            expected = tap.ids[0].view(*whole.shape, -1)[:, item.prompt_length :].transpose(0, 1)
            got = rows.channels["ids"][layer].view(item.num_steps, len(item.documents), -1)
            assert torch.equal(got.sort(-1).values.long(), expected.sort(-1).values)


def test_tokens_after_the_end_are_not_counted() -> None:
    loaded, points = loaded_tiny("mixtral")
    work = [item for item in plan_work(documents(), CONFIG, 512) if item.phase == DECODE]
    free = run(loaded, points, work)
    first_token = int(loaded.model.generate(torch.tensor([work[0].documents[0].prompt_ids]), max_new_tokens=1)[0, -1])
    loaded.model.generation_config.eos_token_id = first_token
    ended = run(loaded, points, work)
    assert sum(r.num_rows for r in ended) < sum(r.num_rows for r in free)


def test_families_whose_masks_ignore_packing_are_found_out() -> None:
    found = {f: packing_is_exact(*loaded_tiny(f)) for f in ("mixtral", "llama4_text", "gpt_oss", "afmoe", "qwen3_next")}
    assert found == {"mixtral": True, "llama4_text": True, "gpt_oss": False, "afmoe": False, "qwen3_next": False}


def test_hooks_are_removed_when_a_forward_pass_fails() -> None:
    loaded, points = loaded_tiny("mixtral")
    with pytest.raises(IndexError), tapped(points, ("residual",)):
        loaded.model(torch.tensor([[10**6]]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loaded.model.modules())


def equal(a: list[CapturedRows], b: list[CapturedRows]) -> bool:
    flat = [[torch.cat(parts) for parts in zip(*(r.tensors().values() for r in rows), strict=True)] for rows in (a, b)]
    return all(torch.equal(x, y) for x, y in zip(*flat, strict=True))


def test_spilled_and_resumed_captures_equal_the_one_in_memory(tmp_path: Path) -> None:
    loaded, points = loaded_tiny("phimoe")
    work = plan_work(documents(), CONFIG, 512)
    reference = run(loaded, points, work)
    spilled = CaptureStore(None, {}, budget_bytes=20_000)
    run(loaded, points, work, spilled)
    assert spilled.folder is not None
    assert len(list(spilled.folder.glob("shard-*"))) > 1
    assert equal(list(spilled.batches()), reference)
    assert torch.equal(spilled.column("ids", 1), torch.cat([r.channels["ids"][1] for r in reference]))
    assert torch.equal(spilled.column("documents"), torch.cat([r.documents for r in reference]))
    spilled.close()
    assert not spilled.folder.exists()

    interrupted = CaptureStore(tmp_path / "kept", {"seed": 0}, budget_bytes=20_000)
    rows = capture_batches(loaded, points, work, channels=("residual", "layer_input"), seed=0, store=interrupted)
    for _ in range(4):
        next(rows)
    rows.close()
    resumed = CaptureStore(tmp_path / "kept", {"seed": 0}, budget_bytes=20_000)
    assert 0 < resumed.num_items < len(work)
    assert equal(run(loaded, points, work, resumed), reference)
    again = CaptureStore(tmp_path / "kept", {"seed": 0}, budget_bytes=BIG)
    assert again.complete
    assert equal(list(again.batches()), reference)


def test_folder_of_another_capture_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    loaded, points = loaded_tiny("mixtral")
    work = plan_work(documents(), CONFIG, 512)
    store = CaptureStore(tmp_path, {"seed": 0}, BIG)
    run(loaded, points, work, store)
    with pytest.raises(DataError, match="its seed is 0, not 1"):
        CaptureStore(tmp_path, {"seed": 1}, BIG)
    shard = next(tmp_path.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        CaptureStore(tmp_path, {"seed": 0}, BIG)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match="not a capture of this version"):
        CaptureStore(tmp_path, {"seed": 0}, BIG)


def test_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        loaded, points = loaded_tiny("mixtral")
        store = CaptureStore(tmp_path, {}, budget_bytes=1000)
        with pytest.raises(CapacityError, match=r"has 0\.00 GB free"):
            run(loaded, points, plan_work(documents(), CONFIG, 512), store)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
