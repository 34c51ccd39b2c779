"""One answer while it is written: its tokens so far, and whether it has come to an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from muster.pipeline.engines.engine import Sampling

Decode = Callable[[Sequence[int]], str]
#: A character whose bytes are not all there yet is shown as this.
_INCOMPLETE = "\ufffd"


class StopText:
    """Looks for stop texts in tokens that come one by one, without decoding all of them again.

    A few tokens before the new ones are decoded with them and taken off again, because many
    tokenizers write a token otherwise at the beginning of a text.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._decode = decode
        self._context = self._read = 0  # tokens[context:read] stand before the new ones
        self.text = ""

    def is_found(self, tokens: Sequence[int]) -> bool:
        """``tokens``: all so far. True once; ``text`` then ends before the stop text."""
        before = self._decode(tokens[self._context : self._read])
        after = self._decode(tokens[self._context :])
        if after.endswith(_INCOMPLETE):
            return False
        self._context, self._read = self._read, len(tokens)
        begin = max(0, len(self.text) - self._longest + 1)
        self.text += after[len(before) :]
        places = [at for stop in self._stops if (at := self.text.find(stop, begin)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        return bool(places)


@dataclass(eq=False)
class Answer:
    """``limit``: the most tokens it may get. ``tokens``: those it got, without the prompt's."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    limit: int
    end_tokens: frozenset[int]
    decode: Decode
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    text: str = ""
    num_reported: int = 0
    _stop: StopText | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the tokens; drawn again they are the same."""
        stops = self.sampling.stop
        self.tokens, self.finish_reason = [], None
        self._stop = StopText(stops, self.decode) if stops else None

    @property
    def length(self) -> int:
        """Tokens with the prompt."""
        return len(self.prompt) + len(self.tokens)

    def take(self, token: int) -> bool:
        """Append a token. True when the answer is complete; ``text`` is then set."""
        self.tokens.append(token)
        if token in self.end_tokens:
            self.finish_reason = "stop"
            self.text = self.decode(self.tokens)
        elif self._stop is not None and self._stop.is_found(self.tokens):
            self.finish_reason = "stop"
            self.text = self._stop.text
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
            self.text = self.decode(self.tokens)
        return self.finish_reason is not None


def window(lengths: Sequence[int], count: int) -> list[int]:
    """The places of the ``count`` requests to take, where the first waits longest.

    They are neighbours in the order of their lengths, so that little padding is needed, and the
    oldest is always among them, so that none waits forever. Of the windows that hold the oldest,
    the one with the smallest spread is taken.
    """
    if count >= len(lengths):
        return list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    at = order.index(0)
    begins = range(max(0, at - count + 1), min(at, len(order) - count) + 1)

    def spread(begin: int) -> int:
        return lengths[order[begin + count - 1]] - lengths[order[begin]]

    best = min(begins, key=spread)
    return sorted(order[best : best + count])
