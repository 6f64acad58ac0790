"""Which captured rows train a predictor, which choose among what was trained, and which judge it.

The unit is the document: a conversation's prefill rows and the decode rows that go on from its prompt are always on the
same side, so no text that is judged was trained on or chosen by.

Legend: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeless.errors import DataError

SELECT_SHARE, TEST_SHARE = 0.1, 0.2
_NUM_PARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Boolean masks [T] over captured rows; each row is in exactly one."""

    train: torch.Tensor
    select: torch.Tensor
    """Held out from training: stops it and picks the best of what was tried."""
    test: torch.Tensor
    """Held out from both: the accuracies that are reported."""

    def counts(self) -> dict[str, int]:
        """Rows of each part."""
        return {name: int(getattr(self, name).sum()) for name in ("train", "select", "test")}


def split_documents(documents_T: torch.Tensor, seed: int) -> Split:
    """Deal whole documents to the three parts in a seeded order: a fifth of the rows tests, a tenth selects.

    Raises:
        DataError: fewer than three documents.
    """
    numbers, counts = documents_T.unique(return_counts=True)
    if len(numbers) < _NUM_PARTS:
        raise DataError(
            f"{len(numbers)} document(s) cannot be split into training, selection and test; give --data with at least "
            f"{_NUM_PARTS} documents, or a larger --max-tokens"
        )
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    cumulative = counts[order].cumsum(0)
    num_test = _num_documents(cumulative, TEST_SHARE, len(order) - 2)
    num_held_out = max(num_test + 1, _num_documents(cumulative, TEST_SHARE + SELECT_SHARE, len(order) - 1))
    test = torch.isin(documents_T, numbers[order[:num_test]])
    select = torch.isin(documents_T, numbers[order[num_test:num_held_out]])
    return Split(train=~(test | select), select=select, test=test)


def _num_documents(cumulative: torch.Tensor, share: float, most: int) -> int:
    """How many of the first documents hold `share` of all rows: at least one, at most `most`."""
    wanted = share * float(cumulative[-1])
    return max(1, min(most, int((cumulative < wanted).sum()) + 1))
