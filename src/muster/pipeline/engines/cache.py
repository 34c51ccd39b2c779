"""Keys and values of the tokens so far, in buffers that grow ahead of need.

Transformers' own dynamic layer copies all of its tokens for every new one. Rows here end at the
same column, so that rows may leave and others join between two tokens.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

_SLACK = 64
#: Optional, and typed in some of its versions only.
_theirs: Any = importlib.import_module("transformers.cache_utils")


class GrowingLayer(_theirs.CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [rows, heads, length, head size] of one layer."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserve room for these and some more."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = _reserved(key_states, key_states.shape[0], _room(key_states.shape[2]))
        self.values = _reserved(value_states, value_states.shape[0], _room(key_states.shape[2]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; returns all of it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, end = self.length, self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.keys = _moved(self.keys[:, :, :begin], _room(end))
            self.values = _moved(self.values[:, :, :begin], _room(end))
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length with the query, and the column at which it begins."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def rebuild(self, rows: Tensor, old: int, new: GrowingLayer | None, length: int) -> None:
        """Keep ``rows``, put those of ``new`` below, and ``length`` columns in all.

        ``old``: how many of the last columns of this layer are worth keeping.
        """
        self.keys = _rebuilt(self.keys, self.length, rows, old, new, "keys", length)
        self.values = _rebuilt(self.values, self.length, rows, old, new, "values", length)
        self.length = length


def new_cache(model: Any) -> Any:
    """An empty cache with growing layers where the model has ordinary attention."""
    cache = _theirs.DynamicCache(config=model.config)
    cache.layers = [
        GrowingLayer() if type(layer) is _theirs.DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def may_join(cache: Any) -> bool:
    """Whether rows may leave and join: not with sliding windows or recurrent states."""
    return bool(cache.layers) and all(type(layer) is GrowingLayer for layer in cache.layers)


def _rebuilt(
    source: Tensor,
    end: int,
    rows: Tensor,
    old: int,
    new: GrowingLayer | None,
    name: str,
    length: int,
) -> Tensor:
    count = len(rows)
    total = count + (0 if new is None else getattr(new, name).shape[0])
    target = _reserved(source, total, _room(length))
    # What stands left of a row's first token is masked, but a mask does not tame NaN or infinity.
    target[:, :, :length].zero_()
    target[:count, :, length - old : length] = source[rows, :, end - old : end]
    if new is not None:
        added = getattr(new, name)[:, :, : new.length]
        target[count:, :, length - new.length : length] = added
    return target


def _reserved(like: Tensor, rows: int, columns: int) -> Tensor:
    return torch.empty(
        rows, like.shape[1], columns, like.shape[3], dtype=like.dtype, device=like.device
    )


def _moved(source: Tensor, columns: int) -> Tensor:
    target = _reserved(source, source.shape[0], columns)
    target[:, :, : source.shape[2]] = source
    return target


def _room(length: int) -> int:
    return length + max(_SLACK, length // 4)
