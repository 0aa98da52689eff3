"""Real input that every machine has: the sources of Python's standard library, as byte tokens."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tileweave.errors import ArgumentError

_CONTEXT = 3  # a token is its byte and the two before it


@cache
def _sources() -> tuple[Path, ...]:
    """The library's .py files in the order of their names, without installed packages and tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Some distributions leave the tests out, so without them more machines have the same text.
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    return tuple(
        root / name
        for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        if not skipped.intersection(name.split("/"))
    )


def corpus_bytes(num_bytes: int, offset: int = 0) -> bytes:
    """`num_bytes` bytes of the corpus from `offset` on; the corpus repeats when it ends.

    The same Python gives the same bytes. Files are read only as far as needed.

    Raises:
        ArgumentError: a negative argument, or a Python without the sources of its library.
    """
    if num_bytes < 0 or offset < 0:
        raise ArgumentError(f"num_bytes is {num_bytes} and offset is {offset}; expected both to be at least 0")
    if not num_bytes:
        return b""
    text = bytearray()
    for path in _sources():
        if len(text) >= offset + num_bytes:
            break
        text += path.read_bytes()
    if not text:
        raise ArgumentError(
            f"no Python sources under {sysconfig.get_paths()['stdlib']}; use a Python that ships its standard library"
        )
    wrapped = np.frombuffer(text, np.uint8)
    return wrapped[np.arange(offset, offset + num_bytes) % len(wrapped)].tobytes()


def byte_embeddings(num_tokens: int, hidden: int, seed: int, offset: int = 0) -> torch.Tensor:
    """Embeddings of the corpus bytes `offset` … `offset + num_tokens - 1`: float32 [num_tokens, hidden].

    A token's value is (E0[byte] + E1[byte before] + E2[byte before that]) / sqrt(3) with random normal
    tables from `seed`, so equal bytes in different words are routed differently. Before the first byte
    stand zeros. Ranks that hold consecutive ranges of one text pass their own `offset`.

    Raises:
        ArgumentError: see `corpus_bytes`.
    """
    before = min(offset, _CONTEXT - 1)
    text = bytes(_CONTEXT - 1 - before) + corpus_bytes(before + num_tokens, offset - before)
    tokens = np.frombuffer(text, np.uint8)
    tables = np.random.default_rng(seed).standard_normal((_CONTEXT, 256, hidden), dtype=np.float32)
    tables /= np.float32(_CONTEXT**0.5)
    out = tables[0][tokens[_CONTEXT - 1 :]]
    for back in range(1, _CONTEXT):
        out += tables[back][tokens[_CONTEXT - 1 - back : len(tokens) - back]]
    return torch.from_numpy(out)
