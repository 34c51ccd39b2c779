"""The decoding loop of one model: rows leave the batch when they are done and join between tokens.

Every token is drawn with one uniform number, a function of (seed, position) alone: the batch, the
device and the order of requests have no part in it. The token is where the cumulated
probabilities, in the order of the vocabulary, first exceed that number; rounding of the logits
therefore changes a token only where the number is that close to a border. Only one thread may use
a decoder.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muster.pipeline.engines.answers import Answer

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64 of the seed, then of the position."""
    return (_mixed(_mixed(seed) + _GOLDEN * (position + 1)) >> 11) * 2.0**-53


def _mixed(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


#: Tokens among which the nucleus of top-p is looked for first; most have fewer than a hundred.
_NUCLEUS = 1024


def draw(
    logits: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], noise: Sequence[float]
) -> Tensor:
    """Tokens [n] for logits [n, vocabulary]; temperature 0 takes the most probable token."""
    likeliest = logits.argmax(-1)
    if max(temperatures, default=0.0) <= 0:
        return likeliest
    # One copy to the device, and what it needs not tell us is decided from the lists.
    settings = torch.tensor(
        [temperatures, top_ps, noise], dtype=torch.float64, device=logits.device
    )
    temperature, top_p, uniforms = settings.unsqueeze(-1)
    is_drawn = temperature > 0
    probabilities = (logits.double() / temperature.where(is_drawn, 1.0)).softmax(-1)
    if min(top_ps) < 1:
        least = _least(logits, probabilities, top_p.where(is_drawn, 1.0))
        probabilities = probabilities.where(probabilities >= least, 0.0)
    cumulated = probabilities.cumsum(-1)
    tokens: Tensor = (cumulated <= uniforms * cumulated[:, -1:]).sum(-1)
    # Rounding may put the border above the sum; the most probable token is as good an end as any.
    is_drawn = is_drawn.squeeze(-1) & (tokens < logits.shape[-1])
    return tokens.where(is_drawn, likeliest)


