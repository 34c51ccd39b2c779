"""Requests and answers of OpenAI-compatible servers as values; what a failed answer means. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.pipeline.engines.model import Completion, EngineError, Request, RequestError

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
        raise TypeError("content is no text")
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
