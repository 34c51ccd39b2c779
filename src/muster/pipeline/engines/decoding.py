"""The decoding loop of one model: a batch whose rows leave when they are done and join between
tokens. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muster.pipeline.engines.answers import Answer
from muster.pipeline.engines.cache import GrowingLayer, may_join, new_cache
from muster.pipeline.engines.draw import draw, uniform

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
        """Let go of everything; returns the answers that were being written, from anew."""
        active = self.active
        for answer in active:
            answer.restart()
        self._rows, self._cache, self._mask, self._wasted = [], None, torch.empty(0), 0
        self.takes_more = True
        return active

    def drop(self, answer: Answer) -> None:
        """Nobody waits for this one any more."""
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
        """One more token for every row; returns the answers that are complete now."""
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
        """Prompts into ``cache``, padded at the left; the mask and the logits of the last ones."""
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
        """Rows of complete answers out, ``new`` in, columns that are padding for all away."""
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
    """The model for one token of every row, compiled for any number of rows and columns."""
    return torch.compile(model, dynamic=True)
