"""How much of a server's token capacity the engine ``openai`` gets out of it while things go wrong.

    python benchmarks/llm_server.py            # about 12 minutes
    python benchmarks/llm_server.py --quick    # one short round

The server (programs/pretend_llm.py, a process of its own) gives one token per step to each of its
slots, as continuous batching does, so its capacity is slots / step. Contenders: the engine without
faults; the engine with injected 429 (Retry-After), 500, broken JSON, dropped connections and
hangs; and a plain loop with as many requests at once that waits for all of a group before it sends
the next, with a quarter of the requests. Capacity and tokens are the server's own count, from the
first request to the last answer, the emptying at the end included; "while requests are left"
leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, machine, summary, table, write_json
from muster.pipeline.engines.engine import Engine, EngineSpec, Request, Sampling, shared

SERVER = Path(__file__).parent / "programs" / "pretend_llm.py"
FAULTS = {"--status-429": 0.02, "--status-500": 0.01, "--broken": 0.003, "--drop": 0.005}
HANG = {"--hang": 0.003}
CLEAN, FAULTY, GROUPS = "muster, no faults", "muster, faults", "groups, no faults"


@dataclass(frozen=True)
class Found:
    """``share``: of the capacity. ``steady``: the same up to the last request's going out."""

    rate: float
    share: float
    steady: float
    lost: int
    retries: int
    faults: int


@contextmanager
def server(args: argparse.Namespace, has_faults: bool) -> Iterator[str]:
    flags = ["--slots", str(args.slots), "--token-ms", str(args.token_ms), "--retry-after", "1"]
    for flag, share in ({**FAULTS, **HANG} if has_faults else {}).items():
        flags += [flag, str(share)]
    command = [sys.executable, str(SERVER), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.kill()


def stats_of(base_url: str) -> dict[str, Any]:
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/stats") as response:
        return dict(json.load(response))


def request(number: int) -> Request:
    prompt: Any = {"role": "user", "content": f"question {number}"}
    return Request(messages=(prompt,), sampling=Sampling(max_tokens=500), seed=number)


async def ask_all(engine: Engine, count: int, base_url: str) -> tuple[list[Any], dict[str, Any]]:
    """All answers, as the worker of a map asks for them, and the server's numbers at the time
    when the last request went out.
    """
    room = asyncio.Semaphore(engine.concurrency)

    async def one(number: int) -> Any:
        async with room:
            if number == count - 1:
                at_last.update(await asyncio.to_thread(stats_of, base_url), at=time.monotonic())
            return await engine.generate(request(number))

    at_last: dict[str, Any] = {}
    done = await asyncio.gather(*map(one, range(count)), return_exceptions=True)
    return done, at_last


async def ask_in_groups(engine: Engine, count: int, size: int) -> list[Any]:
    done: list[Any] = []
    for begin in range(0, count, size):
        numbers = range(begin, min(begin + size, count))
        done += await asyncio.gather(*(engine.generate(request(number)) for number in numbers))
    return done


async def measure(name: str, args: argparse.Namespace, base_url: str) -> Found:
    spec = EngineSpec(
        engine="openai", base_url=base_url, concurrency=args.concurrency, timeout_s=args.timeout
    )
    lent = await shared(spec, "cpu")
    began = time.monotonic()
    at_last: dict[str, Any] = {}
    if name == GROUPS:
        done = await ask_in_groups(lent.engine, args.requests // 4, args.concurrency)
    else:
        done, at_last = await ask_all(lent.engine, args.requests, base_url)
    served = stats_of(base_url)
    retries = lent.engine.stats().get("retries", 0)
    await lent.close()
    right = {
        f"answer to question {number} with seed {number}" == getattr(one, "text", "")
        for number, one in enumerate(done)
    }
    lost = sum(isinstance(one, BaseException) for one in done)
    if right != {True} and not lost:
        raise SystemExit("an answer went to another request")
    capacity = args.slots / (args.token_ms / 1000)
    rate = served["tokens"] / served["elapsed_s"]
    steady = 0.0
    if at_last:
        steady = at_last["slot_tokens"] / (at_last["at"] - began) / capacity
    faults = sum(served.get(kind, 0) for kind in ("status_429", "status_500", "broken", "drop"))
    return Found(rate, rate / capacity, steady, lost, retries, faults + served.get("hang", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=9000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds, then repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[CLEAN, FAULTY, GROUPS])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.repeats = 300, 1
    found: dict[str, list[Found]] = {name: [] for name in args.only or [CLEAN, FAULTY, GROUPS]}
    for number in range(args.repeats):
        for name, values in found.items():
            with server(args, name == FAULTY) as base_url:
                values.append(asyncio.run(measure(name, args, base_url)))
            print(f"  round {number + 1}: {name}: {values[-1]}", file=sys.stderr)
    report(args, found)


def report(args: argparse.Namespace, found: dict[str, list[Found]]) -> None:
    about = machine("aiohttp")
    capacity = args.slots / (args.token_ms / 1000)
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    print(f"{args.requests} requests; capacity {capacity:,.0f} tokens/s, {args.slots} slots")
    rows, record = [], {}
    for name, values in found.items():
        record[name] = {
            "tokens_per_s": summary([one.rate for one in values]),
            "share": summary([one.share for one in values]),
            "steady": summary([one.steady for one in values]),
            "lost": sum(one.lost for one in values),
            "retries": sum(one.retries for one in values),
            "faults": sum(one.faults for one in values),
        }
        share, steady = record[name]["share"], record[name]["steady"]
        rows.append(
            [
                name,
                f"{record[name]['tokens_per_s']['median']:,.0f}",
                f"{share['median']:.3f}",
                f"[{share['low']:.3f}–{share['high']:.3f}]",
                f"{steady['median']:.3f}" if steady["median"] else "",
                *(str(record[name][column]) for column in ("faults", "retries", "lost")),
            ]
        )
    headers = ["", "tokens/s", "of capacity", "range", "while requests are left"]
    table([*headers, "faults", "retries", "lost"], rows)
    if FAULTY in record:
        reached, lost = record[FAULTY]["share"]["median"], record[FAULTY]["lost"]
        goal("with faults, of the capacity", "≥ 0.98", f"{reached:.3f}", reached >= 0.98)
        goal("requests lost", "0", f"{lost}", lost == 0, at_any_size=True)
    write_json(args.json, {"machine": about, "capacity_tokens_per_s": capacity, **record})


if __name__ == "__main__":
    main()
