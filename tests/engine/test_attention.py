"""Grouped attention against the plain one, token by token and head by head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeless.engine.kv_cache import KvCache
from moeless.engine.packing import MIN_RUN, Span, pack
from moeless.models import attend
from moeless.models.attention import AttentionLayer, packed_attention, reference_attention

NUM_HEADS, NUM_KV_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6
SCALE = 0.3
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "chunk": {"chunk": 4},
    "sinks": {"sinks_A": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "sinks-window": {"window": 3, "sinks_A": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "softcap": {"softcap": 1.5},
}


def fake_module(store: KvCache, *, window: int | None = None, chunk: int | None = None, **_: Any) -> Any:
    kind = "chunked_attention" if chunk else "sliding_attention" if window else "full_attention"
    config = SimpleNamespace(layer_types=[kind], attention_chunk_size=chunk)
    module: Any = SimpleNamespace(config=config, layer_idx=0)
    module.moeless_attention = AttentionLayer.of(module, store)
    return module


def run_step(
    store: KvCache, lengths: dict[int, tuple[int, int]], history: dict[int, tuple[Any, Any]], variant: dict[str, Any]
) -> list[int]:
    """One step over {sequence: (first, num_new)}; checks every row, and gives the sizes of the groups."""
    spans = [Span(extent=store.extent(i), first=first, num_new=new) for i, (first, new) in lengths.items()]
    order, batch = pack(spans, torch.device("cpu"))
    names = [list(lengths)[i] for i in order]
    store.start_step(batch)
    num_rows = sum(new for _, new in lengths.values())
    query = torch.randn(1, NUM_HEADS, num_rows, SIZE)
    key, value = torch.randn(1, NUM_KV_HEADS, num_rows, SIZE), torch.randn(1, NUM_KV_HEADS, num_rows, VALUE_SIZE)
    store.update(key, value, 0)
    module = fake_module(store, **variant)
    output, _ = packed_attention(
        module,
        query,
        key,
        value,
        scaling=SCALE,
        sliding_window=variant.get("window"),
        s_aux=variant.get("sinks_A"),
        softcap=variant.get("softcap"),
    )
    row = 0
    for name in names:
        rows = slice(row, row := row + lengths[name][1])
        old_key, old_value = history.get(name, (key[0, :, :0], value[0, :, :0]))
        history[name] = torch.cat([old_key, key[0, :, rows]], 1), torch.cat([old_value, value[0, :, rows]], 1)
        expected = reference_attention(
            query[0, :, rows].transpose(0, 1), *(t.transpose(0, 1) for t in history[name]), scaling=SCALE, **variant
        )
        torch.testing.assert_close(output[0, rows], expected, atol=2e-6, rtol=1e-5)
    return [group.num_seqs for group in batch.groups]


@pytest.mark.parametrize("most_in_numpy", [0, 1 << 30], ids=["torch", "numpy"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_groups_agree_with_the_reference(
    variant: dict[str, Any], most_in_numpy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "_SMALL_PRODUCT", most_in_numpy)
    torch.manual_seed(0)
    store, history = KvCache(512), {}
    prompts = {0: 5, 1: 11, 2: 3, 3: 20, 4: 7, 5: 16}
    for i, length in prompts.items():
        assert store.reserve(i, length)
    groups = run_step(store, {i: (0, n) for i, n in prompts.items()}, history, variant)
    assert groups == [1] * 6
    now = dict(prompts)
    seen_sizes = set()
    for step in range(14):
        for i in now:
            assert store.reserve(i, now[i] + 1)
        lengths = {i: (now[i], 1) for i in now}
        if step == 3:  # a chunk beside decoding sequences
            assert store.reserve(3, now[3] + 6)
            lengths[3] = (now[3], 6)
        if step == 6:  # a hole, so that extents no longer stand side by side
            store.release(2)
            del now[2], lengths[2], history[2]
        seen_sizes.update(run_step(store, lengths, history, variant))
        now = {i: first + new for i, (first, new) in lengths.items()}
    assert max(seen_sizes) >= MIN_RUN, "no batched call was tested"


def test_gathered_and_viewed_keys_are_the_same() -> None:
    torch.manual_seed(0)
    store = KvCache(256)
    for i in range(8):
        assert store.reserve(i, 10)
    spans = [Span(extent=store.extent(i), first=0, num_new=10) for i in range(8)]
    store.start_step(pack(spans, torch.device("cpu"))[1])
    store.update(torch.randn(1, 2, 80, 4), torch.randn(1, 2, 80, 4), 0)
    decode = [Span(extent=store.extent(i), first=10, num_new=1) for i in range(8)]
    _, whole = pack(decode, torch.device("cpu"))
    _, holed = pack(decode[::2], torch.device("cpu"))
    assert isinstance(whole.groups[0].key_rows, slice)
    assert isinstance(holed.groups[0].key_rows, torch.Tensor)
    for viewed, gathered in zip(store.read(0, whole.groups[0]), store.read(0, holed.groups[0]), strict=True):
        assert torch.equal(viewed[::2], gathered)
