"""Running text through a model and recording its routing: prefill in packed batches, decode as the model's own words.

Packed batches have no padding, so loads count real tokens only. Documents never share attention: transformers builds
the block-diagonal mask from the position ids in most families; the others, found by trying, and those with recurrent
layers run one document at a time. Decode tokens are continuations by `generate` of equally long prompts; what a
finished sequence would still produce is dropped.

The work is a fixed list of items made from documents, settings and seed, so it can stop and go on anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeless.config.model import CaptureConfig
from moeless.models.checkpoint import LoadedModel
from moeless.models.probe import ProbedLayer
from moeless.progress import progress_bar
from moeless.train.rows import DECODE, PREFILL, CapturedRows
from moeless.train.store import CaptureStore
from moeless.train.taps import Channel, LayerTap, tapped
from moeless.train.tokens import TokenDocument

_DECODE_STEPS = 64
_MIN_PROMPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One packed prefill batch, or one group of sequences decoded together for `num_steps` steps."""

    phase: int
    documents: tuple[TokenDocument, ...]
    first_iteration: int
    prompt_length: int = 0
    num_steps: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows the item gives (at most, for decode: sequences may end early)."""
        if self.phase == PREFILL:
            return sum(len(d.ids) for d in self.documents)
        return len(self.documents) * self.num_steps


def plan_work(documents: list[TokenDocument], config: CaptureConfig, max_positions: int) -> list[WorkItem]:
    """The whole capture as a list of items: packed prefill batches first, then decode groups."""
    items: list[WorkItem] = []
    pack: list[TokenDocument] = []
    for document in [*documents, None]:
        full = document and sum(len(d.ids) for d in pack) + len(document.ids) > config.batch_tokens
        if pack and (document is None or full):
            items.append(WorkItem(phase=PREFILL, documents=tuple(pack), first_iteration=len(items)))
            pack = []
        if document is not None:
            pack.append(document)
    return items + _plan_decode(documents, config, max_positions, first_iteration=len(items))


def _plan_decode(
    documents: list[TokenDocument], config: CaptureConfig, max_positions: int, first_iteration: int
) -> list[WorkItem]:
    """Groups of prompts of about the same length, until `config.decode_tokens` could be there or prompts run out."""
    num_steps = min(_DECODE_STEPS, max_positions // 2)
    usable = [d for d in documents if len(d.prompt_ids) >= _MIN_PROMPT]
    num_prompts = -(-config.decode_tokens // num_steps)
    chosen = sorted(usable[:num_prompts], key=lambda d: len(d.prompt_ids))
    items: list[WorkItem] = []
    remaining = config.decode_tokens
    for start in range(0, len(chosen), config.decode_batch):
        group = tuple(chosen[start : start + config.decode_batch])
        steps = min(num_steps, -(-remaining // len(group)))
        if steps <= 0:
            break
        length = min(len(group[0].prompt_ids), config.max_length, max_positions - steps - 1)
        items.append(
            WorkItem(
                phase=DECODE,
                documents=group,
                first_iteration=first_iteration,
                prompt_length=length,
                num_steps=steps,
            )
        )
        first_iteration += steps
        remaining -= steps * len(group)
    return items


def capture_batches(
    loaded: LoadedModel,
    points: list[ProbedLayer],
    work: list[WorkItem],
    *,
    channels: tuple[Channel, ...],
    seed: int,
    store: CaptureStore | None = None,
) -> Iterator[CapturedRows]:
    """Rows of every work item in order; what `store` already holds is read from it, the rest is run and added to it."""
    num_done = 0
    if store is not None:
        num_done = store.num_items
        yield from store.batches()
    packed = packing_is_exact(loaded, points)
    with progress_bar("capture", sum(item.num_tokens for item in work), "tokens") as advance:
        advance(sum(item.num_tokens for item in work[:num_done]))
        for number, item in enumerate(work[num_done:], start=num_done):
            with tapped(points, channels) as taps:
                if item.phase == PREFILL:
                    rows = _run_prefill(loaded, item, taps, packed)
                else:
                    rows = _run_decode(loaded, item, taps, seed + number)
            if store is not None:
                store.append(rows)
            advance(item.num_tokens)
            yield rows
    if store is not None:
        store.finish()


def packing_is_exact(loaded: LoadedModel, points: list[ProbedLayer]) -> bool:
    """Whether a document gets the same router inputs in a pack as alone: tried on two short ones.

    A leak through attention or a recurrent state changes the last layer's input by far more than rounding does.
    """
    vocab_size = loaded.model.config.get_text_config().vocab_size
    first, second = (tuple(i * step % vocab_size for i in range(1, 7)) for step in (7, 11))
    with tapped(points[-1:], ()) as (packed_tap,):
        _forward(loaded, [first, second])
    with tapped(points[-1:], ()) as (alone_tap,):
        _forward(loaded, [second])
    packed, alone = packed_tap.gate_input[0][len(first) :].float(), alone_tap.gate_input[0].float()
    return bool((packed - alone).norm() <= 0.02 * alone.norm())


@torch.no_grad()
def _forward(loaded: LoadedModel, pack: Sequence[tuple[int, ...]]) -> None:
    device = loaded.input_device
    ids = torch.tensor([[i for document in pack for i in document]], device=device)
    positions = torch.tensor([[p for document in pack for p in range(len(document))]], device=device)
    loaded.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)


def _run_prefill(loaded: LoadedModel, item: WorkItem, taps: list[LayerTap], packed: bool) -> CapturedRows:
    every = [d.ids for d in item.documents]
    for pack in [every] if packed else [[ids] for ids in every]:
        _forward(loaded, pack)
    lengths = torch.tensor([len(d.ids) for d in item.documents])
    documents = torch.tensor([d.index for d in item.documents], dtype=torch.int32).repeat_interleave(lengths)
    iterations = torch.full_like(documents, item.first_iteration)
    return _collect(taps, item.phase, iterations, documents, keep=None, skip_passes=0)


@torch.no_grad()
def _run_decode(loaded: LoadedModel, item: WorkItem, taps: list[LayerTap], seed: int) -> CapturedRows:
    model = loaded.model
    prompts = torch.tensor([d.prompt_ids[-item.prompt_length :] for d in item.documents], device=loaded.input_device)
    settings = copy.deepcopy(model.generation_config)
    eos = settings.eos_token_id
    stops = [] if eos is None else torch.as_tensor(eos).reshape(-1).tolist()
    settings.update(
        max_new_tokens=item.num_steps + 1,
        max_length=None,
        num_return_sequences=1,
        num_beams=1,
        return_dict_in_generate=False,
        pad_token_id=settings.pad_token_id if settings.pad_token_id is not None else (stops or [0])[0],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        generate: Any = model.generate
        output = generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
    new_BS = output[:, item.prompt_length :][:, : item.num_steps].cpu()
    num_steps = len(taps[0].ids) - 1  # the first pass is the prompts' own prefill
    new_BS = new_BS[:, :num_steps]
    ended_BS = (
        torch.isin(new_BS, torch.tensor(stops)).cummax(dim=1).values if stops else torch.zeros_like(new_BS).bool()
    )
    keep_SB = ~ended_BS.bool().T
    num_rows = len(item.documents)
    documents = torch.tensor([d.index for d in item.documents], dtype=torch.int32).repeat(num_steps)
    iterations = torch.arange(num_steps, dtype=torch.int32).repeat_interleave(num_rows) + item.first_iteration
    return _collect(taps, item.phase, iterations, documents, keep=keep_SB.reshape(-1), skip_passes=1)


def _collect(
    taps: list[LayerTap],
    phase: int,
    iterations: torch.Tensor,
    documents: torch.Tensor,
    *,
    keep: torch.Tensor | None,
    skip_passes: int,
) -> CapturedRows:
    """Join the forward passes of each layer's tap into columns on the CPU, dropping rows that `keep` [T] says no to."""
    chosen = slice(None) if keep is None else keep

    def column(passes: list[torch.Tensor]) -> torch.Tensor:
        # The empty head keeps the shape where every sequence ends with its first token.
        return torch.cat([passes[0][:0], *passes[skip_passes:]]).to("cpu")[chosen]

    channels = {"gate_input": [column(t.gate_input) for t in taps], "ids": [column(t.ids).short() for t in taps]}
    if all(t.residual for t in taps):
        channels["residual"] = [column(t.residual) for t in taps]
    if all(t.layer_input for t in taps):
        channels["layer_input"] = [column(t.layer_input) for t in taps]
    iterations, documents = iterations[chosen], documents[chosen]
    assert all(len(c) == len(documents) for layers in channels.values() for c in layers), "a pass was not recorded"
    return CapturedRows(
        phases=torch.full((len(documents),), phase, dtype=torch.uint8),
        iterations=iterations,
        documents=documents,
        channels=channels,
    )
