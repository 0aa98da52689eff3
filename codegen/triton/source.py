"""Emitted Triton text as a loaded module, kept in the cache folder where a person can read it and step into it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from tileweave import knobs
from tileweave.codegen.lower import Lowered
from tileweave.codegen.missing import MISSING
from tileweave.codegen.triton.emit import emit_module
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError
from tileweave.native import write_atomically

_loading = threading.Lock()


def write_source(lowered: Lowered, gpu: GpuConfig) -> Path:
    """The emitted module in the folder of the `TILEWEAVE_CACHE_DIR` knob.

    Raises:
        BuildError: the folder cannot be written.
    """
    text = emit_module(lowered, gpu)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = knobs.cache_dir.get() / f"{lowered.program.name}_triton_{digest}.py"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise BuildError(
                f"cannot write to the kernel cache {path.parent}: {error}; set TILEWEAVE_CACHE_DIR to a folder you own"
            ) from error
    return path


def load_kernel(lowered: Lowered, gpu: GpuConfig, name: str | None = None) -> Any:
    """The megakernel of `lowered`, or the kernel of another name beside it: a `triton.jit` function.

    Raises:
        BuildError: Triton is not installed, or the cache folder cannot be written.
    """
    require_triton()
    return getattr(_load(write_source(lowered, gpu)), name or lowered.program.name)


def _load(path: Path) -> ModuleType:
    name = f"tileweave_generated.{path.stem}"
    with _loading:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return sys.modules[name]


def require_triton() -> None:
    """Raise unless Triton 3.6 or later can be imported.

    Raises:
        BuildError: it cannot.
    """
    if importlib.util.find_spec("triton") is None:
        raise BuildError(MISSING["triton"])
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 6):
        raise BuildError(f"the Triton backend needs Triton 3.6 or later, found {triton.__version__}")
