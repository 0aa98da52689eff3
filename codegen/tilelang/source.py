"""Emitted TileLang text as a loaded module, kept in the cache folder where a person can read it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tileweave import knobs
from tileweave.codegen.lower import Lowered
from tileweave.codegen.tilelang.emit import emit_module
from tileweave.codegen.tilelang.target import Target
from tileweave.compiler.config import GpuConfig
from tileweave.errors import BuildError
from tileweave.native import write_atomically


def write_source(lowered: Lowered, target: Target, gpu: GpuConfig) -> Path:
    """The emitted module in the folder of the `TILEWEAVE_CACHE_DIR` knob.

    Raises:
        BuildError: the folder cannot be written.
        CompileError: the target has no text for the kernel.
    """
    text = emit_module(lowered, target, gpu)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = knobs.cache_dir.get() / f"{lowered.program.name}_tilelang_{digest}.py"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise BuildError(
                f"cannot write to the kernel cache {path.parent}: {error}; set TILEWEAVE_CACHE_DIR to a folder you own"
            ) from error
    return path


def load_module(path: Path) -> ModuleType:
    """The emitted module, imported once."""
    name = f"tileweave_generated.{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
