"""What a compiler made of a kernel, read from its machine code: registers, spills, instructions, a task's share."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tileweave.errors import BuildError

_LINE = re.compile(r'^\s*//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# Matrix instructions of sm_80, sm_90 and sm_100.
_MATRIX = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
MAX_SHARED_BYTES = 227 * 1024  # of one worker, on sm_90 and sm_100
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Instructions:
    """Counts of instructions in the text of a kernel, or of one task; widths are bytes a thread.

    matrix: matrix multiply instructions (wgmma on sm_90). tma: loads and stores by the tensor
    memory accelerator. loads, copies, stores: loads of global memory, asynchronous copies from
    it to shared memory, and stores to it, by width; with those whose address the compiler takes
    to be of any memory. spills: accesses of local memory.
    """

    matrix: int = 0
    tma: int = 0
    loads: Mapping[int, int] = field(default_factory=dict)
    copies: Mapping[int, int] = field(default_factory=dict)
    stores: Mapping[int, int] = field(default_factory=dict)
    spills: int = 0

    @staticmethod
    def of(opcodes: Counter[str]) -> Instructions:
        """Count by opcode with its modifiers, such as `LDG.E.128`."""

        def total(*names: str) -> int:
            return sum(count for opcode, count in opcodes.items() if opcode.split(".")[0] in names)

        def widths(*names: str) -> dict[int, int]:
            found: Counter[int] = Counter()
            for opcode, count in opcodes.items():
                first, *modifiers = opcode.split(".")
                if first in names:
                    found[next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 4)] += count
            return dict(sorted(found.items()))

        return Instructions(
            total(*_MATRIX), total("UTMALDG", "UTMASTG", "UBLKCP"), widths("LDG", "LD"), widths("LDGSTS"),
            widths("STG", "ST"), total("LDL", "STL"),
        )  # fmt: skip


@dataclass(frozen=True)
class KernelReport:
    """One kernel as compiled.

    registers a thread; spilled_bytes of stack a thread (emitted kernels keep nothing else
    there); static shared_bytes of a worker; instructions of all, and of the lines of each task.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: Instructions
    tasks: Mapping[str, Instructions]


@dataclass(frozen=True)
class SourceLines:
    """The lines of the generated file that each task stands in."""

    file: str
    tasks: Mapping[str, Sequence[range]]

    def task_of(self, chain: list[tuple[str, int]]) -> str | None:
        """The task whose lines an instruction comes from, through whatever was inlined."""
        for file, line in chain:
            if Path(file).name == self.file:
                for name, spans in self.tasks.items():
                    if any(line in span for span in spans):
                        return name
        return None


def check_shared_memory(name: str, shared_bytes: int) -> None:
    """Refuse a kernel whose worker does not fit an SM.

    Raises:
        BuildError: it needs more shared memory than there is.
    """
    if shared_bytes > MAX_SHARED_BYTES:
        raise BuildError(
            f"kernel '{name}' needs {shared_bytes:,} bytes of shared memory, but a worker can have "
            f"{MAX_SHARED_BYTES:,}; use smaller tiles or fewer stages"
        )


def report_of_cubin(cubin: bytes, name: str, lines: SourceLines | None = None) -> KernelReport:
    """Read kernel `name` of a cubin; with `lines`, and line information in the cubin, also each task's share.

    Raises:
        BuildError: no disassembler, or the cubin has no such kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run([tool("cuobjdump"), "-res-usage", str(path)])
        text = _run([tool("nvdisasm"), "-c", "-gi", str(path)])
    found = re.search(rf"Function {re.escape(name)}:\s*\n\s*(.*)", usage)
    figures = None if found is None else _USAGE.search(found.group(1))
    if figures is None:
        raise BuildError(f"the machine code holds no kernel {name!r}")
    registers, stack, shared, local = (int(figure) for figure in figures.groups())
    total: Counter[str] = Counter()
    tasks: dict[str, Counter[str]] = {task: Counter() for task in (lines.tasks if lines else ())}
    for opcode, chain in _instructions(text, name):
        total[opcode] += 1
        task = lines.task_of(chain) if lines else None
        if task is not None:
            tasks[task][opcode] += 1
    shares = {task: Instructions.of(opcodes) for task, opcodes in tasks.items()}
    return KernelReport(name, registers, stack + local, shared, Instructions.of(total), shares)


def _instructions(text: str, name: str) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Opcode of each instruction of a kernel, with the lines it comes from, innermost first."""
    chain: list[tuple[str, int]] = []
    inside, fresh = False, True
    for row in text.splitlines():
        if row.lstrip().startswith("//------"):
            inside = row.split()[1] == f".text.{name}"
        elif not inside:
            continue
        elif (at := _LINE.match(row)) is not None:
            chain = [] if fresh else chain
            chain.append((at.group(1), int(at.group(2))))
            fresh = False
        elif (instruction := _INSTRUCTION.match(row)) is not None:
            fresh = True
            yield instruction.group(1), chain


def disassemble(cubin: bytes) -> str:
    """The machine code as text (SASS).

    Raises:
        BuildError: no disassembler.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run([tool("nvdisasm"), "-c", str(path)])


def tool(name: str) -> str:
    """Path of one of NVIDIA's binary tools: Triton's wheel brings them, and so does the CUDA toolkit.

    Raises:
        BuildError: neither is there.
    """
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
        if bundled.is_file():
            return str(bundled)
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not here; install Triton, whose wheel brings it: pip install 'triton>=3.6'")
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout
