"""The engine ``openai`` against a real server that batches, refuses, breaks, drops and hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.base.errors import SetupError, UsageError
from muster.pipeline.engines.engine import (
    Completion,
    EngineError,
    EngineSpec,
    Request,
    RequestError,
    Sampling,
)
from muster.pipeline.engines.remote import OpenAiEngine
from muster.pipeline.stages import METER

SERVER = Path(__file__).parents[2] / "benchmarks" / "programs" / "pretend_llm.py"
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers with the flags given and returns their addresses."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str) -> str:
            quick = ["--token-ms", "1", "--shortest", "2", "--longest", "8"]
            command = [sys.executable, str(SERVER), *quick, *flags]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            return str(json.loads(process.stdout.readline())["base_url"])

        yield start


def run(
    base_url: str, requests: Sequence[Request], **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Completions, or the errors in their places, and the engine's numbers."""

    async def all_of_them() -> tuple[list[Any], dict[str, Any]]:
        engine = OpenAiEngine(EngineSpec(engine="openai", base_url=base_url, **settings))
        await engine.start("cpu")
        try:
            made = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
            return list(made), dict(engine.stats())
        finally:
            await engine.stop()

    return asyncio.run(all_of_them())


def numbered(count: int, **sampling: Any) -> list[Request]:
    return [
        Request(
            messages=({"role": "user", "content": f"question {number}"},),
            sampling=Sampling(**sampling),
            seed=number + 2**40,
        )
        for number in range(count)
    ]


