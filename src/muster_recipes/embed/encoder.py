"""A Hugging Face encoder over texts: tokens, one forward pass, one vector per text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster import MissingPackageError, SetupError
from muster.generation import METER, on_device, use_cache_if_unreachable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_PIECES = 4  # a batch in so many forward passes, so that short texts are not padded to long ones
#: Tokenizers without a limit of their own give a number as large as this or larger.
_NO_LIMIT = 10**6


class Encoder:
    """An encoder on one device, loaded once.

    The vector of a text does not depend on its batch beyond the rounding of float sums.
    """

    def __init__(
        self, model: str, device: str, *, pooling: str, normalize: bool, max_length: int, dtype: str
    ) -> None:
        _check_installed()
        import torch
        from transformers import AutoModel, AutoTokenizer

        if not Path(model).exists():
            use_cache_if_unreachable()
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            self._model: Any = AutoModel.from_pretrained(model, **on_device(device))
        except (OSError, ValueError) as error:
            raise SetupError(
                f"Cannot load the encoder {model}: {error}",
                hint="check the name or the folder, and the network.",
            ) from error
        self._padding = self._tokenizer.pad_token_id or 0  # masked: any token will do
        self._model.eval()
        self._model.to(device, None if dtype == "auto" else getattr(torch, dtype))
        self._device = device
        self._pooling = pooling
        self._normalize = normalize
        self._limit = self._length_limit(model, max_length)

    def __call__(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        """float32 [texts, dimensions]."""
        import torch

        tokens = self._tokenizer(
            list(texts), truncation=self._limit is not None, max_length=self._limit
        )["input_ids"]
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        size = max(1, -(-len(order) // _PIECES))
        pieces = [order[begin : begin + size] for begin in range(0, len(order), size)]
        found = torch.cat([self._piece([tokens[index] for index in piece]) for piece in pieces])
        METER.add("tokens", sum(map(len, tokens)))
        result: np.ndarray[Any, Any] = found[torch.tensor(order).argsort()].numpy()
        return result

    def _piece(self, tokens: list[list[int]]) -> Tensor:
        import torch
        from torch.nn import functional

        with torch.inference_mode():
            width = max(1, *map(len, tokens))
            padded = [row + [self._padding] * (width - len(row)) for row in tokens]
            masks = [[1] * len(row) + [0] * (width - len(row)) for row in tokens]
            ids = torch.tensor(padded, device=self._device)
            mask = torch.tensor(masks, device=self._device)
            hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            vectors = pool(hidden, mask, self._pooling)
            if self._normalize:
                vectors = functional.normalize(vectors, dim=-1)
            return vectors.cpu()

    def _length_limit(self, model: str, wanted: int) -> int | None:
        """Tokens per text: what the user wants, but no more than the model has positions."""
        limits = [
            int(limit)
            for limit in (
                self._tokenizer.model_max_length,
                getattr(self._model.config, "max_position_embeddings", None),
            )
            if limit is not None and 0 < limit < _NO_LIMIT
        ]
        if wanted and limits and wanted > min(limits):
            raise SetupError(
                f"--max-length {wanted} is more than the {min(limits)} tokens that {model} takes.",
                hint="leave --max-length out: then it is as many as the model takes.",
            )
        return wanted or min(limits, default=None)


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """[n, tokens, d] and the mask of real tokens [n, tokens] to [n, d], padded on either side."""
    import torch

    rows = torch.arange(len(hidden), device=hidden.device)
    if pooling == "cls":
        return hidden[rows, mask.argmax(1)]
    if pooling == "last":
        places = torch.arange(mask.shape[1], device=mask.device)
        return hidden[rows, (mask * places).argmax(1)]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackageError("embed --model", "transformers", "transformers")
