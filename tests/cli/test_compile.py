"""`tileweave compile`: what it prints and how it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tileweave.cli import app
from tileweave.commands.compile import find_case
from tileweave.errors import ArgumentError

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_all_gather_gemm.py"
KERNEL = """
import tileweave as tw

@tw.kernel
def double(x, y, *, width=8):
    @tw.task(grid={"t": tw.ceildiv(x.shape[0], width)})
    def twice(t):
        at = tw.ds(t * width, width, stop=x.shape[0])
        tw.store(y, at, tw.load(x, at) * 2.0)
"""
CASES = """
def cases(world_size: int = 2) -> list[tw.Case]:
    one = tw.Tensor(("n",))
    return [tw.Case(double, (one, one), [{"x": (20 + rank,), "y": (20 + rank,)} for rank in range(world_size)])]
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["compile", *map(str, args)])


@pytest.fixture
def kernel_file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL + CASES)
    return path


@pytest.mark.parametrize(
    ("emit", "start"),
    [
        ("program", "kernel double for 2 ranks\n"),
        ("graph", "graph of double: 6 tiles, 6 segments"),
        ("schedule", "schedule of double: order "),
        ("c", "/* double for 2 ranks"),
    ],
)
def test_emits(kernel_file: Path, tmp_path: Path, emit: str, start: str) -> None:
    out = tmp_path / "figures.json"
    result = run(f"{kernel_file}:double", "--emit", emit, "--json", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(start)
    figures = json.loads(out.read_text())
    assert figures["command"] == "compile"
    assert (figures["kernel"], figures["emit"], figures["world_size"]) == ("double", emit, 2)
    assert figures["text"] == result.stdout
    assert {"machine", "version", "config", "program_key", "symmetric_bytes"} <= set(figures)
    assert ("graph" in figures) == (emit in ("graph", "schedule"))


def test_options_replace_the_config_of_the_case(kernel_file: Path) -> None:
    options = ["--workers", 3, "--comm-workers", 1, "--order", "critical_path", "--queue", "dynamic"]
    text = run(f"{kernel_file}:double", "--emit", "schedule", "--world-size", 3, *options).stdout
    assert text.startswith("schedule of double: order critical_path, dynamic queues\n")
    assert "lane comm: roles comm relay; workers 0\n" in text
    assert "lane compute: roles compute reduce; workers 1 2\n" in text
    assert "rank 2 worker" in text


@pytest.mark.parametrize("kernel", ["moe_layer", "dispatch_gemm", "gemm_combine"])
def test_shipped_kernels_by_module(kernel: str) -> None:
    result = run(f"tileweave.moe.kernels:{kernel}", "--emit", "graph")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"graph of {kernel}: ")


def test_an_example() -> None:
    case = find_case(f"{EXAMPLE}:{_first_kernel(EXAMPLE)}")
    assert case.world_size == 2


