"""How fast requests may be sent, and when a failed one is sent again. The clock is the caller's."""

from __future__ import annotations

import asyncio
import email.utils
import importlib.util
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.base.errors import MissingPackageError, SetupError, UsageError
from muster.base.settings import secret
from muster.pipeline.engines.engine import (
    Completion,
    EngineError,
    EngineSpec,
    Request,
    RequestError,
)
from muster.pipeline.stages import METER

_FIRST_S = 0.5
_LONGEST_S = 30.0
#: A burst may hold what the rate allows in so many seconds.
_BURST_S = 1.0


@dataclass
class Bucket:
    """At most ``per_minute`` units in any minute, and a burst of one second's worth (or of one
    unit) more. 0 is no limit.

    More units than a burst have to be waited for as a whole.
    """

    per_minute: float
    _ready_s: float = 0.0

    def take(self, units: float, now_s: float) -> float:
        """Book ``units``; returns the seconds to wait before they may be used."""
        if not self.per_minute:
            return 0.0
        unit_s = 60.0 / self.per_minute
        self._ready_s = max(self._ready_s, now_s - max(_BURST_S, unit_s))
        wait_s = max(0.0, self._ready_s + units * unit_s - now_s)
        self._ready_s += units * unit_s
        return wait_s

    def correct(self, units: float) -> None:
        """Book ``units`` more, or fewer where negative: what was used beyond the estimate."""
        if self.per_minute:
            self._ready_s += units * 60.0 / self.per_minute


def back_off_s(failures: int, chance: float, asked_s: float | None) -> float:
    """Seconds to wait after so many failures in a row, 1 or more. ``chance``: random, from 0 to 1.

    The wait doubles from half a second up to 30 s, and between half and all of it is taken at
    random, so that requests that failed together are not repeated together. It is never shorter
    than the server has asked for.
    """
    longest_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 10))
    own_s = longest_s * (0.5 + 0.5 * chance)
    if asked_s is None:
        return own_s
    return asked_s + min(1.0, 0.1 * asked_s) * chance


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3).

    ``now_s``: seconds since 1970. None where there is none, or nothing that can be read.
    """
    if header is None:
        return None
    text = header.strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds == seconds else None


#: Servers differ in the width of a seed; all take 31 bits.
_SEED_MASK = (1 << 31) - 1
_SHOWN = 300


@dataclass(frozen=True)
class Again:
    """The request may succeed when it is repeated. ``asked_s``: not sooner than that.

    ``is_overload``: the server has too much to do, which is no fault of the request.
    """

    reason: str
    asked_s: float | None = None
    is_overload: bool = False


def body_of(request: Request, model: str) -> tuple[str, dict[str, Any]]:
    """The path below the base address, and the JSON to send there."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": request.seed & _SEED_MASK,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if request.prompt is not None:
        return "/completions", {**body, "prompt": request.prompt}
    return "/chat/completions", {**body, "messages": list(request.messages)}


def verdict(status: int, data: bytes, asked_s: float | None) -> Completion | Again:
    """What an answer means. Raises RequestError where the prompt is to blame, and EngineError
    where no request can succeed.
    """
    if status == 200:
        return _completion(data)
    reason = f"status {status}: {_message(data)}"
    if status == 429:
        if "insufficient_quota" in reason:
            raise EngineError(f"The server's quota is used up ({reason}).")
        return Again(reason, asked_s, is_overload=True)
    if status == 503:
        return Again(reason, asked_s, is_overload=True)
    if status >= 500 or status in (408, 409, 425):
        return Again(reason, asked_s)
    if status in (401, 403, 404):
        raise EngineError(f"The server refuses all requests ({reason}).")
    raise RequestError(f"The server refused the prompt ({reason}).")


def _completion(data: bytes) -> Completion | Again:
    try:
        return _read(json.loads(data))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return Again(f"the answer cannot be read ({type(error).__name__}: {_shown(data)})")


