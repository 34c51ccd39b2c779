"""A server that speaks as OpenAI's does, with the timing of continuous batching and with faults.

    python benchmarks/programs/pretend_llm.py --slots 32 --token-ms 20 --status-500 0.01

It writes its address to standard output as one line of JSON and serves until it is killed. All
occupied slots get one token every --token-ms; a request waits for a free slot. So its capacity is
slots / token time. The length and the text of an answer depend on prompt and seed only. Faults
strike a request when it arrives, drawn from --seed, and take no slot.

GET /v1/models · POST /v1/completions · POST /v1/chat/completions · GET /stats
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import math
import random
import time
import zlib
from collections import Counter, deque
from email.utils import formatdate
from typing import Any

FAULTS = ("status_429", "status_500", "broken", "drop", "hang")
MODEL = "pretend"


class Slots:
    """Continuous batching: ``take`` returns when the tokens have been written."""

    def __init__(self, count: int, token_s: float) -> None:
        self._count, self._token_s = count, token_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._active: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._news = asyncio.Event()
        self.step = 0
        self.tokens = 0

    async def take(self, tokens: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, done))
        self._news.set()
        await done

    async def run(self) -> None:
        due_s = time.monotonic()
        while True:
            if not self._active and not self._waiting:
                self._news.clear()
                await self._news.wait()
                due_s = time.monotonic()
            self._fill()
            due_s += self._token_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.step += 1
            self.tokens += len(self._active)
            while self._active and self._active[0][0] <= self.step:
                done = heapq.heappop(self._active)[2]
                if not done.done():
                    done.set_result(None)

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._count:
            tokens, done = self._waiting.popleft()
            if not done.done():
                entry = (self.step + tokens, next(self._numbers), done)
                heapq.heappush(self._active, entry)


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.slots = Slots(args.slots, args.token_ms / 1000)
        self.random = random.Random(args.seed)
        self.counts: Counter[str] = Counter()
        self.seeds: set[int] = set()
        self.not_before_s: dict[int, float] = {}  # by seed, what a 429 asked for
        self.first_s = self.last_s = 0.0

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", self.args.port)
        port = server.sockets[0].getsockname()[1]
        print(json.dumps({"base_url": f"http://127.0.0.1:{port}/v1"}), flush=True)
        await asyncio.gather(self.slots.run(), server.serve_forever())

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await request_head(reader)) is not None:
                method, path, headers = head
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if not await self.answer(method, path, headers, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Write the response; False ends the connection."""
        if path == "/stats":
            await respond(writer, 200, self.stats())
            return True
        if self.args.key and headers.get("authorization") != f"Bearer {self.args.key}":
            await respond(writer, 401, error("the key is wrong"))
            return True
        if method == "GET":
            await respond(writer, 200, {"object": "list", "data": [{"id": MODEL}]})
            return True
        self.counts["arrived"] += 1
        self.first_s = self.first_s or time.monotonic()
        asked = json.loads(body)
        self.counts["too_early"] += time.time() < self.not_before_s.pop(asked["seed"], 0.0)
        fault = self.fault()
        if fault is None:
            await self.complete(path, asked, writer)
            return True
        self.counts[fault] += 1
        return await self.strike(fault, asked["seed"], writer)

    def fault(self) -> str | None:
        if self.counts["arrived"] <= self.args.fail_first:
            return "status_500"
        drawn = self.random.random()
        for name in FAULTS:
            drawn -= getattr(self.args, name)
            if drawn < 0:
                return name
        return None

    async def strike(self, fault: str, seed: int, writer: asyncio.StreamWriter) -> bool:
        if fault == "drop":
            return False
        if fault == "hang":
            await asyncio.sleep(self.args.hang_s)
            return False
        if fault == "broken":
            await respond(writer, 200, b'{"choices": [{"mess')
        elif fault == "status_500":
            await respond(writer, 500, error("something broke"))
        else:
            until_s = time.time() + self.args.retry_after
            text = f"{self.args.retry_after:g}"
            if self.args.retry_after_date:
                text = formatdate(until_s, usegmt=True)
                until_s = math.floor(until_s)
            self.not_before_s[seed] = until_s
            await respond(writer, 429, error("too many requests"), {"Retry-After": text})
        return True

    async def complete(self, path: str, asked: dict[str, Any], writer: Any) -> None:
        is_chat = path.endswith("/chat/completions")
        prompt = asked["messages"][-1]["content"] if is_chat else asked["prompt"]
        if "REFUSE" in prompt:
            self.counts["refused"] += 1
            await respond(writer, 400, error("this prompt is too long"))
            return
        if "POISON" in prompt:
            self.counts["poison"] += 1
            await respond(writer, 500, error("this prompt breaks the server"))
            return
        wanted = length_of(prompt, asked.get("seed", 0), self.args.shortest, self.args.longest)
        tokens = min(wanted, asked["max_tokens"])
        await self.slots.take(tokens)
        self.counts["answered"] += 1
        self.counts["tokens"] += tokens
        self.last_s = time.monotonic()
        self.seeds.add(asked["seed"])
        text = f"answer to {prompt} with seed {asked['seed']}"
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if tokens == wanted else "length",
        }
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
        await respond(writer, 200, {"model": MODEL, "choices": [choice], "usage": usage})

    def stats(self) -> dict[str, Any]:
        return {
            **self.counts,
            "seeds": len(self.seeds),
            "steps": self.slots.step,
            "slot_tokens": self.slots.tokens,
            "elapsed_s": self.last_s - self.first_s,
        }


def length_of(prompt: str, seed: int, shortest: int, longest: int) -> int:
    """The number of tokens of an answer."""
    return shortest + zlib.crc32(f"{prompt}|{seed}".encode()) % (longest - shortest + 1)


async def request_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    if not head:
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    pairs = (line.partition(":") for line in lines[1:] if line)
    return method, path, {name.lower(): value.strip() for name, _, value in pairs}


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


async def respond(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await writer.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--token-ms", type=float, default=20.0)
    parser.add_argument("--shortest", type=int, default=20, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=60)
    parser.add_argument("--key", default="")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    for fault in FAULTS:
        name = f"--{fault.replace('_', '-')}"
        parser.add_argument(name, type=float, default=0.0, help="share of requests")
    parser.add_argument("--fail-first", type=int, default=0, help="so many get status 500")
    parser.add_argument("--retry-after", type=float, default=0.5)
    parser.add_argument("--retry-after-date", action="store_true")
    parser.add_argument("--hang-s", type=float, default=60.0)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(args).serve())


if __name__ == "__main__":
    main()