def _first_kernel(path: Path) -> str:
    lines = path.read_text().splitlines()
    return lines[lines.index("@tw.kernel") + 1].removeprefix("def ").partition("(")[0]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("kernels", "expected FILE.py:KERNEL or MODULE:KERNEL, got 'kernels'"),
        ("nowhere.py:double", "there is no file nowhere.py"),
        ("no.such.module:double", "there is no module 'no.such.module'; a file's name ends in .py"),
        ("tileweave.errors:double", "tileweave.errors has no function cases(); define `def cases(world_size: int)"),
        ("tileweave.moe.kernels:double", "has no kernel 'double'; it has: moe_layer, dispatch_gemm, gemm_combine"),
    ],
)
def test_refused_targets(target: str, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        find_case(target)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (KERNEL, "has no function cases()"),
        ("x = 1 +", "invalid syntax at "),
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this' at "),
        (KERNEL + "def cases():\n    return [3]\n", "returned a int; expected a list of tw.Case"),
        (KERNEL + "def cases():\n    return 1 / 0\n", "ZeroDivisionError: division by zero at "),
        (KERNEL + CASES.replace("range(world_size)", "range(0)"), "has no arguments; expected a mapping per rank"),
    ],
)
def test_refused_files(tmp_path: Path, source: str, text: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(ArgumentError) as caught:
        find_case(f"{path}:double")
    assert text in str(caught.value)
    assert "broken.py" in str(caught.value)


def test_world_size_needs_a_parameter(tmp_path: Path) -> None:
    path = tmp_path / "fixed.py"
    path.write_text(KERNEL + CASES.replace("world_size: int = 2", "").replace("range(world_size)", "range(1)"))
    assert find_case(f"{path}:double").world_size == 1
    with pytest.raises(ArgumentError, match=r"--world-size is given, but cases\(\) of .* takes no world_size"):
        find_case(f"{path}:double", 2)


def test_an_error_is_one_text_without_traceback(kernel_file: Path) -> None:
    result = run(f"{kernel_file}:triple")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cases() of ")
    assert "Traceback" not in result.output
    result = run(f"{kernel_file}:double", "--order", "sideways")
    assert result.exit_code == 1
    assert "order 'sideways' is unknown; use one of program, " in result.stderr


def test_json_into_a_folder_that_cannot_be_made(kernel_file: Path) -> None:
    result = run(f"{kernel_file}:double", "--json", kernel_file / "x.json")
    assert result.exit_code == 1
    assert "error: cannot write " in result.stderr


def test_a_model_for_a_gpu() -> None:
    pytest.importorskip("triton")
    where = ("tileweave.moe.kernels:moe_layer", "--model", "gpt-oss-120b")
    lines = run(*where, "--emit", "report", "--arch", "sm_100").stdout.splitlines()
    assert lines[0] == "moe_layer for sm_100 through triton"
    assert re.fullmatch(r"  \d+ registers a thread, 0 bytes spilled, [\d,]+ bytes of shared memory", lines[1])
    assert lines[2] == "  8 warps, 4 stages, 1 worker an SM"
    assert [line.split()[0] for line in lines[4:8]] == ["dispatch", "gate_up", "down", "combine"]
    assert ".target sm_90a" in run(*where, "--emit", "ptx").stdout
    assert "HGMMA" in run(*where, "--emit", "sass").stdout
    assert "def run_gate_up(" in run(*where, "--emit", "triton").stdout


def test_a_model_through_tilelang() -> None:
    pytest.importorskip("tilelang")
    where = ("tileweave.moe.kernels:gemm_combine", "--model", "gpt-oss-120b")
    assert "def feed_down(" in run(*where, "--emit", "tilelang").stdout
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    assert "tl::wgmma_ss<" in run(*where, "--emit", "cuda").stdout
    lines = run(*where, "--emit", "report", "--through", "tilelang").stdout.splitlines()
    assert lines[0] == "gemm_combine for sm_90 through tilelang"
    assert lines[2] == "  12 warps, 4 stages, 1 worker an SM"


EXAMPLES = EXAMPLE.parent


def test_products_larger_than_shared_memory_are_refused_at_their_line() -> None:
    """At once: Triton would be at it for many minutes."""
    pytest.importorskip("triton")
    result = run(f"{EXAMPLES / '05_own_moe_kernel.py'}:gpt_oss_experts", "--emit", "report")
    assert result.exit_code == 1
    flat = " ".join(result.stderr.split())
    assert "task 'gate_up': a product of tiles [32, 8192] by [8192, 128] takes 5,242,880 bytes of shared memory" in flat
    assert "tw.dot(left, tw.load(weight, (*at, inner)).T, total)" in flat


def test_fewer_stages() -> None:
    pytest.importorskip("triton")
    where = f"{EXAMPLE}:all_gather_gemm"
    assert run(where, "--emit", "report", "--stages", 1).stdout.splitlines()[2].startswith("  8 warps, 1 stage, ")


def test_costs_that_sizes_decide_have_no_figure() -> None:
    pytest.importorskip("triton")
    lines = run(f"{EXAMPLES / '04_gemm_reduce_scatter.py'}:gemm_reduce_scatter", "--emit", "report").stdout.splitlines()
    assert re.split(r"\s{2,}", lines[4].strip())[-2:] == ["by size", "by size"]
    assert re.split(r"\s{2,}", lines[5].strip())[-2:] == ["4,096", "24,576"]


def test_through_without_effect_is_refused() -> None:
    result = run(f"{EXAMPLE}:all_gather_gemm", "--emit", "cuda", "--through", "triton")
    assert result.exit_code == 1
    assert "--through is for --emit ptx, sass and report; --emit cuda is of one backend" in result.stderr


def test_a_model_that_is_not_known() -> None:
    result = run("tileweave.moe.kernels:moe_layer", "--model", "gpt-9", "--emit", "report")
    assert result.exit_code == 1
    assert "model 'gpt-9' is unknown; use one of Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral-8x7B" in result.stderr


def test_a_model_has_no_routing() -> None:
    result = run("tileweave.moe.kernels:moe_layer", "--model", "Mixtral-8x7B", "--emit", "graph")
    assert result.exit_code == 1
    assert "--emit graph needs a routing, which --model does not give; leave --model out" in result.stderr
