"""Every foreign format, read and misread; each malformed file is named with its row and reason."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from moeless.errors import CapacityError, DataError, UsageError
from moeless.trace import plans
from moeless.trace.files import save_trace
from moeless.trace.formats import read_trace
from moeless.trace.loads import LoadTrace, make_loads
from moeless.trace.routes import Routes, count_experts
from tests.traces import real, skewed_ids, skewed_routes


def test_npz_with_sequences_labels_and_repetition(tmp_path: Path) -> None:
    routes = skewed_routes(num_sequences=4, length=3)
    repetition = np.array([False, True, False, False])
    np.savez(
        tmp_path / "r.npz",
        experts=routes.ids_TLK,
        offsets=routes.offsets,
        dataset=np.array(routes.labels["dataset"]),
        repetition=repetition,
        prompt_tokens=np.zeros(4, int),
    )
    read = read_trace(tmp_path / "r.npz", num_experts=16)
    assert isinstance(read, Routes)
    assert read.phase == "decode"
    assert read.labels["dataset"] == ("a", "b", "b")
    assert "1 of 4 sequences left out" in read.notes[0]
    np.testing.assert_array_equal(read.ids_TLK[3:], routes.ids_TLK[6:])


def test_npz_of_one_layer_and_npz_of_counts(tmp_path: Path) -> None:
    ids = skewed_ids(9, num_layers=1)
    np.savez(tmp_path / "data.npz", data=ids[:, 0])
    read = read_trace(tmp_path / "data.npz", 16)
    assert isinstance(read, Routes)
    np.testing.assert_array_equal(read.ids_TLK, ids)
    np.savez(tmp_path / "counts.npz", counts=np.ones((2, 3, 4), int))
    loads = read_trace(tmp_path / "counts.npz")
    assert isinstance(loads, LoadTrace)
    assert loads.counts_ILE.shape == (2, 3, 4)


def test_object_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", experts=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="plain arrays"):
        read_trace(tmp_path / "r.npz")
    np.savez(tmp_path / "other.npz", weights=np.zeros(2))
    with pytest.raises(DataError, match=r"none of experts .* among its arrays \(weights\)"):
        read_trace(tmp_path / "other.npz")


def test_vllm_routed_experts(tmp_path: Path) -> None:
    ids = skewed_ids(7).astype(np.int16)
    np.save(tmp_path / "routed.npy", ids)
    read = read_trace(tmp_path / "routed.npy", 16)
    assert isinstance(read, Routes)
    np.testing.assert_array_equal(read.ids_TLK, ids)


def test_sglang_recorder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    counts = torch.arange(2 * 3 * 4, dtype=torch.int32).reshape(2, 3, 4)
    ring = torch.cat([counts, torch.zeros(5, 3, 4, dtype=torch.int32)])
    torch.save({"rank": 0, "logical_count": ring}, tmp_path / "expert_distribution_recorder_1.pt")
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "expert_distribution_recorder_2.pt")
    one = read_trace(tmp_path / "expert_distribution_recorder_1.pt")
    assert isinstance(one, LoadTrace)
    np.testing.assert_array_equal(one.counts_ILE, counts.numpy())
    both = read_trace(tmp_path)
    assert isinstance(both, LoadTrace)
    assert both.num_iterations == 4
    torch.save({"records": []}, tmp_path / "p.pt")
    with pytest.raises(DataError, match="recorder-mode stat"):
        read_trace(tmp_path / "p.pt")
    (tmp_path / "bad.pt").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"bad\.pt: cannot be read"):
        read_trace(tmp_path / "bad.pt")


def test_tensorrt_statistics_sum_over_ranks(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "meta_info.json").write_text('{"num_experts": 4, "num_experts_per_token": 2}')
    rows = {f"{i}_{layer}": np.array([i, layer, 1, 0]) for i in (100, 101) for layer in (3, 4)}
    save_file(rows, tmp_path / "rank0.safetensors")
    save_file(rows, tmp_path / "rank1.safetensors")
    save_file({"x": np.zeros(1)}, tmp_path / "rank0_raw.safetensors")
    read = read_trace(tmp_path)
    assert isinstance(read, LoadTrace)
    assert read.counts_ILE.shape == (2, 2, 4)
    assert read.counts_ILE[1, 0].tolist() == [202, 6, 2, 0]
    assert read.num_tokens_I.tolist() == [104, 105]
    del rows["101_4"]
    for rank in (0, 1):
        save_file(rows, tmp_path / f"rank{rank}.safetensors")
    with pytest.raises(DataError, match="iteration 101 has no counts of layer 4"):
        read_trace(tmp_path)
    save_file({"x_4": np.zeros(4, int)}, tmp_path / "rank1.safetensors")
    with pytest.raises(DataError, match=r"rank1.safetensors: 'x_4' \(4,\) is not 4 counts"):
        read_trace(tmp_path)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "loads.csv"
    path.write_text("layer,expert,count\n0,1,5\n1,0,2\n0,1,3\n")
    read = read_trace(path)
    assert isinstance(read, LoadTrace)
    assert read.counts_ILE.tolist() == [[[0, 8], [2, 0]]]
    for text, reason in {
        "layer,expert\n0,1\n": "line 1: no column count",
        "layer,expert,count\n0,1,5\n0,x,5\n": "line 3: expert must be a whole number below 4096, got 'x'",
        "layer,expert,count\n0,1\n": "line 2: count must be a whole number",
        "layer,expert,count\n": "the table has no rows",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            read_trace(path)


def test_jsonl(tmp_path: Path) -> None:
    ids, path = skewed_ids(6, num_layers=2), tmp_path / "r.jsonl"
    rows = [
        {"problem_id": t // 4, "token_idx": t % 4, "layer": layer, "experts": ids[t, layer].tolist()}
        for layer in (1, 0)
        for t in range(6)
        if (t, layer) != (5, 1)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_trace(path, 16)
    assert isinstance(read, Routes)
    np.testing.assert_array_equal(read.ids_TLK, ids[:5])
    np.testing.assert_array_equal(read.offsets, [0, 4, 5])
    assert read.notes == ("1 of 6 tokens left out: some layer of theirs is missing",)
    first = '{"layer": 0, "token_idx": 0, "experts": [1]}'
    for text, reason in {
        "{": "line 1: not JSON",
        "[1]": "line 1: an object is expected",
        '\n{"layer": 0, "token_idx": 0, "experts": []}': "line 2: experts must be a list",
        first + '\n{"layer": 0, "token_idx": 0, "experts": [2]}': "line 2: .* twice",
        first + '\n{"layer": 1, "token_idx": 0, "experts": [1, 2]}': "2 experts where earlier lines have 1",
        '{"layer": "0", "token_idx": 0, "experts": [1]}': "layer and token_idx must be integers",
        "": "no routed tokens",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            read_trace(path)


def test_unknown_formats_and_a_number_without_effect(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no routing trace at"):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(DataError, match="neither TensorRT-LLM's"):
        read_trace(tmp_path)
    (tmp_path / "a.xml").write_text("")
    with pytest.raises(DataError, match="no known trace format"):
        read_trace(tmp_path / "a.xml")
    save_trace(tmp_path / "t.safetensors", make_loads(np.ones((1, 1, 2), int), name="t"))
    with pytest.raises(UsageError, match="--num-experts has no effect"):
        read_trace(tmp_path / "t.safetensors", 2)
    assert isinstance(read_trace(tmp_path / "t.safetensors"), LoadTrace)


@pytest.mark.parametrize("name", ["a.npz", "b.npz", "c.npy", "t.safetensors", "x.csv", "j.jsonl", "p.json"])
def test_damage_is_harmless_or_refused_by_name(tmp_path: Path, name: str) -> None:
    """Flipped, lost and zeroed bytes of each format: nothing but a `DataError` of one line ever comes of it."""
    path, ids = tmp_path / name, skewed_ids(20)
    json_ids = [{"layer": i, "token_idx": t, "experts": e} for t, x in enumerate(ids.tolist()) for i, e in enumerate(x)]
    writers = {
        "a.npz": lambda: np.savez(path, experts=ids, offsets=np.array([0, 7, 20])),
        "b.npz": lambda: np.savez_compressed(path, experts=ids),
        "c.npy": lambda: np.save(path, ids),
        "t.safetensors": lambda: save_trace(path, make_loads(np.ones((4, 3, 8), int), name="t")),
        "x.csv": lambda: path.write_text("layer,expert,count\n" + "".join(f"{i % 3},{i},{i}\n" for i in range(8))),
        "j.jsonl": lambda: path.write_text("\n".join(map(json.dumps, json_ids))),
        "p.json": lambda: path.write_text('{"a": {"expert_popularity": [[1, 2], [3, 4]]}}'),
    }
    writers[name]()
    read_trace(path)
    pristine, rng, messages = path.read_bytes(), random.Random(name), []
    for number in range(240):
        damaged, at = bytearray(pristine), rng.randrange(len(pristine))
        if number % 3 == 0:
            damaged[at:] = b""
        elif number % 3 == 1:
            damaged[at : at + 8] = bytes(8)
        else:
            damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_trace(path)
        except DataError as error:
            messages.append(str(error))
    assert messages
    assert not [message for message in messages if "\n" in message or name not in message]


def test_an_archive_is_not_an_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", experts=skewed_ids(9))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(DataError, match="not a single array"):
        read_trace(tmp_path / "a.npy")


def test_plan_files_round_trip(tmp_path: Path) -> None:
    layers = [((0, 1), (1,), (2,), (2,)), ((0,), (0,), (1, 2), (1,))]
    slots = np.array([plans.slot_map(hosts, 3, 2) for hosts in layers])
    assert slots[0].tolist() == [0, 1, 0, 1, 2, 3]  # rank 0 had a free slot, filled with expert 1
    plans.write_tensorrt(tmp_path / "plan.yaml", slots, first_layer=3)
    again, first = plans.read_tensorrt_plan(tmp_path / "plan.yaml")
    assert first == 3
    np.testing.assert_array_equal(again, slots)
    plans.write_sglang(tmp_path / "plan.json", slots)
    np.testing.assert_array_equal(plans.read_sglang_plan(tmp_path / "plan.json"), slots)
    for hosts, row in zip(layers, slots.tolist(), strict=True):
        found = plans.hosts_of(row, 4, 3)
        assert all(set(wanted) <= set(got) for wanted, got in zip(hosts, found, strict=True))
        assert plans.slot_map(found, 3, 2) == row


def test_bad_plans_are_named(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="rank 0 holds 2 experts but has 1 slots"):
        plans.slot_map(((0,), (0,)), 2, 1)
    with pytest.raises(DataError, match="expert 1 is in no slot"):
        plans.hosts_of([0, 0], 2, 2)
    (tmp_path / "p").write_text("{}")
    with pytest.raises(DataError, match="not a TensorRT-LLM"):
        plans.read_tensorrt_plan(tmp_path / "p")
    with pytest.raises(DataError, match="not an SGLang"):
        plans.read_sglang_plan(tmp_path / "p")


def test_real_traces_read_as_described() -> None:
    gptoss = read_trace(real("routing/gpt-oss-20b/gpt_oss_20b_decode_topk_all.npz"))
    assert isinstance(gptoss, Routes)
    assert (gptoss.ids_TLK.shape, gptoss.num_experts, gptoss.phase) == ((162_219, 24, 4), 32, "decode")
    mixtral = read_trace(real("routing/mixtral-8x7b/mixtral_instruct_fp8_humaneval_2problems_routing.jsonl"))
    assert isinstance(mixtral, Routes)
    assert (mixtral.ids_TLK.shape, mixtral.num_experts) == ((333, 32, 2), 8)
    assert (count_experts(mixtral.ids_TLK, 8).sum(1) == 666).all()
    fiddler = read_trace(real("routing/mixtral-8x7b/fiddler_mixtral_instruct_expert_popularity_mmlu.json"))
    assert isinstance(fiddler, LoadTrace)
    assert fiddler.counts_ILE.shape == (7, 32, 8)
