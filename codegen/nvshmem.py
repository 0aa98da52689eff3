"""NVSHMEM's files, which its wheel brings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tileweave.errors import BuildError


def nvshmem_file(name: str) -> Path:
    """Path of a file of NVSHMEM's `lib` folder; its headers are in `include` beside that.

    Raises:
        BuildError: it is not there.
    """
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        found = None
    for folder in () if found is None else found.submodule_search_locations or ():
        path = Path(folder) / "lib" / name
        if path.is_file():
            return path
    raise BuildError(f"sends between nodes need NVSHMEM's {name}; run: pip install 'nvidia-nvshmem-cu13>=3.8'")
