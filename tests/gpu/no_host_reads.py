"""A torch mode in which what would make the host wait for a GPU, or break the capture of a CUDA graph, is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Reads of values, results whose size depends on values, and copies of host data to the device.
_FORBIDDEN = frozenset(
    f"aten.{name}" for name in (
        "_local_scalar_dense", "bincount", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero",
        "repeat_interleave", "_unique2", "unique_consecutive", "unique_dim",
    )
)  # fmt: skip


class NoHostReads(TorchDispatchMode):
    """Raises AssertionError at a forbidden operation; counts the others in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).rpartition(".")[0]
        assert name not in _FORBIDDEN, f"{name} reads or copies on the host"
        if name in ("aten.index", "aten.index_put", "aten.index_put_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} with a mask has a size that depends on values"
        self.calls += 1
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
