"""Imports point one way, and the front half of the compiler needs no torch.

primitives ← compiler ← codegen ← moe: a layer imports itself, the layers before it, and the few
modules of `tileweave/` that all share. Everything else under `tileweave/` may import all of them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("primitives", "compiler", "codegen", "moe")
SHARED = ("errors", "knobs", "native")
FRAMEWORKS = ("torch", "triton", "tilelang")

# Imports the modules named in argv while the frameworks cannot be found, as on a machine without them.
IMPORT_BLOCKED = f"""
import importlib, sys
BLOCKED = {FRAMEWORKS!r}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{{name}} is blocked by the layering test", name=name)
        return None

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(set(BLOCKED) & set(sys.modules)))
"""


def module_name(path: Path, root: Path) -> str:
    """Dotted name below `tileweave` of a file of a layer: …/primitives/expr.py → tileweave.primitives.expr."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("tileweave", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_names(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in `source`, at any depth, type-checking blocks included.

    `from a import b` yields a.b, because b may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = module.split(".")
                keep = keep[: len(keep) - node.level + (1 if is_package else 0)]
                base = ".".join([*keep, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_allowed(layer: str, name: str) -> bool:
    """Whether a module of `layer` may import the dotted `name`."""
    top, *rest = name.split(".")
    if top in LAYERS:
        # The linked folders are importable by their bare names from a checkout; that would load each module twice.
        return False
    if top != "tileweave":
        return True
    if layer == "moe" and (not rest or rest[0] not in (*LAYERS, "cli")):
        # Kernels of the library are written as a user writes them, with `import tileweave as tw`.
        return True
    return bool(rest) and rest[0] in (*LAYERS[: LAYERS.index(layer) + 1], *SHARED)


def layer_files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer: str) -> None:
    files = layer_files(layer)
    assert files, f"no modules under {layer}/"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imported_names(path.read_text(), module_name(path, ROOT), path.name == "__init__.py")
        if not is_allowed(layer, name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", SHARED)
def test_shared_modules_import_no_layer(name: str) -> None:
    path = ROOT / "tileweave" / f"{name}.py"
    if not path.exists():
        pytest.skip(f"tileweave/{name}.py does not exist")
    wrong = [
        f"tileweave/{name}.py:{line} imports {imported}"
        for line, imported in imported_names(path.read_text(), f"tileweave.{name}", False)
        if imported.startswith("tileweave.") and imported.split(".")[1] not in SHARED
    ]
    assert not wrong, "\n".join(wrong)


def test_front_half_imports_without_frameworks() -> None:
    modules = [module_name(path, ROOT) for layer in ("primitives", "compiler") for path in layer_files(layer)]
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_BLOCKED, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_blocking_blocks() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_BLOCKED, "torch"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "torch is blocked by the layering test" in run.stderr


@pytest.mark.parametrize(
    ("layer", "name", "allowed"),
    [
        ("primitives", "numpy", True),
        ("primitives", "tileweave.primitives.expr", True),
        ("primitives", "tileweave.errors", True),
        ("primitives", "tileweave.compiler", False),
        ("primitives", "tileweave", False),
        ("compiler", "tileweave.primitives.ops", True),
        ("compiler", "tileweave.codegen.lower", False),
        ("codegen", "tileweave.compiler.graph", True),
        ("codegen", "tileweave.moe", False),
        ("codegen", "compiler.graph", False),
        ("moe", "tileweave.codegen.c", True),
        ("moe", "tileweave", True),
        ("moe", "tileweave.cli", False),
    ],
)
def test_rule(layer: str, name: str, allowed: bool) -> None:
    assert is_allowed(layer, name) is allowed


def test_relative_imports_resolve() -> None:
    source = "from .. import moe\nfrom .c import emit\nfrom . import lower"
    assert [name for _, name in imported_names(source, "tileweave.codegen.lower", False)] == [
        "tileweave.moe",
        "tileweave.codegen.c.emit",
        "tileweave.codegen.lower",
    ]
    assert [name for _, name in imported_names("from . import c", "tileweave.codegen", True)] == ["tileweave.codegen.c"]
