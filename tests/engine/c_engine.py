"""Running kernels on the C engine with the arguments that the interpreter takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.codegen.reference_helpers import Arguments, Array
from tileweave.codegen.compiled import compile as compile_kernel
from tileweave.codegen.reference.storage import PATTERNS
from tileweave.compiler.config import Config
from tileweave.compiler.trace import Kernel
from tileweave.primitives.group import Group
from tileweave.primitives.launch import VirtualGroup
from tileweave.primitives.memory import Memory


def argument(spec: object, array: Array) -> Any:
    """`array`, or a tensor that views its bit patterns as numbers of a type that NumPy does not have."""
    assert isinstance(spec, Memory)
    if spec.dtype in PATTERNS:
        bits = {1: np.uint8, 2: np.int16}[spec.dtype.itemsize_bytes]
        return torch.from_numpy(array.view(bits)).view(getattr(torch, spec.dtype.name))
    return array


def run_on_c(
    kernel: Kernel, specs: tuple[object, ...], arguments: Sequence[Arguments], config: Config | None = None
) -> None:
    """Launch on virtual ranks; what the kernel does not write holds NaN, as in the interpreter."""
    compiled = compile_kernel(kernel, *specs, world_size=len(arguments), config=config or Config())

    def rank(group: Group) -> None:
        executable = compiled.load(group)
        for memory in compiled.program.symmetric:
            executable.symmetric(memory.name)[:] = 0xFF
        for mapping in executable._local.values():
            mapping.array()[:] = 0xFF
        own = arguments[group.rank]
        taken = [(n, s) for n, s in zip(kernel.parameters, specs, strict=True) if isinstance(s, Memory)]
        args = (argument(spec, own[name]) for name, spec in taken)
        compiled.run(tuple(args), group)

    with VirtualGroup(len(arguments)) as ranks:
        ranks.run(rank)
