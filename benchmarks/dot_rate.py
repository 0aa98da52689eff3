"""Rates of the dot kernel of generated C (codegen/c/include/tw_dot.h) beside OpenBLAS and torch.mm, one thread.

    python benchmarks/dot_rate.py [--repeats 9]

Each shape is C[M, N] += A[M, K] @ W[N, K].T. The kernel is called as a tile task calls it, once per panel of
columns; the libraries get the whole product, and also the panels. W is one of several weights, used in turn, that
together exceed the last-level cache, so it comes from memory each time. Contenders take turns, round by round, by the
CPU time of the thread. Rates are medians over rounds; ratios are medians of the ratios within a round, which other
work on the machine moves less.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import scipy_openblas64
import torch

INCLUDE = Path(__file__).resolve().parents[1] / "codegen" / "c" / "include"

SOURCE = r"""
#include "tw_dot.h"
int64_t scratch_floats(void) { return TW_DOT_SCRATCH; }

/* The product in panels of `panel` columns of W, as tile tasks take it. */
void panels(int64_t M, int64_t N, int64_t K, int64_t panel, const void *a, const void *w, int32_t dtype,
            float *c, float *scratch) {
    for (int64_t j = 0; j < N; j += panel) {
        tw_operand x = {a, K, dtype, 0};
        tw_operand y = {(const char *)w + j * K * (dtype == TW_BF16 ? 2 : 4), K, dtype, 0};
        tw_dot(M, j + panel < N ? panel : N - j, K, x, y, c + j, N, scratch);
    }
}

typedef void (*sgemm)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t,
                      float, float *, int64_t);
void blas_panels(sgemm f, int64_t M, int64_t N, int64_t K, int64_t panel, const float *a, const float *w, float *c) {
    for (int64_t j = 0; j < N; j += panel)
        f(101, 111, 112, M, j + panel < N ? panel : N - j, K, 1.0f, a, K, w + j * K, K, 1.0f, c + j, N);
}
"""

# rows, columns, K, columns per call
SHAPES = [
    (1, 1536, 2048, 256),
    (2, 1536, 2048, 256),
    (4, 1536, 2048, 256),
    (8, 1536, 2048, 256),
    (16, 1536, 2048, 256),
    (32, 1536, 2048, 256),
    (64, 1536, 2048, 128),
    (64, 1536, 2048, 256),
    (128, 1536, 2048, 128),
    (128, 1536, 2048, 256),
    (256, 1536, 2048, 256),
    (128, 1536, 1024, 128),
    (128, 1536, 1024, 256),
    (128, 2048, 768, 128),
    (128, 2048, 768, 256),
    (128, 1536, 512, 128),
    (128, 1536, 512, 256),
]


NAMES = ["dot f32", "dot bf16", "blas whole", "blas panels", "torch whole"]


def build(folder: Path) -> ctypes.CDLL:
    """Compile the header into a library."""
    source, library = folder / "dot.c", folder / "libdot.so"
    source.write_text(SOURCE)
    flags = ["-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", f"-I{INCLUDE}"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def aligned(count: int) -> npt.NDArray[np.float32]:
    """A float32 array that starts on a cache line."""
    raw = np.zeros(count + 16, np.float32)
    skip = (-raw.ctypes.data) % 64 // 4
    part: npt.NDArray[np.float32] = raw[skip : skip + count]
    return part


def measure(
    lib: ctypes.CDLL, sgemm: ctypes.c_void_p, shape: tuple[int, int, int, int], repeats: int
) -> list[list[float]]:
    """Seconds of each of NAMES for one product, round by round."""
    rows, cols, depth, panel = shape
    count = max(2, -(-128 * 2**20 // (cols * depth * 4)))
    weights = torch.randn(count, cols, depth)
    halves = weights.to(torch.bfloat16)
    a = torch.randn(rows, depth)
    half = a.to(torch.bfloat16)
    c = torch.zeros(rows, cols)
    out, scratch = c.data_ptr(), aligned(lib.scratch_floats())
    space = scratch.ctypes.data

    def f32(w: int) -> None:
        lib.panels(rows, cols, depth, panel, a.data_ptr(), weights[w].data_ptr(), 0, out, space)

    def bf16(w: int) -> None:
        lib.panels(rows, cols, depth, panel, half.data_ptr(), halves[w].data_ptr(), 1, out, space)

    def whole(w: int) -> None:
        lib.blas_panels(sgemm, rows, cols, depth, cols, a.data_ptr(), weights[w].data_ptr(), out)

    def tiles(w: int) -> None:
        lib.blas_panels(sgemm, rows, cols, depth, panel, a.data_ptr(), weights[w].data_ptr(), out)

    def mm(w: int) -> None:
        torch.mm(a, weights[w].T, out=c)

    contenders: list[Callable[[int], None]] = [f32, bf16, whole, tiles, mm]
    times: list[list[float]] = [[] for _ in contenders]
    loops = max(1, min(count, round(1e8 / (rows * cols * depth))))
    turn = 0
    for repeat in range(repeats + 1):
        for contender, taken in zip(contenders, times, strict=True):
            start = time.thread_time()
            for _ in range(loops):
                turn = (turn + 1) % count
                contender(turn)
            if repeat:
                taken.append((time.thread_time() - start) / loops)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", type=int, nargs="*", help="row counts to keep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)

    with tempfile.TemporaryDirectory() as folder:
        lib = build(Path(folder))
    lib.scratch_floats.restype = ctypes.c_int64
    blas = ctypes.CDLL(str(next(Path(scipy_openblas64.get_lib_dir()).glob("libscipy_openblas64_*.so"))))
    sgemm = ctypes.cast(blas.scipy_cblas_sgemm64_, ctypes.c_void_p)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    lib.panels.argtypes = [size, size, size, size, pointer, pointer, ctypes.c_int32, pointer, pointer]
    lib.blas_panels.argtypes = [pointer, size, size, size, size, pointer, pointer, pointer]

    print("GFLOP/s (GB/s of weights); ratios to the faster OpenBLAS call of each round")
    print(f"{'rows x cols x K / panel':>26}  " + "".join(f"{name:>16}" for name in NAMES) + f"{'f32':>7}{'bf16':>7}")
    for shape in SHAPES:
        rows, cols, depth, panel = shape
        if options.only and rows not in options.only:
            continue
        times = measure(lib, sgemm, shape, options.repeats)
        text = f"{rows:>5} x{cols:>5} x{depth:>5} /{panel:>4}   "
        for name, taken in zip(NAMES, times, strict=True):
            seconds = statistics.median(taken)
            width = 2 if name == "dot bf16" else 4
            rate = f"{2 * rows * cols * depth / seconds / 1e9:.1f} ({cols * depth * width / seconds / 1e9:.1f})"
            text += f"{rate:>16}"
        best = list(map(min, times[2], times[3]))
        ratios = [statistics.median(b / t for b, t in zip(best, dot, strict=True)) for dot in times[:2]]
        print(text + "".join(f"{ratio:>7.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
