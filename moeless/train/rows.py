"""`CapturedRows`: router inputs and used experts of some tokens, per MoE layer, and where each token came from.

Legend: T tokens (rows), K experts a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

PREFILL, DECODE = 0, 1
PHASE_NAMES = ("prefill", "decode")
CHANNELS = ("gate_input", "ids", "residual", "layer_input")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRows:
    """Rows of whole iterations. `channels[name][layer]` is a tensor whose first dimension is T.

    Channels: `gate_input` [T, H] what the router reads; `ids` [T, K] experts used (int16); optionally `residual`
    [T, H] the input of the norm in front of the router and `layer_input` [T, H] the input of the decoder layer.
    """

    phases: torch.Tensor
    """[T] uint8: PREFILL or DECODE."""
    iterations: torch.Tensor
    """[T] int32: number of the forward pass, counted over the whole capture."""
    documents: torch.Tensor
    """[T] int32: index of the document in the corpus."""
    channels: dict[str, list[torch.Tensor]]

    @property
    def num_rows(self) -> int:
        """T."""
        return len(self.phases)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        every = [self.phases, self.iterations, self.documents, *(t for c in self.channels.values() for t in c)]
        return sum(t.numel() * t.element_size() for t in every)

    def by_phase(self) -> Iterator[tuple[int, CapturedRows]]:
        """The rows of each phase that occurs."""
        for phase in self.phases.unique().tolist():
            keep = self.phases == phase
            yield (
                phase,
                CapturedRows(
                    phases=self.phases[keep],
                    iterations=self.iterations[keep],
                    documents=self.documents[keep],
                    channels={name: [t[keep] for t in layers] for name, layers in self.channels.items()},
                ),
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Flat names for a safetensors file: `phases`, `gate_input.3` ..."""
        flat = {"phases": self.phases, "iterations": self.iterations, "documents": self.documents}
        for name, layers in self.channels.items():
            flat |= {f"{name}.{ordinal}": tensor.contiguous() for ordinal, tensor in enumerate(layers)}
        return flat

    @staticmethod
    def from_tensors(flat: dict[str, torch.Tensor]) -> CapturedRows:
        """The inverse of `tensors`."""
        channels: dict[str, list[torch.Tensor]] = {}
        for name in CHANNELS:
            layers = sorted((int(k.split(".")[1]), v) for k, v in flat.items() if k.startswith(f"{name}."))
            if layers:
                channels[name] = [tensor for _, tensor in layers]
        return CapturedRows(
            phases=flat["phases"], iterations=flat["iterations"], documents=flat["documents"], channels=channels
        )


def concatenate(parts: Sequence[CapturedRows]) -> CapturedRows:
    """All rows of `parts` in order."""
    first = parts[0]
    return CapturedRows(
        phases=torch.cat([p.phases for p in parts]),
        iterations=torch.cat([p.iterations for p in parts]),
        documents=torch.cat([p.documents for p in parts]),
        channels={
            name: [torch.cat([p.channels[name][layer] for p in parts]) for layer in range(len(layers))]
            for name, layers in first.channels.items()
        },
    )
