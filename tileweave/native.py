"""C source text to a loaded shared library, through a cache on disk.

The cache is by content: a library's file name carries the hash of everything that its
machine code depends on. A hit reads a few small files and starts no process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from tileweave import knobs
from tileweave.errors import BuildError

DEFAULT_FLAGS: tuple[str, ...] = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")

_libraries: dict[Path, ctypes.CDLL] = {}
_libraries_lock = threading.Lock()


def build(source: str, name: str, *, include_dirs: Sequence[Path] = (), flags: Sequence[str] = DEFAULT_FLAGS) -> Path:
    """Compile C `source` to a shared library and return its path.

    `name` begins the file names `<name>-<hash>.c` and `<name>-<hash>.so` in the folder
    of the `TILEWEAVE_CACHE_DIR` knob. Any number of processes and threads may build the
    same source at once: one compiles, the others wait and take its result.
    Linker flags (`-lm`) may stand in `flags`; they come after the source.

    Raises:
        BuildError: no compiler, the compiler refused the source, or the cache folder
            cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise BuildError(f"library name {name!r} may hold letters, digits, '_', '.' and '-' only")
    command = _compiler()
    digest = _digest(source, include_dirs, flags, command)
    folder = knobs.cache_dir.get()
    library = folder / f"{name}-{digest[:12]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "locks" / f"{name}-{digest[:12]}.lock"):
            if not library.exists():  # else another process made it while this one waited
                _compile(command, source, library, include_dirs, flags)
    except OSError as error:
        raise BuildError(
            f"cannot write to the kernel cache {folder}: {error}; set TILEWEAVE_CACHE_DIR to a folder you own"
        ) from error
    return library


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded once per process. Calls through it release the GIL.

    Raises:
        BuildError: the file is missing or is no library of this machine.
    """
    with _libraries_lock:
        library = _libraries.get(path)
        if library is None:
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise BuildError(f"cannot load {path}: {error}; delete the file and run again") from error
            _libraries[path] = library
        return library


def _compiler() -> tuple[str, ...]:
    """The compiler command, its program as a full path."""
    words = shlex.split(knobs.cc.get())
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise BuildError(
            f"no C compiler: {knobs.cc.get()!r} is not on PATH; install gcc or clang (Debian: apt install gcc "
            "libc6-dev), or set TILEWEAVE_CC to your compiler's command"
        )
    return (program, *words[1:])


def _digest(source: str, include_dirs: Sequence[Path], flags: Sequence[str], command: tuple[str, ...]) -> str:
    """Hash of all that the machine code depends on."""
    parts = [source, *_headers(source, include_dirs), *flags, *command, _program_id(command[0])]
    if any(flag.endswith("=native") for flag in flags):
        parts.append(_cpu())
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode()
        hashed.update(b"%d:" % len(data))  # lengths keep neighbouring parts apart
        hashed.update(data)
    return hashed.hexdigest()


def _headers(source: str, include_dirs: Sequence[Path]) -> list[str]:
    """Name and text of every `#include "…"` found in `include_dirs`, also of those they include."""
    texts: dict[Path, str] = {}
    pending = [source]
    while pending:
        for included in _INCLUDE.findall(pending.pop()):
            path = next((folder / included for folder in include_dirs if (folder / included).is_file()), None)
            if path is not None and path not in texts:  # one that is not found is left to the compiler to report
                texts[path] = path.read_text()
                pending.append(texts[path])
    # Folders are left out of the hash: a moved checkout finds its libraries again.
    return [f"{path.name}\n{text}" for path, text in texts.items()]


def _program_id(program: str) -> str:
    """What changes when the compiler is upgraded; needs no call of the compiler."""
    path = Path(program).resolve()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


@lru_cache(maxsize=1)
def _cpu() -> str:
    """The lines of /proc/cpuinfo that decide what -march=native means."""
    try:
        with Path("/proc/cpuinfo").open("rb", buffering=0) as file:
            first = file.read(16384).decode(errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    lines = [line for line in first.splitlines() if line.split(":")[0].strip() in _CPU_FIELDS]
    return "\n".join([os.uname().machine, *lines])


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `path` so that others see all of it or nothing; any number of processes and threads may write it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`; excludes threads too, as each call opens the file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):  # a file system without locks: work is done twice, but renames keep it right
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(
    command: tuple[str, ...], source: str, library: Path, include_dirs: Sequence[Path], flags: Sequence[str]
) -> None:
    mark = f"{os.getpid()}-{threading.get_ident()}"
    text_path = library.with_suffix(".c")
    partial = library.with_suffix(f".{mark}.so.tmp")
    try:
        write_atomically(text_path, source)
        includes = [f"-I{folder}" for folder in include_dirs]
        words = [*command, *includes, str(text_path), *flags, "-o", str(partial)]
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:
            raise BuildError(
                f"the C compiler refused {text_path} (exit code {done.returncode}):\n{done.stderr.strip()}\n"
                f"command: {shlex.join(words)}\n"
                "If you did not write this C yourself, please report it with the file; "
                "if the compiler is too old, set TILEWEAVE_CC to gcc 9 or clang 12 or later"
            )
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)
