"""The command line: options and their ranges. What the commands do is in `tileweave/commands/`.

Each function imports its command when it runs, so that `--help` needs no torch.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

import tileweave
from tileweave.commands.output import reported_errors

app = typer.Typer(
    name="tileweave",
    help="A tile-level DSL and compiler that overlaps computation with communication in MoE layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


class Emit(str, Enum):
    """What `tileweave compile` can show."""

    program = "program"
    graph = "graph"
    schedule = "schedule"
    c = "c"
    triton = "triton"
    tilelang = "tilelang"
    cuda = "cuda"
    ptx = "ptx"
    sass = "sass"
    report = "report"


class Through(str, Enum):
    """Backends that make machine code of GPUs."""

    triton = "triton"
    tilelang = "tilelang"


class Arch(str, Enum):
    """Architectures of GPUs to compile for."""

    sm_90 = "sm_90"
    sm_100 = "sm_100"


class DType(str, Enum):
    """Element types."""

    fp32 = "fp32"
    bf16 = "bf16"


class DTypes(str, Enum):
    """Element types, or both one after the other."""

    fp32 = "fp32"
    bf16 = "bf16"
    both = "both"


class Queue(str, Enum):
    """Kinds of queues."""

    static = "static"
    dynamic = "dynamic"


# typer resolves annotations at run time, and on Python 3.10 wants Optional for options.
JsonPath = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--json", metavar="PATH", help="Also write the figures to this file.", dir_okay=False),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(tileweave.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(  # noqa: PLR0913, PLR0917  (one parameter an option)
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the trace and the timeline.")] = Path("out"),
    json: JsonPath = None,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Ranks, each a process.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, max=65536, help="Tokens a rank.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, max=16384, help="Width of a token.")] = 1024,
    intermediate: Annotated[int, typer.Option(min=1, max=16384, help="Width of an expert.")] = 512,
    experts: Annotated[int, typer.Option(min=1, max=512, help="Experts over all ranks.")] = 32,
    topk: Annotated[int, typer.Option(min=1, max=64, help="Experts a token.")] = 4,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers (threads) a rank.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Of tokens and weights.")] = DType.fp32,
    repeats: Annotated[int, typer.Option(min=0, max=1000, help="Timed repetitions; 0 = a few seconds' worth.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of embeddings and weights.")] = 0,
) -> None:
    """Run an MoE layer on this machine's text, on several ranks, and show all there is to know about the run."""
    with reported_errors():
        from tileweave.commands.demo import DemoSize, run_demo

        size = DemoSize(
            ranks, tokens, hidden, intermediate, experts, topk, workers, dtype.value, repeats=repeats, seed=seed
        )
        run_demo(size, out, json)


@app.command()
def compile(  # noqa: A001, PLR0913, PLR0917  (the command's name; one parameter an option)
    kernel: Annotated[
        str, typer.Argument(metavar="FILE.py:KERNEL", help="A kernel of a file, or MODULE:KERNEL of a dotted module.")
    ],
    emit: Annotated[Emit, typer.Option(help="What to show.")] = Emit.program,
    json: JsonPath = None,
    world_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=64, help="Ranks; needs cases(world_size).  [default: 2]", show_default=False),
    ] = None,
    workers: Annotated[Optional[int], typer.Option(min=1, max=1024, help="Workers a rank.")] = None,  # noqa: UP045
    comm_workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, max=1023, help="Workers of a rank that only communicate."),
    ] = None,
    order: Annotated[Optional[str], typer.Option(help="Name of an order.")] = None,  # noqa: UP045
    queue: Annotated[Optional[Queue], typer.Option(help="Kind of queues.")] = None,  # noqa: UP045
    arch: Annotated[Arch, typer.Option(help="GPU that ptx, sass and report are for; none need be here.")] = Arch.sm_90,
    through: Annotated[
        Optional[Through],  # noqa: UP045
        typer.Option(help="Backend of ptx, sass and report.  [default: triton]", show_default=False),
    ] = None,
    stages: Annotated[Optional[int], typer.Option(min=1, max=8, help="Stages of main loops on a GPU.")] = None,  # noqa: UP045
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="NAME",
            help="A kernel of tileweave.moe for this model's layer, such as DeepSeek-V3; not for graph and schedule.",
        ),
    ] = None,
) -> None:
    """Compile a kernel and print its program, tile graph, schedule, source, or what a GPU's compiler makes of it.

    The kernel's file says with which arguments: `def cases(world_size: int) -> list[tw.Case]`.
    """
    with reported_errors():
        from tileweave.commands.compile import Overrides, Request, run_compile

        changes = Overrides(workers, comm_workers, order, None if queue is None else queue.value, stages)
        backend = None if through is None else through.value
        run_compile(Request(kernel, emit.value, arch.value, backend, world_size, model), changes, json)


@bench_app.command("cpu")
def bench_cpu(
    shape: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="T,H,I,E,K,R",
            help="Tokens a rank, hidden, intermediate, experts, top-k, ranks; may be given several times.  "
            "[default: five shapes]",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[DTypes, typer.Option(help="Of tokens and weights.")] = DTypes.both,
    repeats: Annotated[int, typer.Option(min=0, max=10000, help="Repetitions; 0 = a few seconds' worth.")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="Also show where the time goes.")] = False,
    json: JsonPath = None,
) -> None:
    """This layer, a torch.distributed (gloo) layer and the floor, side by side on the same ranks."""
    with reported_errors():
        from tileweave.commands.bench import run_bench

        dtypes = [DType.fp32.value, DType.bf16.value] if dtype is DTypes.both else [dtype.value]
        run_bench(shape or [], dtypes, repeats, profile, json)


@app.command()
def doctor(json: JsonPath = None) -> None:
    """What is installed, which engines can run here and why not, and the values of all knobs."""
    with reported_errors():
        from tileweave.commands.doctor import run_doctor

        run_doctor(json)
