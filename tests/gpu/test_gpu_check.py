"""`benchmarks/gpu_check.py` but for what needs a GPU: its refusal, comparisons, plain torch, and what it writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import (
    HEADING,
    ROOT,
    Check,
    Results,
    Times,
    as_json,
    error_of,
    every_case,
    fitting,
    main,
    parse,
    random_batch,
    random_layer,
    section,
    with_section,
)
from tileweave.codegen.gpu.machine import Seen, gpu_problem
from tileweave.moe.baselines import grouped_moe, reference_moe
from tileweave.moe.config import MoEConfig
from tileweave.moe.models import MODELS

RESULTS = Results(
    date="2026-12-01",
    gpu="NVIDIA H200 (sm_90, 132 SMs)",
    versions={"torch": "2.13.0", "driver": "580.1", "nvshmem4py": None},
    repeats=20,
    checks=[Check("moe_layer: out", 1, 1e-7, 5e-6), Check("moe_layer: out", 2, 3e-7, 5e-6), Check("replay", 2, 0, 0)],
    times=[
        Times("Mixtral-8x7B", "triton", 1, 4096, "uniform", 2.0, 3.0, 1.0, 1.5),
        Times("Mixtral-8x7B", "tilelang", 8, 4096, "skewed", 2.0, 3.0, 4.0, None),
    ],
)
TEXT = """\
`python benchmarks/gpu_check.py --write-docs` on 2026-12-01, NVIDIA H200 (sm_90, 132 SMs); torch 2.13.0, driver 580.1.

Largest error as a share of the largest value, over ranks, routings and queues:

| what | error |
| --- | --- |
| moe_layer | 3.0e-07 |
| replay | 0.0e+00 |

Forward of one layer in bf16, virtual ranks on one GPU; median of 20 runs, in ms.
Torch is its grouped product for all tokens at once; the last column is its time over Tileweave's.

| layer | backend | ranks | tokens | routing | Tileweave | graph | torch | graph | torch / Tileweave |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| Mixtral-8x7B | triton | 1 | 4,096 | uniform | 2.000 | 1.000 | 3.000 | 1.500 | 1.50 |
| Mixtral-8x7B | tilelang | 8 | 4,096 | skewed | 2.000 | 4.000 | 3.000 | - | 1.50 |
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_exits_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"{gpu_problem(Seen.now())}\n"
    assert done.stdout == ""


def test_a_wrong_value_leaves_the_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    wrong = Results("", "", {}, 1, [Check("moe_layer: out", 1, math.nan, 5e-6)], [])
    monkeypatch.setattr(gpu_check, "gpu_problem", lambda seen: None)
    monkeypatch.setattr(gpu_check, "run_all", lambda given: wrong)
    assert main(["--write-docs"]) == 1
    assert (ROOT / "docs" / "gpu.md").read_text() == page


def test_the_page_holds_no_figure_that_was_not_measured() -> None:
    _, after = (ROOT / "docs" / "gpu.md").read_text().split(f"{HEADING}\n")
    assert after.strip() == "not yet measured" or after.strip().startswith("`python benchmarks/gpu_check.py")


def test_section() -> None:
    assert section(RESULTS) == TEXT
    page = f"# GPU\n\nIntro\n\n{HEADING}\n\nnot yet measured\n"
    assert with_section(page, TEXT) == f"# GPU\n\nIntro\n\n{HEADING}\n\n{TEXT}"
    assert with_section(f"{page}\n## After\n\nmore\n", TEXT).endswith("1.50 |\n\n## After\n\nmore\n")
    with pytest.raises(ValueError, match="expected one line '## Measured on a GPU', found 0"):
        with_section("# GPU\n", TEXT)


def test_json() -> None:
    figures = json.loads(as_json(RESULTS))
    assert figures["times"][0]["torch_over_tileweave"] == 1.5
    assert figures["checks"][1] == {"what": "moe_layer: out", "world_size": 2, "error": 3e-7, "bound": 5e-6}
    assert figures["versions"]["driver"] == "580.1"


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (parse([]).model, parse([]).ranks) == (list(MODELS), [1, 8])
    given = parse(["--model", "Mixtral-8x7B", "--ranks", "2", "--ranks", "4", "--tokens", "64"])
    assert (given.model, given.ranks, given.tokens) == (["Mixtral-8x7B"], [2, 4], 64)
    for words in (["--ranks", "3"], ["--ranks", "0"], ["--repeats", "0"], ["--model", "none"]):
        with pytest.raises(SystemExit) as caught:
            parse(words)
        assert caught.value.code == 2
    assert "tokens=4096, ranks=3, repeats=20: expected whole shares above 0" in capsys.readouterr().err


def test_errors_are_relative_to_the_largest_value() -> None:
    assert error_of(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])) == 0.25
    assert error_of(torch.zeros(0), torch.zeros(0)) == 0.0
    assert error_of(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0.0
    assert not Check("x", 1, error_of(torch.ones(2), torch.tensor([1.0, math.nan])), 1.0).passed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_the_grouped_layer_is_the_layer(bias: bool, routing: str) -> None:
    config = MoEConfig(hidden=32, intermediate=16, num_experts=6, num_topk=3, bias=bias)
    weights = random_layer(config, range(6), "cpu")
    x, index, scale = random_batch(config, [9, 0, 4], routing, "cpu").joined()
    assert all(len(set(row)) == 3 for row in index.tolist())
    got = grouped_moe(config, weights, x, index, scale)
    torch.testing.assert_close(got.double(), reference_moe(x, index, scale, weights, config), atol=1e-5, rtol=0)


def test_weights_do_not_depend_on_who_makes_them() -> None:
    config = MoEConfig(hidden=8, intermediate=4, num_experts=4, num_topk=1, bias=True)
    every, part = random_layer(config, range(4), "cpu"), random_layer(config, range(2, 4), "cpu")
    every.check(config, 4)
    assert torch.equal(every.gate_up[2:], part.gate_up)
    assert torch.equal(every.down[2:], part.down)


def test_tiles_of_a_cpu_get_as_many_stages_as_fit() -> None:
    pytest.importorskip("triton")
    case = next(case for case in every_case(1) if case.kernel.name == "linear_norm")
    assert case.config.gpu.stages == 3
    assert fitting(case, case.config, "sm_90").gpu.stages == 2


def test_all_shipped_kernels_are_compared() -> None:
    names = {case.kernel.name for case in every_case(2)}
    assert {"moe_layer", "dispatch_gemm", "gemm_combine", "ring", "all_gather_gemm"} <= names
