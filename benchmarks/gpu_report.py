"""What the compilers make of the shipped kernels, for the layers of published models: the tables of docs/gpu.md.

    python benchmarks/gpu_report.py [--arch sm_90] [--arch sm_100] [--through triton] [--through tilelang]

Needs no GPU. Each layer is compiled in bf16 for 8 ranks of 4,096 tokens each, with the default tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tileweave.codegen.gpu_text import BUILDERS, Target, workers_per_sm
from tileweave.codegen.report import KernelReport
from tileweave.moe.gpu import DEFAULTS, Deployment, compile_layer, gpu_defaults
from tileweave.moe.models import MODELS


def rows(arch: str, backend: str) -> Iterator[str]:
    """A Markdown table of one architecture through one backend."""
    columns = ("layer", "kernel", "registers", "spilled", "shared bytes", "workers an SM", "matrix", "TMA",
               "16-byte async copies", "loads of dispatch")  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "| --- " * len(columns) + "|"
    for name, model in MODELS.items():
        for kernel in compile_layer(model, arch, Deployment()):
            binary = BUILDERS[backend](Target(kernel.lowered, kernel.config.gpu, arch))
            report = binary.report()
            resident = workers_per_sm(report, binary.warps)
            total = report.instructions
            yield (
                f"| {name} | {report.name} | {report.registers} | {report.spilled_bytes} | {report.shared_bytes:,} | "
                f"{resident} | {total.matrix} | {total.tma} | {total.copies.get(16, 0)} | {_dispatch(report)} |"
            )


def _dispatch(report: KernelReport) -> str:
    """Widest global load of the copy task, bytes a thread."""
    task = report.tasks.get("dispatch")
    return "" if task is None else f"{max(task.loads)} bytes"


def main() -> None:
    """Print a table for each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=sorted(DEFAULTS), help="architecture; may be given again")
    parser.add_argument("--through", action="append", choices=sorted(BUILDERS), help="backend; may be given again")
    given = parser.parse_args()
    for backend in given.through or BUILDERS:
        for arch in given.arch or (DEFAULTS if backend == "triton" else ["sm_90"]):
            defaults = gpu_defaults(arch)
            print(f"### {arch} through {backend}\n\n`{defaults.tiles}`, `{defaults.gpu}`\n")
            print("\n".join(rows(arch, backend)) + "\n")


if __name__ == "__main__":
    main()
