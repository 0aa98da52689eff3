"""What `tileweave compile --emit` shows of a kernel for a GPU: source, PTX, machine code and a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tileweave.codegen.lower import Lowered
from tileweave.codegen.report import KernelReport, disassemble
from tileweave.compiler.bounds import interval
from tileweave.compiler.config import GpuConfig
from tileweave.compiler.cost import task_cost
from tileweave.errors import ConfigError
from tileweave.primitives.expr import Dim, Expr, TableRead, walk

if TYPE_CHECKING:
    from tileweave.codegen.tilelang.build import GpuBinary

_SM_REGISTERS = 65536
_SM_THREADS = 2048
# Bytes of shared memory that the workers of one SM can have together; each also needs 1 KiB for itself.
_SM_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 1024


class Binary(Protocol):
    """A kernel compiled for an architecture."""

    @property
    def ptx(self) -> str: ...
    @property
    def cubin(self) -> bytes: ...
    @property
    def warps(self) -> int: ...
    def report(self) -> KernelReport: ...


@dataclass(frozen=True)
class Target:
    """A kernel and what to compile it for."""

    lowered: Lowered
    gpu: GpuConfig
    arch: str


def _triton_binary(target: Target) -> Binary:
    from tileweave.codegen.triton.build import build

    return build(target.lowered, target.gpu, target.arch)


def _tilelang_binary(target: Target) -> GpuBinary:
    from tileweave.codegen.tilelang.build import build_for_gpu

    return build_for_gpu(target.lowered, target.gpu, target.arch)


BUILDERS: Mapping[str, Callable[[Target], Binary]] = {"triton": _triton_binary, "tilelang": _tilelang_binary}
"""Backend → machine code."""


def binary_text(what: str, target: Target, backend: str) -> str:
    """`cuda`, `ptx`, `sass` or `report` of a kernel; there is CUDA text of TileLang's kernels alone.

    Raises:
        ConfigError: the backend makes no machine code, or the architecture is unknown.
        BuildError: the compiler is missing, or refuses the kernel.
    """
    if what == "cuda":
        return _tilelang_binary(target).cuda
    if backend not in BUILDERS:
        raise ConfigError(f"backend {backend!r} makes no GPU code; use one of {', '.join(BUILDERS)}")
    binary = BUILDERS[backend](target)
    return _TEXTS[what](binary, target, backend)


def _report(binary: Binary, target: Target, backend: str) -> str:
    report = binary.report()
    return print_report(report, target, binary.warps, f"{target.arch} through {backend}")


GPU_TEXTS = ("cuda", "ptx", "sass", "report")
_TEXTS: Mapping[str, Callable[[Binary, Target, str], str]] = {
    "ptx": lambda binary, target, backend: binary.ptx,
    "sass": lambda binary, target, backend: disassemble(binary.cubin),
    "report": _report,
}


def workers_per_sm(report: KernelReport, warps: int) -> int:
    """How many workers fit one SM at once, by registers, shared memory and threads."""
    threads = 32 * warps
    # Registers are handed out to warps in units of 256.
    registers_a_warp = -(-report.registers * 32 // 256) * 256
    return min(
        _SM_REGISTERS // (registers_a_warp * warps),
        _SM_SHARED_BYTES // (report.shared_bytes + _RESERVED_BYTES),
        _SM_THREADS // threads,
    )


def print_report(report: KernelReport, target: Target, warps: int, what: str) -> str:
    """Figures of the kernel, then one line a task."""
    resident = workers_per_sm(report, warps)
    use = f"{report.registers} registers a thread, {report.spilled_bytes} bytes spilled"
    head = f"{'task':<16}{'matrix':>7}{'tma':>5}  {'loads':<22}{'async copies':<16}{'stores':<20}"
    lines = [
        f"{report.name} for {what}",
        f"  {use}, {report.shared_bytes:,} bytes of shared memory",
        f"  {warps} warps, {_count(target.gpu.stages, 'stage')}, {_count(resident, 'worker')} an SM",
        f"  {head}{'FLOPs a tile':>16}{'bytes a tile':>16}",
    ]
    costs = {task.task.name: task_cost(task.task) for task in target.lowered.tasks}
    for name, part in report.tasks.items():
        cost = costs[name]
        lines.append(
            f"  {name:<16}{part.matrix:>7}{part.tma:>5}  {_widths(part.loads):<22}{_widths(part.copies):<16}"
            f"{_widths(part.stores):<20}{_most(cost.flops):>16}{_most(cost.traffic_bytes):>16}"
        )
    lines.append("loads, async copies, stores: instructions x bytes a thread, of global memory; a tile: a full one")
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _most(expr: Expr) -> str:
    """The highest value of a cost; `by size` where it grows with sizes or tables that only a launch knows."""
    open_ended = [e for e in walk(expr) if isinstance(e, (Dim, TableRead))]
    low, high = (interval(expr, dict.fromkeys(open_ended, (0, 1 << bits)))[1] for bits in (31, 32))
    return f"{high:,}" if low == high else "by size"


def _widths(counts: Mapping[int, int]) -> str:
    return " ".join(f"{count}x{width}" for width, count in counts.items()) or "-"
