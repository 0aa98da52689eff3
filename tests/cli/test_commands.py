"""`tileweave demo`, `bench cpu` and `doctor` at sizes that take seconds: files, figures, refusals; no speeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tileweave import knobs
from tileweave.cli import app
from tileweave.codegen.gpu.machine import Part, Seen, gpu_problem
from tileweave.commands import doctor
from tileweave.commands.bench import SHAPES, Shape
from tileweave.commands.output import bytes_text, histogram, skew
from tileweave.errors import ConfigError

SMALL = ["--tokens", "24", "--hidden", "64", "--intermediate", "32", "--experts", "6", "--topk", "2", "--repeats", "2"]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def test_demo(tmp_path: Path) -> None:
    out, figures_path = tmp_path / "out", tmp_path / "demo.json"
    result = run("demo", *SMALL, "--ranks", 2, "--workers", 2, "--out", out, "--json", figures_path)
    assert result.exit_code == 0, result.output
    for part in ("routing", "symmetric memory", "graph", "schedule", "torch.distributed (gloo)", "hidden", "fp64"):
        assert part in result.stdout
    assert "yes, every bit" in result.stdout

    figures = json.loads(figures_path.read_text())
    assert figures["command"] == "demo"
    assert figures["size"] == {
        "ranks": 2, "tokens": 24, "hidden": 64, "intermediate": 32, "experts": 6, "topk": 2, "workers": 2,
        "dtype": "fp32", "repeats": 2, "seed": 0,
    }  # fmt: skip
    routing = figures["routing"]
    assert sum(routing["rows_per_expert"]) == sum(routing["rows_per_rank"]) == routing["rows"] == 2 * 24 * 2
    assert routing["expert_skew"] == max(routing["rows_per_expert"]) / (routing["rows"] / 6)
    assert figures["memory"]["formula"][-1] == f"total {figures['memory']['symmetric_bytes']:,} bytes a rank"
    assert all(held >= figures["memory"]["symmetric_bytes"] for held in figures["memory"]["heap_bytes"])
    assert sum(map(sum, figures["schedule"]["tiles_per_worker"])) == figures["graph"]["tiles"]
    assert figures["time"]["repeats"] == 2
    assert figures["values"]["bit_equal_to_one_rank"] is True
    assert figures["values"]["error_fp64"] < 1e-5
    assert figures["values"]["tokens_routed_otherwise_in_fp64"] == 0
    assert [r["rank"] for r in figures["overlap"]["ranks"]] == [0, 1]
    assert all(0 <= r["hidden_ns"] <= r["communication_ns"] for r in figures["overlap"]["ranks"])
    assert 0 <= figures["overlap"]["cores_computing"] <= 1

    tiles = [e for e in json.loads((out / "demo_trace.json").read_text())["traceEvents"] if e.get("cat") != "wait"]
    assert len([e for e in tiles if e["ph"] == "X"]) == figures["graph"]["tiles"]
    assert (out / "demo_timeline.png").read_bytes().startswith(b"\x89PNG")


def test_demo_bf16(tmp_path: Path) -> None:
    result = run("demo", *SMALL, "--ranks", 1, "--dtype", "bf16", "--out", tmp_path, "--json", tmp_path / "demo.json")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "demo.json").read_text())["values"]
    assert values["bit_equal_to_one_rank"] is True
    assert values["error_fp64"] < 2e-2


def test_demo_refuses(tmp_path: Path) -> None:
    result = run("demo", "--topk", 9, "--experts", 8, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "error: --topk 9 is more than --experts 8\n"
    (tmp_path / "file").touch()
    result = run("demo", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot make the folder" in result.stderr
    assert run("demo", "--ranks", 0).exit_code == 2
    assert run("demo", "--dtype", "fp8").exit_code == 2


def test_bench(tmp_path: Path) -> None:
    shapes = ["--shape", "8,64,32,6,2,2", "--shape", "0008,64,32,6,2,1"]
    path = tmp_path / "bench.json"
    result = run("bench", "cpu", *shapes, "--dtype", "both", "--repeats", 2, "--profile", "--json", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("geometric mean: ") == 2
    assert "where the time goes: 8,64,32,6,2,2 fp32" in result.stdout

    figures = json.loads(path.read_text())
    assert figures["command"] == "bench cpu"
    assert [(r["shape"]["ranks"], r["dtype"]) for r in figures["results"]] == [
        (2, "fp32"), (1, "fp32"), (2, "bf16"), (1, "bf16"),
    ]  # fmt: skip
    for r in figures["results"]:
        assert r["repeats"] == 2
        assert r["speedup"] == r["gloo_ms"] / r["tileweave_ms"]
        assert r["over_floor"] == r["tileweave_ms"] / r["floor_ms"]
        assert r["plan_ms"] > 0
        assert r["rates"]["gemm_flops_per_s"] > 1e8
        assert r["rates"]["copy_bytes_per_s"] > 1e8
        assert r["difference"] < (1e-5 if r["dtype"] == "fp32" else 3e-2)
    assert set(figures["geometric_mean_speedup"]) == {"fp32", "bf16"}
    assert len(figures["profiles"]) == 4
    profile = figures["profiles"][0]
    assert [(t["task"], t["role"]) for t in profile["tasks"]] == [
        ("dispatch", "comm"), ("gate_up", "compute"), ("down", "compute"), ("combine", "reduce"),
    ]  # fmt: skip
    assert profile["traced_launch_ms"] > 0


def test_shapes() -> None:
    assert str(SHAPES[0]) == "16,2048,768,64,8,2"
    assert all(Shape.parse(str(shape)) == shape for shape in SHAPES)
    routing = SHAPES[0].routing(1)
    assert routing.shape == (16, 8)
    assert all(len(set(row)) == 8 for row in routing.tolist())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1,2,3", "expected six positive integers tokens,hidden,intermediate,experts,topk,ranks"),
        ("a,b,c,d,e,f", "expected six positive integers"),
        ("0,1,1,1,1,1", "expected six positive integers"),
        ("1,1,1,2,3,1", "topk 3 is more than experts 2"),
    ],
)
def test_bench_refuses(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Shape.parse(text)
    result = run("bench", "cpu", "--shape", text)
    assert result.exit_code == 1
    assert problem in result.stderr


def test_doctor(tmp_path: Path) -> None:
    result = run("doctor", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "doctor.json").read_text())
    engines = {e["name"]: e for e in figures["engines"]}
    assert engines["c (CPU)"]["runs"] is True
    sentence = gpu_problem(Seen.now())
    assert figures["gpu"]["GPU"]["missing"] == sentence
    for name in ("triton (GPU)", "tilelang (GPU)"):
        assert sentence is None or engines[name] == {"name": name, "runs": False, "why": sentence}
    assert set(figures["knobs"]) == {knob.name for knob in knobs.ALL}
    assert figures["packages"]["numpy"]


def test_doctor_says_what_gpus_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each missing thing the sentence of the error that a launch would raise."""
    parts = (
        Part("GPU", "NVIDIA H200 (sm_90)", ""),
        Part("triton", "3.9.0", "no Triton"),
        Part("tilelang", "0.1.15", "no TileLang"),
        Part("nvshmem4py", None, "symmetric memory across nodes needs nvshmem4py; run: pip install it"),
        Part("nvcc", None, "nvcc is not on the PATH; install the CUDA toolkit, 13.0 or later"),
    )
    monkeypatch.setattr(doctor, "gpu_parts", lambda: parts)
    result = run("doctor", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "doctor.json").read_text())
    assert figures["gpu"] == {
        "GPU": {"found": "NVIDIA H200 (sm_90)", "missing": None},
        "triton": {"found": "3.9.0", "missing": None},
        "tilelang": {"found": "0.1.15", "missing": None},
        "nvshmem4py": {"found": None, "missing": parts[3].missing},
        "nvcc": {"found": None, "missing": parts[4].missing},
    }
    assert figures["engines"][1:] == [
        {"name": "triton (GPU)", "runs": True, "why": "GPU NVIDIA H200 (sm_90), triton 3.9.0"},
        {"name": "tilelang (GPU)", "runs": False, "why": parts[4].missing},
    ]
    # How lines break depends on the path of the cache.
    flat = "".join(result.output.split())
    for word in ("for GPUs", "NVIDIA H200 (sm_90)", "3.9.0", "0.1.15", "nvshmem4py", "nvcc"):
        assert "".join(word.split()) in flat


def test_doctor_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWEAVE_CC", "no-such-compiler")
    result = run("doctor", "--json", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "doctor.json").read_text())
    assert figures["compiler"] is None
    assert figures["engines"][0]["runs"] is False
    assert "no C compiler: 'no-such-compiler' is not on PATH" in figures["engines"][0]["why"]
    assert figures["knobs"]["TILEWEAVE_CC"] == {"value": "no-such-compiler", "set": True}


def test_help_and_version() -> None:
    assert run("--version").stdout.strip() == __import__("tileweave").__version__
    for command in (["--help"], ["demo", "--help"], ["compile", "--help"], ["bench", "cpu", "--help"]):
        assert run(*command).exit_code == 0


def test_words() -> None:
    assert histogram([0, 1, 4, 8]) == " ▂▅█"
    assert histogram([]) == ""
    assert skew([1, 1, 4]) == 2.0
    assert skew([0, 0]) == 1.0
    assert bytes_text(12) == "12 bytes"
    assert bytes_text(33_562_752) == "32.0 MiB"
    assert bytes_text(3 << 30) == "3.0 GiB"