def _read(answer: Mapping[str, Any]) -> Completion:
    choice = answer["choices"][0]
    reason = choice.get("finish_reason") or "stop"
    if reason == "content_filter":
        raise RequestError("The server's content filter held the answer back.")
    text = choice["text"] if "text" in choice else _of_chat(choice["message"])
    usage = answer.get("usage") or {}
    return Completion(
        text=text,
        finish_reason="length" if reason == "length" else "stop",
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


def _of_chat(message: Mapping[str, Any]) -> str:
    """Some servers take the thinking out of the text; it is put back between its marks."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        raise TypeError("content is not text")
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return f"<think>\n{thinking}\n</think>\n\n{text}" if isinstance(thinking, str) else text


def _message(data: bytes) -> str:
    try:
        answer = json.loads(data)
        error = answer.get("error", answer)
        if isinstance(error, str):
            return error[:_SHOWN]
        code = error.get("code")
        text = str(error.get("message") or error.get("detail") or error)[:_SHOWN]
        return f"{text} [{code}]" if isinstance(code, str) else text
    except (ValueError, AttributeError):
        return _shown(data)


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", "replace").strip() or "no text"


_DEFAULT_CONCURRENCY = 64
#: Requests that wait to be repeated leave their place to others; so many of those, in quarters.
_SPARE_QUARTERS = 1
_MOST_FAILURES = 8
_CONNECT_S = 10.0
_CHARACTERS_PER_TOKEN = 4


class OpenAiEngine:
    """``concurrency`` of the spec is the most requests on their way at once; 0 means 64.

    A request that fails while others succeed is given up after 8 failures (RequestError). When
    requests have failed for ``timeout_s`` and none has succeeded, the engine is (EngineError).
    """

    def __init__(self, spec: EngineSpec) -> None:
        if not spec.base_url:
            raise UsageError(
                "The engine openai needs the address of a server.",
                hint="write --base-url, such as http://127.0.0.1:8000/v1.",
            )
        if importlib.util.find_spec("aiohttp") is None:
            raise MissingPackageError("The engine openai", "aiohttp", "openai")
        self._spec = spec
        self._base = spec.base_url.rstrip("/")
        self._model = spec.model
        places = spec.concurrency or _DEFAULT_CONCURRENCY
        self.concurrency = places + _SPARE_QUARTERS * places // 4
        self._places = asyncio.Semaphore(places)
        self._requests = Bucket(spec.requests_per_minute)
        self._tokens = Bucket(spec.tokens_per_minute)
        self._session: Any = None
        self._in_flight = 0
        self._failing_since_s: float | None = None  # the first failure after the last answer
        self._random = random.Random()
        self._counts = dict.fromkeys(("requests", "tokens", "prompt_tokens", "retries"), 0)

    async def start(self, device: str) -> None:
        """Reach the server and, where no model is named, take its only one. ``device`` is not
        used: the server has its own.
        """
        import aiohttp

        key = secret(self._spec.api_key_env)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._spec.timeout_s, sock_connect=_CONNECT_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            self._check(await self._look())
        except BaseException:
            await self.stop()
            raise

    async def generate(self, request: Request) -> Completion:
        """A completion; RequestError where the server refuses the prompt."""
        assert self._session is not None, "start comes first"
        self._in_flight += 1
        try:
            return await self._until_answered(request)
        finally:
            self._in_flight -= 1

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start; ``retries`` are requests that were sent once more."""
        return {**self._counts, "in_flight": self._in_flight}

    async def stop(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _until_answered(self, request: Request) -> Completion:
        failures = own_failures = 0
        answered_before = self._counts["requests"]
        while True:
            outcome = await self._once(request)
            if isinstance(outcome, Completion):
                return self._counted(outcome)
            failures += 1
            own_failures += not outcome.is_overload
            others_are_answered = self._counts["requests"] > answered_before
            self._judge(outcome, own_failures, others_are_answered)
            wait_s = back_off_s(failures, self._random.random(), outcome.asked_s)
            self._counts["retries"] += 1
            await asyncio.sleep(wait_s)

    def _judge(self, outcome: Again, own_failures: int, others_are_answered: bool) -> None:
        """Raises when it is no use to repeat the request."""
        if own_failures >= _MOST_FAILURES and others_are_answered:
            raise RequestError(
                f"Given up after {own_failures} failures, while other requests were answered; "
                f"the last: {outcome.reason}."
            )
        timeout_s, now_s = self._spec.timeout_s, time.monotonic()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s > timeout_s:
            raise EngineError(
                f"No answer from {self._base} for {timeout_s:g} s; the last: {outcome.reason}."
            )
        if outcome.asked_s is not None and outcome.asked_s > timeout_s:
            raise EngineError(
                f"{self._base} asks to wait {outcome.asked_s:.0f} s, longer than the limit of "
                f"{timeout_s:g} s ({outcome.reason})."
            )

    async def _once(self, request: Request) -> Completion | Again:
        import aiohttp

        async with self._places:
            booked = await self._wait_for_rates(request)
            path, body = body_of(request, self._model)
            try:
                async with self._session.post(self._base + path, json=body) as response:
                    data = await response.read()
            except TimeoutError:
                return Again(f"no answer within {self._spec.timeout_s:g} s")
            except (aiohttp.ClientError, ConnectionError) as error:
                reason = str(error) or type(error).__name__
                return Again(f"the connection failed ({reason})")
        asked_s = retry_after_s(response.headers.get("Retry-After"), time.time())
        outcome = verdict(response.status, data, asked_s)
        used = 0
        if isinstance(outcome, Completion):
            used = outcome.prompt_tokens + outcome.completion_tokens
        self._tokens.correct(used - booked)
        return outcome

    async def _wait_for_rates(self, request: Request) -> float:
        """Wait for the turn under the limits per minute; returns the tokens booked."""
        tokens = _guess(request)
        now_s = time.monotonic()
        wait_s = max(self._requests.take(1, now_s), self._tokens.take(tokens, now_s))
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        return tokens

    def _counted(self, completion: Completion) -> Completion:
        self._failing_since_s = None
        self._counts["requests"] += 1
        self._counts["tokens"] += completion.completion_tokens
        self._counts["prompt_tokens"] += completion.prompt_tokens
        METER.add("tokens", completion.completion_tokens)
        METER.add("prompt_tokens", completion.prompt_tokens)
        return completion

    def _check(self, looked: tuple[int, bytes]) -> None:
        status, data = looked
        if status in (401, 403):
            raise SetupError(
                f"The server {self._base} refuses the key (status {status}).",
                hint=f"set the variable {self._spec.api_key_env} to the server's key.",
            )
        if not self._model:
            self._model = _only_model(self._base, status, data)

    async def _look(self) -> tuple[int, bytes]:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=_CONNECT_S)
        try:
            async with self._session.get(self._base + "/models", timeout=limit) as response:
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise SetupError(
                f"No server answers at {self._base} ({str(error) or type(error).__name__}).",
                hint="start it, or correct --base-url (it usually ends in /v1).",
            ) from error


def _only_model(base: str, status: int, data: bytes) -> str:
    import json

    try:
        names = [str(model["id"]) for model in json.loads(data)["data"]] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if len(names) == 1:
        return names[0]
    listing = ", ".join(names) if names else "it does not list them"
    raise UsageError(
        "No model is named.", hint=f"write --model with one that {base} serves: {listing}."
    )


def _guess(request: Request) -> float:
    """Tokens that a request is going to use at most, about."""
    text = request.prompt or "".join(message["content"] for message in request.messages)
    return len(text) / _CHARACTERS_PER_TOKEN + request.sampling.max_tokens
