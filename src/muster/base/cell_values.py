"""Constants of a notebook as source: plain values, and small arrays and tensors."""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import pathlib
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any

_MOST_NUMBERS = 10_000
_MOST_CHARS = 1_000_000
#: Python writes and reads no longer number in decimals.
_MOST_BITS = 14_000
_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis))


@dataclass
class Written:
    """``modules``: what ``text`` needs imported; ``types``: classes of cells that it names."""

    text: str = ""
    modules: set[str] = field(default_factory=set)
    types: list[type] = field(default_factory=list)


class _Refused(Exception):
    """Why a value cannot be written, as the end of a sentence about it."""


def write_value(value: object) -> Written | str:
    """``value`` as an expression; or why it cannot be one: "is an open file".

    >>> write_value({"lr": 0.1, "sizes": (1, 2)}).text
    "{'lr': 0.1, 'sizes': (1, 2)}"
    """
    written = Written()
    try:
        written.text = _write(value, written)
    except _Refused as error:
        return str(error)
    except RecursionError:
        return "contains itself, or is nested too deeply"
    if len(written.text) > _MOST_CHARS:
        return f"is large: it takes {len(written.text):,} characters to write"
    return written


def _write(value: Any, into: Written) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        return hex(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if kind is complex:
        return f"complex({_write(value.real, into)}, {_write(value.imag, into)})"
    if kind in (list, tuple, set, frozenset, dict):
        return _write_container(value, into)
    if kind is range:
        return repr(value)
    if isinstance(value, pathlib.PurePath):
        into.modules.add("pathlib")
        name = "Path" if isinstance(value, pathlib.Path) else kind.__name__
        return f"pathlib.{name}({str(value)!r})"
    if isinstance(value, re.Pattern):
        into.modules.add("re")
        return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, enum.Flag):  # several of them together have no name
        return f"{_name(kind, into)}({_write(value.value, into)})"
    if isinstance(value, enum.Enum):
        return f"{_name(kind, into)}[{value.name!r}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _write_dataclass(value, into)
    if kind.__module__.partition(".")[0] == "numpy":
        return _write_array(value, into)
    if "torch" in sys.modules:
        return _write_torch(value, into, sys.modules["torch"])
    raise _Refused(_what(value))


def _write_container(value: Any, into: Written) -> str:
    if len(value) > _MOST_NUMBERS * 10:
        raise _Refused(f"is large: a {type(value).__name__} of {len(value):,}")
    if isinstance(value, dict):
        pairs = (f"{_write(key, into)}: {_write(item, into)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        inner = ", ".join(sorted(_write(item, into) for item in value))
        name = type(value).__name__
        return f"{name}([{inner}])"
    inner = ", ".join(_write(item, into) for item in value)
    if isinstance(value, list):
        return f"[{inner}]"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def _write_dataclass(value: Any, into: Written) -> str:
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    try:
        is_same = type(value)(**fields) == value
    except Exception:
        is_same = False
    if not is_same:
        raise _Refused(f"is a {type(value).__name__} that cannot be made again from its fields")
    inner = ", ".join(f"{name}={_write(item, into)}" for name, item in fields.items())
    return f"{_name(type(value), into)}({inner})"


def _name(kind: type, into: Written) -> str:
    if kind.__module__ == "__main__" and kind.__qualname__.isidentifier():
        into.types.append(kind)
        return kind.__name__
    if "." in kind.__qualname__ or getattr(sys.modules[kind.__module__], kind.__name__) is not kind:
        raise _Refused(f"is a {kind.__qualname__}, which cannot be imported")
    into.modules.add(kind.__module__)
    return f"{kind.__module__}.{kind.__name__}"


def _write_array(value: Any, into: Written) -> str:
    numpy = sys.modules["numpy"]
    is_plain = type(value) is numpy.ndarray or isinstance(value, numpy.generic)  # no mask
    if not is_plain or value.dtype.kind not in "biufc":
        raise _Refused(_what(value))
    if value.size > _MOST_NUMBERS:
        raise _Refused(f"is a large array: {value.size:,} numbers")
    into.modules.add("numpy")
    inner, kind = _write(value.tolist(), into), value.dtype.str
    if isinstance(value, numpy.generic):
        return f"numpy.dtype({kind!r}).type({inner})"
    return f"numpy.array({inner}, dtype={kind!r}).reshape({value.shape!r})"


def _write_torch(value: Any, into: Written, torch: Any) -> str:
    if isinstance(value, torch.device | torch.dtype):
        into.modules.add("torch")
        return f"torch.device({str(value)!r})" if isinstance(value, torch.device) else str(value)
    if isinstance(value, torch.nn.Module):
        raise _Refused(f"is a live model, a {type(value).__name__}")
    if not isinstance(value, torch.Tensor):
        raise _Refused(_what(value))
    if value.device.type != "cpu":
        raise _Refused(f"is a tensor on {value.device}, in the memory of this process alone")
    if value.numel() > _MOST_NUMBERS:
        raise _Refused(f"is a large tensor: {value.numel():,} numbers")
    if type(value) is not torch.Tensor or value.requires_grad or value.is_sparse:
        raise _Refused("is a tensor with a state of its own, such as a gradient")
    into.modules.add("torch")
    inner = _write(value.tolist(), into)
    return f"torch.tensor({inner}, dtype={value.dtype}).reshape({tuple(value.shape)!r})"


def _what(value: object) -> str:
    kind = type(value)
    if isinstance(value, io.IOBase):
        return "is an open file"
    if isinstance(value, types.GeneratorType):
        return "is a generator, which can be used once and here only"
    if callable(value):
        return f"is a {kind.__qualname__}, whose source is not known"
    module = "" if kind.__module__ in ("__main__", "builtins") else f"{kind.__module__}."
    return f"is a live object of type {module}{kind.__qualname__}"
