"""The stage of the recipe ``embed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from muster import Reject, TargetError, load_target
from muster_recipes.embed.encoder import Encoder

if TYPE_CHECKING:
    import numpy as np

_PROBE = ["one"]


@dataclass(kw_only=True)
class Embed:
    """Adds ``embedding``, a float32 vector, to each record with a text in ``column``.

    Either ``model``, an encoder, or ``function``, FILE.py:FUNCTION, from a list of texts to an
    array with a row for each. A record without a text is rejected.
    """

    model: str = ""
    function: str = ""
    column: str = "text"
    pooling: Literal["mean", "cls", "last"] = "mean"
    normalize: bool = False
    batch_size: int = 128
    max_length: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        self._vectors_of: Callable[[Sequence[str]], Any] | None = None
        self._num_dimensions = 0

    def setup(self, device: str) -> None:
        """Load the model or the function, and ask it for one vector to know how long they are."""
        if self.function:
            self._vectors_of = load_target(self.function)
        else:
            self._vectors_of = Encoder(
                self.model,
                device,
                pooling=self.pooling,
                normalize=self.normalize,
                max_length=self.max_length,
                dtype=self.dtype,
            )
        self._num_dimensions = self._vectors(_PROBE).shape[1]

    def columns(self) -> dict[str, str]:
        """The declared types, after ``setup``."""
        return {"embedding": f"float32[{self._num_dimensions}]"}

    def process(self, batch: list[dict[str, Any]]) -> list[dict[str, Any] | Reject]:
        import numpy as np

        texts = [record.get(self.column) for record in batch]
        good = [number for number, text in enumerate(texts) if isinstance(text, str)]
        made: list[dict[str, Any] | Reject] = [self._missing(record) for record in batch]
        if not good:
            return made
        vectors = self._vectors([str(texts[number]) for number in good])
        for number, vector in zip(good, vectors, strict=True):
            if np.isfinite(vector).all():
                made[number] = {**batch[number], "embedding": vector}
            else:
                made[number] = Reject("the embedding has numbers that are not finite")
        return made

    def close(self) -> None:
        self._vectors_of = None

    def _vectors(self, texts: list[str]) -> np.ndarray[Any, Any]:
        """float32 [texts, dimensions]; TargetError for anything else."""
        import numpy as np

        assert self._vectors_of is not None, "setup comes first"
        found = self._vectors_of(texts)
        try:
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is rejected
                vectors = np.array(found, dtype=np.float32, order="C")
        except (TypeError, ValueError) as error:
            raise self._wrong(f"a {type(found).__name__} that is not an array ({error})") from error
        is_table = vectors.ndim == 2 and len(vectors) == len(texts) and vectors.shape[1] > 0
        if not is_table or self._num_dimensions not in (0, vectors.shape[1]):
            raise self._wrong(
                f"an array of the shape {list(vectors.shape)} for {len(texts)} texts"
                + (f" and {self._num_dimensions} dimensions" if self._num_dimensions else "")
            )
        if self.function and self.normalize:
            with np.errstate(all="ignore"):
                norms = np.linalg.norm(vectors, axis=1, keepdims=True)
                vectors /= np.where(norms > 0, norms, np.float32(1))
        return vectors

    def _wrong(self, what: str) -> TargetError:
        return TargetError(
            f"{self.function or self.model} returned {what}.",
            hint="an array with a row for each text, all of one length, is needed.",
        )

    def _missing(self, record: dict[str, Any]) -> Reject:
        if self.column in record:
            kind = type(record[self.column]).__name__
            return Reject(f"the column {self.column!r} holds no text but {kind}")
        there = ", ".join(map(str, record))
        return Reject(f"there is no column {self.column!r}; there are: {there}")
