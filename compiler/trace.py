"""Pass 1, trace: run a kernel function once on symbols and keep what it records."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tileweave.compiler.program import Program
from tileweave.errors import ArgumentError, ConfigError, SourceLocation, TraceError
from tileweave.primitives.memory import Memory, Table, Tensor
from tileweave.primitives.recorder import Recorder, recording
from tileweave.primitives.source import error_location


@dataclass(frozen=True)
class Kernel:
    """A kernel function; `tunables` are its keyword-only parameters with their defaults."""

    function: Callable[..., None]
    tunables: Mapping[str, Any]
    location: SourceLocation

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the positional parameters."""
        return tuple(
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind is not inspect.Parameter.KEYWORD_ONLY
        )

    def __call__(self, *_: object, **__: object) -> None:
        raise TraceError(
            f"kernel '{self.name}' is compiled before it is called: tw.compile({self.name}, …)(…)", self.location
        )


def kernel(function: Callable[..., None]) -> Kernel:
    """Mark `function` as a kernel.

    Positional parameters are tensors, tables, dataclasses of these, or plain values that
    specialise; keyword-only parameters with defaults are tunables.

    Raises:
        TraceError: a keyword-only parameter has no default, or a parameter is variadic.
    """
    code = function.__code__
    location = SourceLocation(code.co_filename, code.co_firstlineno, function.__name__)
    tunables: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise TraceError(f"kernel '{function.__name__}' takes *{parameter.name}; name each parameter", location)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if parameter.default is inspect.Parameter.empty:
                raise TraceError(f"tunable '{parameter.name}' of '{function.__name__}' needs a default", location)
            tunables[parameter.name] = parameter.default
    return Kernel(function, MappingProxyType(tunables), location)


def trace(source: Kernel, specs: tuple[object, ...], world_size: int, tunables: Mapping[str, Any]) -> Program:
    """Record `source` for the given argument specs.

    Args:
        specs: one per positional parameter: `Tensor`, `Table`, a dataclass holding them, or a plain value.
        world_size: number of ranks.
        tunables: values that replace the defaults.

    Raises:
        TraceError: the kernel does what cannot be recorded.
        ConfigError: a tunable is unknown, or the number of specs is wrong.
    """
    names = source.parameters
    if len(specs) != len(names):
        raise ConfigError(f"kernel '{source.name}' takes {len(names)} arguments {names}, got {len(specs)} specs")
    unknown = sorted(set(tunables) - set(source.tunables))
    if unknown:
        raise ConfigError(
            f"kernel '{source.name}' has no tunable '{unknown[0]}'; it has {', '.join(source.tunables) or 'none'}"
        )
    recorder = Recorder(world_size)
    with recording(recorder):
        bound = [_bind(recorder, name, spec) for name, spec in zip(names, specs, strict=True)]
        try:
            source.function(*bound, **{**source.tunables, **tunables})
        except TypeError as error:  # an op with too few arguments, or an operator that scalars do not have
            raise TraceError(str(error), error_location(error)) from error
    return Program(source.name, world_size, tuple(recorder.memories.values()), tuple(recorder.tasks), source.location)


def _bind(recorder: Recorder, name: str, spec: Any) -> Any:
    if isinstance(spec, (Tensor, Table)):
        return recorder.declare(spec.named(name))
    if isinstance(spec, Memory):
        raise ConfigError(f"argument '{name}' is {spec.space} memory; arguments are tw.Tensor or tw.Table")
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {f.name: _bind(recorder, f"{name}.{f.name}", getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **fields)
    return spec


def holds_memory(spec: object) -> bool:
    """Whether a call passes an argument for `spec`: a tensor, a table, or a dataclass with one in it."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, (type, Memory)):
        return any(holds_memory(getattr(spec, f.name)) for f in dataclasses.fields(spec))
    return isinstance(spec, Memory)


def flatten(names: tuple[str, ...], specs: tuple[object, ...], args: tuple[object, ...]) -> Iterator[tuple[str, Any]]:
    """`(dotted name, argument)` for each tensor and table of `specs`, in the order of `Program.arguments`."""
    for name, spec, arg in zip(names, specs, args, strict=True):
        if isinstance(spec, Memory):
            yield name, arg
        elif dataclasses.is_dataclass(spec) and not isinstance(spec, type):
            fields = tuple(f.name for f in dataclasses.fields(spec))
            missing = [f for f in fields if not hasattr(arg, f)]
            if missing:
                raise ArgumentError(
                    f"argument '{name}' needs the fields of {type(spec).__name__} ({', '.join(fields)}), but the "
                    f"{type(arg).__name__} given has no '{missing[0]}'"
                )
            yield from flatten(
                tuple(f"{name}.{f}" for f in fields),
                tuple(getattr(spec, f) for f in fields),
                tuple(getattr(arg, f) for f in fields),
            )
