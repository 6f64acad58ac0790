"""The split by documents: nothing on two sides, every row somewhere, no part empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeless.errors import DataError
from moeless.train.split import split_documents

DOCUMENTS = st.lists(st.integers(0, 30), min_size=3, max_size=300).filter(lambda d: len(set(d)) >= 3)


@settings(deadline=None)
@given(documents=DOCUMENTS, seed=st.integers(0, 5))
def test_no_document_is_on_two_sides(documents: list[int], seed: int) -> None:
    documents_T = torch.tensor(documents, dtype=torch.int32)
    split = split_documents(documents_T, seed)
    sides = [set(documents_T[mask].tolist()) for mask in (split.train, split.select, split.test)]
    assert all(sides)
    assert sides[0] | sides[1] | sides[2] == set(documents)
    assert sum(map(len, sides)) == len(set(documents))
    assert sum(split.counts().values()) == len(documents)


def test_shares_and_seed() -> None:
    documents_T = torch.arange(1000).repeat_interleave(10)
    split = split_documents(documents_T, 0)
    assert split.counts() == {"train": 7000, "select": 1000, "test": 2000}
    assert torch.equal(split.test, split_documents(documents_T, 0).test)
    assert not torch.equal(split.test, split_documents(documents_T, 1).test)


def test_two_documents_are_too_few() -> None:
    with pytest.raises(DataError, match=r"2 document\(s\) cannot be split"):
        split_documents(torch.tensor([4, 4, 7]), 0)
