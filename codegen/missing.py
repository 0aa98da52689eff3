"""What GPU code needs of a machine, and for each thing the sentence that says that it is missing and what to do."""

from __future__ import annotations

from collections.abc import Mapping

MISSING: Mapping[str, str] = {
    "triton": "the Triton backend needs Triton 3.6 or later; run: pip install 'triton>=3.6'",
    "tilelang": "the TileLang backend needs TileLang 0.1.15 or later; run: pip install 'tileweave[gpu]'",
    "nvshmem4py": "symmetric memory across nodes needs nvshmem4py; run: pip install 'nvshmem4py-cu13>=0.1.2'",
    "nvcc": "nvcc is not on the PATH; install the CUDA toolkit, 13.0 or later",
    "nvlink": "nvlink is not on the PATH; install the CUDA toolkit, 13.0 or later",
}