def stats_of(base_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/stats") as response:
        return dict(json.load(response))


def are_right(made: Sequence[Any]) -> bool:
    """Each request has its own answer, with its own seed."""
    return [one.text for one in made] == [
        f"answer to question {number} with seed {number}" for number in range(len(made))
    ]


def test_each_request_gets_its_answer(serve: Serve) -> None:
    before = METER.read().get("tokens", 0)
    base_url = serve("--slots", "8")
    made, stats = run(base_url, numbered(100))
    assert are_right(made)
    served = stats_of(base_url)
    assert served["answered"] == served["seeds"] == 100
    assert {one.finish_reason for one in made} == {"stop"}
    total = sum(one.completion_tokens for one in made)
    assert total == served["tokens"] == stats["tokens"] == METER.read()["tokens"] - before
    assert {one.prompt_tokens for one in made} == {2}


def test_a_plain_prompt_goes_to_completions_and_length_is_told(serve: Serve) -> None:
    requests = [Request(prompt=f"plain {n}", sampling=Sampling(max_tokens=3)) for n in range(12)]
    made, _ = run(serve(), requests)
    assert [one.text for one in made] == [f"answer to plain {n} with seed 0" for n in range(12)]
    reasons = {(one.finish_reason, one.completion_tokens) for one in made}
    assert ("length", 3) in reasons and all(tokens <= 3 for _, tokens in reasons)


def test_no_request_is_lost_when_everything_goes_wrong(serve: Serve) -> None:
    flags = ["--status-429", "0.05", "--status-500", "0.03", "--broken", "0.03", "--drop", "0.03"]
    base_url = serve(*flags, "--hang", "0.02", "--retry-after", "0.1", "--slots", "16")
    made, stats = run(base_url, numbered(300), timeout_s=0.7)
    assert are_right(made)
    served = stats_of(base_url)
    assert served["seeds"] == 300
    faults = ("status_429", "status_500", "broken", "drop", "hang")
    assert all(served[name] > 0 for name in faults)
    assert stats["retries"] >= sum(served[name] for name in faults)
    assert stats["requests"] == 300


@pytest.mark.parametrize("flags", [("0.8",), ("2", "--retry-after-date")])
def test_nobody_comes_again_before_the_time_the_server_asks_for(
    serve: Serve, flags: tuple[str, ...]
) -> None:
    base_url = serve("--status-429", "0.4", "--retry-after", *flags)
    made, stats = run(base_url, numbered(5))
    assert are_right(made)
    served = stats_of(base_url)
    assert served["status_429"] == stats["retries"] > 0
    assert served["too_early"] == 0


@pytest.mark.parametrize("limit", [{"requests_per_minute": 600}, {"tokens_per_minute": 600 * 10}])
def test_requests_go_out_no_faster_than_the_limit(serve: Serve, limit: dict[str, int]) -> None:
    """Of 20 requests, 10 may go at once and then 10 in a second; each books 10.25 tokens, and with
    what it gives back 0.25. The last goes 1 s after the first may, on however fast a machine; a
    slow one takes a while to send the first.
    """
    base_url = serve("--shortest", "7", "--longest", "7")
    requests = [Request(prompt="a b c", sampling=Sampling(max_tokens=9)) for _ in range(20)]
    began = time.monotonic()
    made, _ = run(base_url, requests, **limit)
    assert all(isinstance(one, Completion) for one in made)
    assert time.monotonic() - began > 0.99
    assert stats_of(base_url)["elapsed_s"] > 0.4


def test_a_wait_beyond_the_limit_is_the_engines_error(serve: Serve) -> None:
    made, _ = run(serve("--status-429", "1", "--retry-after", "5000"), numbered(2), timeout_s=20.0)
    assert [type(one) for one in made] == [EngineError] * 2
    assert "asks to wait 5000 s" in str(made[0])


def test_a_refused_prompt_is_an_error_of_its_own(serve: Serve) -> None:
    requests = numbered(6)
    requests[2] = Request(prompt="REFUSE this", seed=1)
    made, _ = run(serve(), requests)
    assert isinstance(made[2], RequestError)
    assert "status 400: this prompt is too long" in str(made[2])
    assert are_right([*made[:2]]) and all(isinstance(one, Completion) for one in made[3:])


def test_a_prompt_that_breaks_the_server_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.pipeline.engines.remote._LONGEST_S", 0.05)
    requests = [*numbered(100), Request(prompt="POISON", seed=1)]
    base_url = serve("--slots", "1", "--token-ms", "3")
    made, _ = run(base_url, requests, concurrency=4)
    assert isinstance(made[-1], RequestError)
    assert "after 8 failures, while other requests were answered" in str(made[-1])
    assert stats_of(base_url)["poison"] == 8
    assert are_right(made[:-1])


def test_a_server_that_only_fails_is_the_engines_error(serve: Serve) -> None:
    made, _ = run(serve("--status-500", "1"), numbered(3), timeout_s=0.3)
    assert [type(one) for one in made] == [EngineError] * 3
    assert "the last: status 500: something broke" in str(made[0])


def test_a_server_that_hangs_is_the_engines_error(serve: Serve) -> None:
    made, _ = run(serve("--hang", "1"), numbered(3), timeout_s=0.3)
    assert [type(one) for one in made] == [EngineError] * 3
    assert "no answer within 0.3 s" in str(made[0])


def test_a_server_that_is_restarted_answers_in_the_end(serve: Serve) -> None:
    """The first 30 requests fail, as those of a server that is loading its model."""
    base_url = serve("--fail-first", "30")
    made, stats = run(base_url, numbered(20))
    assert are_right(made)
    assert stats["retries"] >= 30


def test_the_key_is_read_from_the_variable_that_is_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_url = serve("--key", "secret-1")
    with pytest.raises(SetupError, match=r"refuses the key.*\n.*OF_THE_TEST"):
        run(base_url, [], api_key_env="OF_THE_TEST")
    monkeypatch.setenv("OF_THE_TEST", "secret-1")
    assert are_right(run(base_url, numbered(2), api_key_env="OF_THE_TEST")[0])


def test_no_server_is_said_with_its_address() -> None:
    with pytest.raises(SetupError, match=r"No server answers at http://127.0.0.1:9/v1"):
        run("http://127.0.0.1:9/v1/", [])


def test_the_address_is_asked_for() -> None:
    with pytest.raises(UsageError, match="needs the address of a server"):
        OpenAiEngine(EngineSpec(engine="openai"))


def test_a_model_that_is_not_named_is_the_servers_only_one(serve: Serve) -> None:
    async def scenario() -> str:
        engine = OpenAiEngine(EngineSpec(engine="openai", base_url=serve()))
        await engine.start("cpu")
        await engine.stop()
        return engine._model

    assert asyncio.run(scenario()) == "pretend"
