"""`tw.compile`: from a kernel and argument specs to something that looks, proves, prints and runs."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import numpy as np

from tileweave import knobs
from tileweave.codegen.backends import BACKENDS
from tileweave.codegen.c.engine import address_of
from tileweave.codegen.launch import Engine, Launch
from tileweave.codegen.lower import Lowered, lower
from tileweave.codegen.trace import TraceEvent
from tileweave.compiler.binding import Routing, check_shape
from tileweave.compiler.config import Config
from tileweave.compiler.graph import Graph
from tileweave.compiler.passes import Analysis, analyse, compile_program
from tileweave.compiler.printer import print_program, program_key
from tileweave.compiler.program import Program
from tileweave.compiler.schedule import Queues, Schedule
from tileweave.compiler.topology import Topology
from tileweave.compiler.trace import Kernel, flatten, holds_memory
from tileweave.errors import ArgumentError, ConfigError, GroupError, PeerError
from tileweave.primitives.group import Group, LaunchKey, current_group
from tileweave.primitives.memory import Memory, Table
from tileweave.primitives.ops import accesses, walk

logger = logging.getLogger("tileweave")
BackendName = Literal["c", "triton", "tilelang"]
_GPU_ALIGNMENT = 16


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one world size and configuration.

    Call it with arguments shaped as the specs to run it on the current group; every rank
    must call it. The other methods look at it without running and need no ranks.
    """

    kernel: Kernel
    specs: tuple[object, ...]
    program: Program
    plan: Schedule
    config: Config
    backend: BackendName = "c"

    @cached_property
    def lowered(self) -> Lowered:
        """What backends write text from."""
        return lower(self.program, self.plan)

    def analyse(self, routing: Sequence[Mapping[str, Any]] | Routing) -> Analysis:
        """Regions, graph and queues for the arguments of every rank; tensors may be given by shape alone."""
        return analyse(self.program, self.plan, routing)

    def graph(self, routing: Sequence[Mapping[str, Any]] | Routing) -> Graph:
        """The tile graph for one routing; prints, and gives `to_networkx()`."""
        return self.analyse(routing).graph

    def schedule(self, routing: Sequence[Mapping[str, Any]] | Routing) -> Queues:
        """Who runs which tile in what order, for one routing; prints."""
        return self.analyse(routing).queues

    def check(self, routing: Sequence[Mapping[str, Any]] | Routing) -> None:
        """Raise if this routing would go out of bounds, miscount a signal, hang, or race.

        Raises:
            BoundsError, SignalMismatchError, DeadlockError, RaceError: with the tiles at fault.
        """
        self.analyse(routing)

    def source(self, backend: str | None = None) -> str:
        """The generated source text, of this kernel's backend if not told otherwise.

        Raises:
            ConfigError: no such backend.
        """
        return BACKENDS[_known(backend or self.backend)].source(self.lowered, self.config)

    def memory(self) -> str:
        """Symmetric bytes a rank, as a sum that a person can check."""
        return str(self.lowered.segment)

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric bytes a rank."""
        return self.lowered.segment.total_bytes

    def __str__(self) -> str:
        return print_program(self.program)

    def __call__(self, *args: object) -> None:
        """Run on the current group; collective.

        Raises:
            ArgumentError: this rank's arguments do not fit; the other ranks get PeerError, and nothing runs.
            GroupError: ranks launch different kernels, or the group has another size; nothing runs.
        """
        self.run(args)

    def run(self, args: tuple[object, ...], group: Group | None = None, *, trace: bool = False) -> list[TraceEvent]:
        """As calling, on `group`; with `trace=True` returns what each worker of this rank did and when."""
        executable = self.load(group or current_group())
        error: ArgumentError | None = None
        launch = Launch((), (), key=self.key)
        try:
            launch = self.bind(self.named(args), trace=trace)
        except ArgumentError as problem:
            error = problem
        if knobs.debug.get():
            self._check_launch(args, error, executable.group)
        if error is not None:
            # The peers must hear of it, or they would wait for this rank.
            with suppress(PeerError):
                executable.launch(replace(launch, refusal=str(error)))
            raise error
        return executable.launch(launch)

    def load(self, group: Group) -> Engine:
        """This kernel with its memory on `group`, made at first use; collective then.

        Raises:
            GroupError: the group has another size, or its ranks launch different kernels.
        """
        cached = group.cache.get(self.identity)
        if cached is not None:
            return cast("Engine", cached)
        if group.world_size != self.program.world_size:
            raise GroupError(
                f"kernel '{self.program.name}' was compiled for world_size={self.program.world_size}, but this group "
                f"has {group.world_size} ranks; compile it with world_size={group.world_size}"
            )
        # The same barrier as a launch's, since a peer may be in a launch of another kernel.
        group.enter(group.next_epoch(self.key))
        logger.info("symmetric memory of %s:\n%s", self.program.name, self.memory())
        executable = BACKENDS[self.backend].load(self.lowered, self.config, group)
        group.cache[self.identity] = executable
        return executable

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Equal on ranks that compiled the same thing."""
        return program_key(self.program), repr(self.plan), self.backend, repr(self.config.gpu)

    @cached_property
    def key(self) -> LaunchKey:
        """What tells this kernel from others when ranks enter a launch."""
        digest = hashlib.blake2b(repr(self.identity).encode(), digest_size=8).digest()
        return LaunchKey(self.program.name, int.from_bytes(digest, "little"))

    def bind(self, named: Mapping[str, Any], *, trace: bool = False, device: str = "cpu") -> Launch:
        """One launch of this rank on `device`, with its arguments by dotted name in the order of `program.arguments`.

        Raises:
            ArgumentError: an argument does not fit its spec, or lies on another device.
        """
        dims: dict[str, int] = {}
        addresses: list[int] = []
        for memory, array in named.items():
            check_array(self.program.by_name[memory], array, written=memory in self.written, device=device)
            check_shape(self.program.by_name[memory], tuple(array.shape), dims)
            addresses.append(aligned_address(self.program.by_name[memory], array, device))
        self._check_apart(named, addresses)
        return Launch(addresses, [dims[name] for name in self.program.dims], trace, arrays=named, key=self.key)

    def _check_apart(self, named: Mapping[str, Any], addresses: Sequence[int]) -> None:
        """Refuse a written argument that shares memory with another: checks and vector loops take them to be apart."""
        ends = [a + array.nbytes for a, array in zip(addresses, named.values(), strict=True)]
        names = list(named)
        for written in self.written.intersection(names):
            at = names.index(written)
            for other, name in enumerate(names):
                if other != at and addresses[at] < ends[other] and addresses[other] < ends[at]:
                    raise ArgumentError(
                        f"arguments '{written}' and '{name}' share memory, but the kernel writes '{written}'"
                    )

    def named(self, args: tuple[object, ...]) -> dict[str, Any]:
        """Arguments by dotted name, in the order of `Program.arguments`; plain values of the kernel are not passed."""
        names, specs = self._passed
        if len(args) != len(names):
            raise ArgumentError(
                f"kernel '{self.kernel.name}' takes {len(names)} arguments ({', '.join(names)}), got {len(args)}; "
                "plain values were fixed when it was compiled"
            )
        return dict(flatten(names, specs, args))

    @cached_property
    def _passed(self) -> tuple[tuple[str, ...], tuple[object, ...]]:
        """Names and specs of the parameters that a call passes."""
        passed = [(n, s) for n, s in zip(self.kernel.parameters, self.specs, strict=True) if holds_memory(s)]
        return tuple(n for n, _ in passed), tuple(s for _, s in passed)

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the memories that some task writes."""
        ops = (op for task in self.program.tasks for op in walk(task.body))
        return frozenset(a.memory.name for op in ops for a in accesses(op) if a.kind == "write")

    def _check_launch(self, args: tuple[object, ...], error: ArgumentError | None, group: Group) -> None:
        """With TILEWEAVE_DEBUG=1: prove this very launch, on every rank, unless one refuses it anyway."""
        shapes = None
        if error is None:
            shapes = {
                name: np.asarray(array) if isinstance(self.program.by_name[name], Table) else tuple(array.shape)
                for name, array in self.named(args).items()
            }
        every = group.all_gather_object(shapes)
        if None not in every:
            self.check(every)


def check_array(memory: Memory, array: Any, *, written: bool, device: str = "cpu") -> None:
    """Refuse what cannot be passed as `memory` to a kernel on `device`, such as "cuda:0".

    Raises:
        ArgumentError: not an array, of another dtype, not contiguous, on another device, or read-only but `written`.
    """
    if isinstance(array, np.ndarray):
        dtype, contiguous, found = _dtype_name(array.dtype), array.flags.c_contiguous, "cpu"
        if written and not array.flags.writeable:
            raise ArgumentError(f"argument '{memory.name}' is read-only, but the kernel writes it; pass a copy")
    elif hasattr(array, "data_ptr"):
        dtype, contiguous, found = _dtype_name(array.dtype), array.is_contiguous(), str(array.device)
    else:
        raise ArgumentError(f"argument '{memory.name}' needs a torch tensor or NumPy array, got {type(array).__name__}")
    if dtype != memory.dtype.name:
        raise ArgumentError(f"argument '{memory.name}' needs dtype {memory.dtype}, got {dtype}")
    if not contiguous:
        advice = "allocate it contiguous, since the kernel writes it" if written else f"pass {memory.name}.contiguous()"
        raise ArgumentError(f"argument '{memory.name}' is not contiguous; {advice}")
    if found != device:
        needs = "the C engine needs CPU memory" if device == "cpu" else f"pass {memory.name}.to('{device}')"
        raise ArgumentError(f"argument '{memory.name}' is on device {found}; {needs}")


def aligned_address(memory: Memory, array: Any, device: str) -> int:
    """Where `array` begins; vector loads and atomic operations fault, or tear, between elements.

    Emitted GPU code reads 16 bytes at once wherever shapes allow it.

    Raises:
        ArgumentError: it begins elsewhere than on a multiple of that.
    """
    address, size = address_of(array), memory.dtype.itemsize_bytes
    needed, unit = (size, f"its {size}-byte elements") if device == "cpu" else (_GPU_ALIGNMENT, "16 bytes")
    if address % needed and math.prod(array.shape):
        raise ArgumentError(f"argument '{memory.name}' begins at an address that is no multiple of {unit}; pass a copy")
    return address


@lru_cache(maxsize=32)
def _dtype_name(dtype: object) -> str:
    """`float32` for NumPy's and torch's alike."""
    return str(dtype).removeprefix("torch.")


def compile(  # noqa: A001  (the name users expect: tw.compile)
    kernel: Kernel,
    *specs: object,
    world_size: int = 1,
    topology: Topology | None = None,
    target: Literal["cpu"] = "cpu",
    backend: BackendName = "c",
    config: Config | None = None,
    sync: Literal["explicit"] = "explicit",
) -> CompiledKernel:
    """Trace, verify and schedule `kernel`; generated code is built at the first launch.

    Args:
        kernel: a function under `@tw.kernel`.
        specs: one per positional parameter: `tw.Tensor`, `tw.Table`, a dataclass of these, or a plain value.
        world_size: number of ranks.
        backend: `c`, the engine of a machine without a GPU; or, to try what GPUs are given, `triton`, which runs on
            CPU ranks in Triton's interpreter (set TRITON_INTERPRET=1), and `tilelang`, which runs there in float32.
        topology: how ranks are spread over nodes; by default all are on one. Between nodes, tiles that send run in
            a companion kernel beside the megakernel.
        target, sync: only the values shown exist so far.
        config: workers, order, queue and tunables; the default is one worker.

    Raises:
        TraceError, VerifyError: the kernel is not valid; with the user's line.
        ConfigError: an argument is out of range, or the topology has another number of ranks.
        CompileError: a task reaches peers in a way that cannot cross the nodes of `topology`.
    """
    if target != "cpu" or sync != "explicit":
        raise ConfigError(f"target={target!r}, sync={sync!r}: this version has target='cpu', sync='explicit'")
    _known(backend)
    chosen = config or Config()
    program, schedule = compile_program(kernel, specs, world_size, chosen, topology)
    return CompiledKernel(kernel, specs, program, schedule, chosen, backend)


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    return backend
