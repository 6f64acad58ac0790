"""A second opinion on expert layers while they serve: sampled executions are computed again in the plainest way.

Every rank recomputes the output for its own tokens with weights read straight from the checkpoint: no slot, no replica,
no dispatch, no other rank. So a slot that holds the wrong weights, a row sent to the wrong place or summed twice shows
up at the rank whose token it was, whichever rank computed it.

Legend: T tokens, K experts a token, N = T*K pairs, E experts, H hidden.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

import torch

from moeless.errors import CheckpointError
from moeless.models.expert_store import ExpertSource, Weights

# Largest difference within a token over the token's largest value. Another batch shape sums in another order: a few
# units in the last place, of intermediate values too.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

log = logging.getLogger("moeless")


@dataclass
class VerifyStats:
    """Counts since the start, of this rank."""

    verified_layers: int = 0
    """Executions that were compared; those without tokens here are not."""
    mismatches: int = 0
    unreadable: int = 0
    """Executions that could not be compared because an expert could not be read."""


class LayerVerifier:
    """See the module's head. The blocks of a model share one.

    Attributes:
        stats: what has been found so far.
    """

    def __init__(self, source: ExpertSource, fraction: float, device: torch.device | str) -> None:
        """Check `fraction` of all executions, in (0, 1]; takes the memory of one expert."""
        self.stats = VerifyStats()
        self._source, self._limit = source, fraction * 2**64
        with torch.inference_mode(False):
            self._weights: Weights = {
                name: torch.empty(shape, dtype=source.dtype, device=device) for name, shape in source.shapes.items()
            }
        self._num_bad = [0] * len(source.ffns)

    def is_due(self, iteration: int, layer: int) -> bool:
        """Whether this execution is one of the sample: the same on every rank, so that they pause together."""
        digest = hashlib.blake2b(f"{iteration}.{layer}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._limit

    def check(
        self,
        iteration: int,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
    ) -> None:
        """Compare a layer's output with the plain computation; a difference is counted and logged, never raised."""
        if not len(x_TH):
            return
        try:
            expected_TH = self.plain(layer, x_TH, ids_TK, weights_TK)
        except CheckpointError as error:
            self.stats.unreadable += 1
            log.warning("MoE layer %d of iteration %d cannot be verified: %s", layer, iteration, error)
            return
        self.stats.verified_layers += 1
        wrong_T = ~agree(out_TH, expected_TH)
        if not bool(wrong_T.any()):
            return
        self.stats.mismatches += 1
        self._num_bad[layer] += 1
        if self._num_bad[layer].bit_count() == 1:  # the 1st, 2nd, 4th ...: a broken slot would fill the log
            difference = (out_TH - expected_TH).float().abs()[wrong_T].nan_to_num(torch.inf).max()
            log.error(
                "MoE layer %d of iteration %d is wrong for %d of %d tokens, by up to %.3g where values reach %.3g; "
                "mismatch %d of this layer",
                layer, iteration, int(wrong_T.sum()), len(x_TH), float(difference),
                float(expected_TH.float().abs().nan_to_num().max()), self._num_bad[layer],
            )  # fmt: skip

    def plain(self, layer: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """The output [T, H], expert by expert from the checkpoint. Raises `CheckpointError`."""
        top_k = ids_TK.shape[1]
        ids_N = ids_TK.reshape(-1)
        pairs_NH = x_TH.new_empty(len(ids_N), x_TH.shape[1])
        for expert in ids_N.unique().tolist():
            self._source.read_into(layer, expert, self._weights)
            here_N = (ids_N == expert).nonzero()[:, 0]
            pairs_NH[here_N] = self._source.ffns[layer](x_TH[here_N // top_k], self._weights)
        weighted_TKH = pairs_NH.view(*ids_TK.shape, -1) * weights_TK.unsqueeze(-1)
        return weighted_TKH.sum(1).to(x_TH.dtype)


def agree(actual_TH: torch.Tensor, expected_TH: torch.Tensor) -> torch.Tensor:
    """Which tokens agree within what rounding explains [T]; what is no number has to be so on both sides."""
    tolerance = _TOLERANCE.get(expected_TH.dtype, 5e-2)
    actual, expected = actual_TH.float(), expected_TH.float()
    scale_T1 = expected.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    close = (actual - expected).abs() <= tolerance * scale_T1
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return (close | same).all(-1)
