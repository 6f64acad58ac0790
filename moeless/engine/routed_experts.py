"""Which experts each token of a completion went to, for the clients that ask for it (`return_routed_experts`).

Layers keep their ids as they are, and the end of a step copies them to the sequences that asked, at the places of their
tokens. So a token that is computed again, after a preemption or a rank's death, is there once; and a step in which
nobody asks pays nothing.

Legend: Q rows of a step, T tokens of a sequence, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from io import BytesIO

import numpy as np
import torch
from numpy.typing import NDArray

from moeless.engine.scheduler import Chunk

MAX_BYTES = 1 << 25
"""A request's arrays take at most this together: they are held until they are sent, and sent in one piece each."""

Routes = NDArray[np.unsignedinteger]
"""[T, L, K], in each layer's own order, of the smallest type that holds the ids."""


class StepIds:
    """The ids of a step's rows in every expert layer, between `start` and `stop`; shared by a model's blocks."""

    def __init__(self) -> None:
        self._ids: list[torch.Tensor] | None = None

    def start(self, *, wanted: bool) -> None:
        """Keep what comes if it is `wanted`; what a step that broke off has left is forgotten."""
        self._ids = [] if wanted else None

    def note(self, ids_QK: torch.Tensor) -> None:
        """The next layer's ids."""
        if self._ids is not None:
            self._ids.append(ids_QK)

    def stop(self) -> list[torch.Tensor]:
        """What came since the start, one a layer; nothing is kept from here on."""
        assert self._ids is not None, "start comes first"
        ids, self._ids = self._ids, None
        return ids


def wants_routes(chunks: Rows[Chunk]) -> bool:
    """Whether a step has a sequence that is to know its experts."""
    return any(chunk.sequence.params.return_routed_experts for chunk in chunks)


def keep_routes(chunks: Rows[Chunk], ids: Rows[torch.Tensor], num_experts: int) -> None:
    """Give the sequences that asked for it the experts of the tokens that a step has just computed.

    Args:
        chunks: in the order of their rows.
        ids: a layer's expert ids of all rows, in any shape with the rows first.
    """
    num_rows = sum(chunk.num_new for chunk in chunks)
    ids_LQK = torch.stack([layer_ids.reshape(num_rows, -1) for layer_ids in ids]).cpu().numpy()
    row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.params.return_routed_experts:
            if sequence.routes_TLK is None:
                shape = len(sequence.prompt) + sequence.max_tokens, len(ids_LQK), ids_LQK.shape[2]
                sequence.routes_TLK = np.empty(shape, id_type(num_experts))  # memory comes with the first write
            tokens = slice(sequence.num_computed - chunk.num_new, sequence.num_computed)
            sequence.routes_TLK[tokens] = ids_LQK[:, row : row + chunk.num_new].swapaxes(0, 1)
        row += chunk.num_new


def id_type(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """The smallest integers that expert ids fit in."""
    return np.min_scalar_type(num_experts - 1)


def to_npy(routes_TLK: Routes) -> bytes:
    """The array as an .npy file, which carries its shape and type."""
    file = BytesIO()
    np.save(file, routes_TLK, allow_pickle=False)
    return file.getvalue()


def from_npy(content: bytes) -> Routes:
    """The array in an .npy file."""
    routes_TLK: Routes = np.load(BytesIO(content), allow_pickle=False)
    return routes_TLK
