"""The corpus is one text, cut anywhere, and embedded the same on every rank."""

from __future__ import annotations

import pytest
import torch

from tileweave.errors import ArgumentError
from tileweave.moe.corpus import byte_embeddings, corpus_bytes


def test_corpus_is_one_text() -> None:
    whole = corpus_bytes(50_000)
    assert len(whole) == 50_000
    assert corpus_bytes(123, 40_000) == whole[40_000:40_123]
    assert b"import" in whole
    assert corpus_bytes(0) == b""


def test_corpus_repeats_at_its_end() -> None:
    assert len(corpus_bytes(10, 10**9)) == 10


def test_negative_range_is_refused() -> None:
    with pytest.raises(ArgumentError, match="num_bytes is -1 and offset is 0; expected both to be at least 0"):
        corpus_bytes(-1)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 40, 64])
def test_ranks_see_one_text(cut: int) -> None:
    whole = byte_embeddings(64, 24, seed=5)
    parts = [byte_embeddings(cut, 24, seed=5), byte_embeddings(64 - cut, 24, seed=5, offset=cut)]
    assert whole.dtype == torch.float32
    assert whole.shape == (64, 24)
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(byte_embeddings(64, 24, seed=6), whole)


def test_a_token_is_its_byte_and_the_two_before() -> None:
    text = corpus_bytes(4000)
    rows = byte_embeddings(4000, 8, seed=0)
    seen: dict[bytes, int] = {}
    for index in range(2, 4000):
        first = seen.setdefault(text[index - 2 : index + 1], index)
        assert torch.equal(rows[index], rows[first])
    assert len(seen) == len({tuple(row.tolist()) for row in rows[2:]})
    assert rows.std().item() == pytest.approx(1, rel=0.1)
