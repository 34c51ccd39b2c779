"""As much of Triton's language as the sampler's kernel uses, on numpy: programs run one by one.

It shows what the kernel computes, where Triton is not installed. It says nothing about whether
Triton compiles it.
"""

from __future__ import annotations

import importlib
import operator
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from muster_recipes.ssm import sampler_cuda


def _bare(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


class Value:
    """A scalar or a block of one type."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        return Value(self.array.view(dtype) if bitcast else self.array.astype(dtype))

    def __index__(self) -> int:
        return int(self.array)


def _operator(name: str, function: Any) -> None:
    setattr(Value, f"__{name}__", lambda one, two: Value(function(one.array, _bare(two))))
    setattr(Value, f"__r{name}__", lambda one, two: Value(function(two, one.array)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "ge", "eq", "and_"):
    _operator(_name.rstrip("_"), getattr(operator, _name))


class Pointer:
    def __init__(self, flat: Any, offset: int = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + int(more))


class Kernel:
    """``launches``: the grids it was started with."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.launches: list[tuple[int, ...]] = []

    def __call__(self, *words: Any, **more: Any) -> Any:
        return self.function(*words, **more)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*words: Any, num_warps: int, **constants: int) -> None:
            self.launches.append(grid)
            given = [_argument(word) for word in words]
            for _LANGUAGE.program in range(grid[0]):
                self.function(*given, **constants)

        return launch


def _argument(word: Any) -> Any:
    if isinstance(word, torch.Tensor):
        assert word.is_contiguous()
        return Pointer(word.view(-1).numpy())
    return Value(np.float32(word) if isinstance(word, float) else np.int32(word))


def _jit(function: Any = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _philox(c0: Value, c1: Value, c2: Value, c3: Value, k0: Value, k1: Value) -> tuple[Any, ...]:
    assert all(part.array.dtype == np.uint32 for part in (c0, c1, c2, c3, k0, k1))
    first = [int(part.array.flat[0]) for part in (c1, c2, k0, k1)]
    students = torch.from_numpy(c0.array.astype(np.int64))
    words = sampler_cuda.philox(students, first[0], first[1], first[2] | first[3] << 32)
    return tuple(Value(word.numpy().astype(np.uint32)) for word in words)


def _store(pointer: Pointer, value: Value) -> None:
    pointer.flat[pointer.offset] = value.array


_LANGUAGE: Any = types.ModuleType("triton.language")
_LANGUAGE.constexpr = int
for _name in ("uint32", "int32", "int64", "float32", "float64"):
    setattr(_LANGUAGE, _name, getattr(np, _name))
_LANGUAGE.program_id = lambda axis: Value(np.int32(_LANGUAGE.program))
_LANGUAGE.arange = lambda start, stop: Value(np.arange(start, stop, dtype=np.int32))
_LANGUAGE.zeros = lambda shape, dtype: Value(np.zeros(shape, dtype))
_LANGUAGE.load = lambda pointer: Value(pointer.flat[pointer.offset])
_LANGUAGE.store = _store
_LANGUAGE.philox_impl = _philox
_LANGUAGE.sum = lambda value, axis: Value(value.array.sum(axis=axis))
_LANGUAGE.where = lambda which, one, two: Value(np.where(_bare(which), _bare(one), _bare(two)))
_LANGUAGE.maximum = lambda one, two: Value(np.maximum(_bare(one), _bare(two)))
_LANGUAGE.log = lambda value: Value(np.log(value.array))
_LANGUAGE.sqrt = lambda value: Value(np.sqrt(value.array))


@contextmanager
def kernel() -> Iterator[Kernel]:
    """The sampler's kernel, and the modules that it is made of for as long."""
    name = "muster_recipes.ssm.sampler_triton"
    triton: Any = types.ModuleType("triton")
    triton.jit, triton.language = _jit, _LANGUAGE
    mine = {"triton": triton, "triton.language": _LANGUAGE}
    before = {each: sys.modules.pop(each, None) for each in (*mine, name)}
    sys.modules.update(mine)
    try:
        yield importlib.import_module(name).sample_kernel
    finally:
        for each, module in before.items():
            sys.modules.pop(each, None)
            if module is not None:
                sys.modules[each] = module