def _least(logits: Tensor, probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The smallest probability [n, 1] among the fewest tokens that hold ``top_p`` [n, 1] together;
    0 where that is 1.

    Logits have the order of their probabilities in half the bytes or a quarter, and a nucleus is
    a small part of a vocabulary: the largest are taken first, and all of them only where those do
    not hold ``top_p``. The sums are those of a sort of all probabilities, term by term.
    """
    width = logits.shape[-1]
    for size in (min(_NUCLEUS, width), width):
        falling = probabilities.gather(-1, logits.topk(size).indices)
        before = falling.cumsum(-1) - falling
        is_in = (before < top_p) & (top_p < 1)
        if size == width or not bool(is_in[:, -1].any()):
            break
    count = is_in.sum(-1, keepdim=True)
    return falling.gather(-1, (count - 1).clamp(min=0)).where(top_p < 1, 0.0)


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
        """Reserve memory for these columns and some more."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = _reserved(key_states, key_states.shape[0], _room(key_states.shape[2]))
        self.values = _reserved(value_states, value_states.shape[0], _room(key_states.shape[2]))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns all that are in use."""
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
        """The length with the query, and the column at which the mask begins."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """The number of columns in use."""
        return self.length

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
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


_MASK_SLACK = 256


class Decoder:
    """``forward``: the model, or what was compiled of it."""

    def __init__(self, model: Any, forward: Any = None) -> None:
        self._model = model
        self._forward = model if forward is None else forward
        self._device: torch.device = model.device
        #: The rows of the batch; None where an answer is complete but its row is still there.
        self._rows: list[Answer | None] = []
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._padded = False
        self._wasted = 0
        self.takes_more = True

    @property
    def active(self) -> list[Answer]:
        """The answers that are being written."""
        return [answer for answer in self._rows if answer is not None]

    def clear(self) -> list[Answer]:
        """Drop the batch; return the answers that were being written, which start again."""
        active = self.active
        for answer in active:
            answer.restart()
        self._rows, self._cache, self._mask, self._wasted = [], None, torch.empty(0), 0
        self.takes_more = True
        return active

    def drop(self, answer: Answer) -> None:
        """Drop an answer that nobody waits for any more."""
        self._rows = [None if row is answer else row for row in self._rows]

    def admit(self, answers: Sequence[Answer]) -> list[Answer]:
        """Read their prompts and write their first tokens; returns those that are complete."""
        if not self.active:
            self.clear()
        if self._rows and not self.takes_more:
            raise ValueError("This model's cache takes no rows in the middle of a batch.")
        with torch.inference_mode():
            cache = new_cache(self._model)
            mask, logits = self._read(answers, cache)
            if self._rows:
                self._rebuild(list(answers), cache)
            else:
                self._rows, self._cache, self._mask = list(answers), cache, mask
                self._padded = not bool(mask.all())
                self.takes_more = may_join(cache)
            return self._take(logits, len(self._rows) - len(answers))

    def step(self) -> list[Answer]:
        """Write one more token of every row; returns the answers that are complete now."""
        with torch.inference_mode():
            self._leave()
            tokens = [0 if row is None else row.tokens[-1] for row in self._rows]
            positions = [0 if row is None else row.length - 1 for row in self._rows]
            length = self._cache.get_seq_length() + 1
            out = self._forward(
                input_ids=self._column(tokens),
                position_ids=self._column(positions),
                attention_mask=self._mask_for(length),
                past_key_values=self._cache,
                use_cache=True,
            )
            return self._take(out.logits[:, -1], 0)

    def _read(self, answers: Sequence[Answer], cache: Any) -> tuple[Tensor, Tensor]:
        """Read prompts into ``cache``, padded at the left; returns the mask and the last logits."""
        width = max(len(answer.prompt) for answer in answers)
        gaps = [width - len(answer.prompt) for answer in answers]
        tokens = [[0] * gap + answer.prompt for gap, answer in zip(gaps, answers, strict=True)]
        starts = torch.tensor(gaps, device=self._device)[:, None]
        columns = torch.arange(width, device=self._device)[None]
        mask = (columns >= starts).long()
        out = self._model(
            input_ids=torch.tensor(tokens, device=self._device),
            position_ids=(columns - starts).clamp(min=0),
            attention_mask=mask if any(gaps) else None,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return mask, out.logits[:, -1]

    def _take(self, logits: Tensor, first: int) -> list[Answer]:
        """Draw a token for the rows from ``first`` on, to which ``logits`` belong."""
        answers = self._rows[first:]
        tokens = draw(
            logits,
            [0.0 if row is None else row.sampling.temperature for row in answers],
            [1.0 if row is None else row.sampling.top_p for row in answers],
            [0.0 if row is None else uniform(row.seed, len(row.tokens)) for row in answers],
        ).tolist()
        complete = []
        for place, (answer, token) in enumerate(zip(answers, tokens, strict=True), first):
            if answer is not None and answer.take(token):
                self._rows[place] = None
                complete.append(answer)
        return complete

    def _leave(self) -> None:
        """Take the rows of complete answers out once they have cost as much as taking them out.

        That is a copy of the cache, about what one token of the batch costs.
        """
        self._wasted += self._rows.count(None)
        if self._wasted < len(self._rows) or not self._rows.count(None):
            return
        if self.takes_more:
            self._rebuild([], None)
            return
        keep = torch.tensor(self._kept(), device=self._device)
        if all(hasattr(layer, "batch_select_indices") for layer in self._cache.layers):
            self._cache.batch_select_indices(keep)
            self._mask = self._mask[keep]
            self._rows = list(self.active)
        self._wasted = 0

    def _kept(self) -> list[int]:
        return [place for place, row in enumerate(self._rows) if row is not None]

    def _rebuild(self, new: list[Answer], new_cache: Any) -> None:
        """Take complete answers out, put ``new`` in, and drop columns that only hold padding."""
        keep = torch.tensor(self._kept(), dtype=torch.long, device=self._device)
        active = self.active
        # The last token drawn is not in the cache yet; of new ones, none is.
        lengths = [answer.length - 1 for answer in active]
        old = max(lengths)
        lengths += [len(answer.prompt) for answer in new]
        width = max(old, new_cache.get_seq_length() if new else 0)
        for number, layer in enumerate(self._cache.layers):
            added: GrowingLayer | None = new_cache.layers[number] if new else None
            layer.rebuild(keep, old, added, width)
            if added is not None:
                new_cache.layers[number] = None  # its memory is free for the next layer's
        starts = torch.tensor([width - length for length in lengths], device=self._device)[:, None]
        self._mask = (torch.arange(width, device=self._device)[None] >= starts).long()
        self._padded = any(length != width for length in lengths)
        self._rows = [*active, *new]
        self._wasted = 0

    def _mask_for(self, length: int) -> Tensor | None:
        """The mask [rows, length]; what was written after the prompts is seen by every row."""
        if not self._padded:
            return None
        if length > self._mask.shape[1]:
            missing = length + _MASK_SLACK - self._mask.shape[1]
            ones = self._mask.new_ones(self._mask.shape[0], missing)
            self._mask = torch.cat([self._mask, ones], 1)
        return self._mask[:, :length]

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]


def compiled(model: Any) -> Any:
    """Compile the model for one token of every row, and any number of rows and columns."""
    return torch.compile(model, dynamic=True)
