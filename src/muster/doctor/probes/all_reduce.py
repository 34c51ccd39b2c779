"""A real all-reduce over processes, with every value checked, for small and large messages.

    all_reduce BACKEND KIND 0,1,2,3 SECONDS_PER_SIZE

One process per device, as a training has. They meet through a file, so no port and no name is
needed for that; what the back-end itself needs (interfaces, peer access, shared memory) is what is
being tested.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from muster.doctor.probes.report import Tell, begin, progress

_SIZES = (4096, 1 << 20, 64 << 20)
_CPU_SIZES = (4096, 1 << 20, 16 << 20)
_JOIN_S, _POLL_S = 60, 0.05
#: Sums of these stay whole numbers that fp32 holds exactly, for up to 64 ranks and more.
_PERIOD = 1021
_NUM_ROUNDS = 5


def all_reduce(words: list[str], tell: Tell) -> None:
    progress("importing torch")
    importlib.import_module("torch.distributed")
    progress("starting the ranks")
    # Forked ranks share one import of torch, which takes seconds on a busy host. No GPU has been
    # touched yet, and no thread runs: both would break in a forked process.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
    with tempfile.TemporaryDirectory(prefix="muster-doctor-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, words))
            for rank in range(len(words[2].split(",")))
        ]
        for rank in ranks:
            rank.start()
        code = _wait(ranks)
        found = Path(folder) / "result.json"
        if code == 0 and found.exists():
            tell(json.loads(found.read_text()))
    if code:
        sys.exit(code)


def _wait(ranks: Sequence[BaseProcess]) -> int:
    """Wait for the ranks; returns 0 when all end well. If one fails, the others are ended."""
    while True:
        codes = [rank.exitcode for rank in ranks]
        bad = [code for code in codes if code not in (None, 0)]
        if bad:
            time.sleep(0.5)  # the others' errors may say more than "connection closed"
            for rank in ranks:
                rank.kill()
                rank.join()
            return abs(bad[0] or 1)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


def _rank(rank: int, folder: str, words: list[str]) -> None:
    begin()
    import torch
    import torch.distributed as dist

    backend, kind, numbers, budget_s = words[0], words[1], words[2].split(","), float(words[3])
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, int(numbers[rank]))
    if kind != "cpu":
        getattr(torch, kind).set_device(device)
    if rank == 0:
        progress(f"joining {len(numbers)} ranks with {backend}")
    meeting = str(Path(folder) / "store")
    store = dist.FileStore(meeting, len(numbers))  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=len(numbers),
        timeout=timedelta(seconds=_JOIN_S),
    )
    exchange = _StoreExchange(store, rank, len(numbers))
    rows = []
    for num_bytes in _CPU_SIZES if kind == "cpu" else _SIZES:
        if rank == 0:
            progress(f"all-reduce of {num_bytes} bytes")
        rows.append(_measure(num_bytes, device, exchange, budget_s))
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps({"sizes": rows}))
    dist.destroy_process_group()


class _StoreExchange:
    """Exchanges numbers through the store, and not through the back-end that is being tested."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self._round = 0

    def worst(self, number: int) -> int:
        """The largest number of any rank; every rank must ask, in the same order."""
        self._round += 1
        self._store.set(f"muster/{self._round}/{self.rank}", str(number))
        names = [f"muster/{self._round}/{rank}" for rank in range(self.num_ranks)]
        return max(int(self._store.get(name)) for name in names)

    def worst_s(self, seconds: float) -> float:
        return self.worst(int(seconds * 1e9)) / 1e9


def _measure(
    num_bytes: int, device: Any, exchange: _StoreExchange, budget_s: float
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    num_values = num_bytes // 4
    pattern = (torch.arange(num_values, device=device) % _PERIOD).float()
    values = pattern * (exchange.rank + 1)
    dist.all_reduce(values)
    # The worst rank counts: a bad link spoils only what goes over it.
    wrong_values = exchange.worst(count_wrong(values, exchange.num_ranks))
    return {
        "num_bytes": num_bytes,
        "seconds": _time(values, device, exchange, budget_s),
        "num_values": num_values,
        "wrong_values": wrong_values,
    }


def count_wrong(values: Any, num_ranks: int) -> int:
    """How many values are not the sum over ranks of ``(rank + 1) * (index % 1021)``.

    Checked on the host, so that a device that delivers nothing cannot also judge it.
    """
    import torch

    found = values.cpu()
    expected = (torch.arange(len(found)) % _PERIOD).float() * (num_ranks * (num_ranks + 1) // 2)
    return int((found != expected).sum())


def _time(values: Any, device: Any, exchange: _StoreExchange, budget_s: float) -> float:
    """Seconds per all-reduce: the median of some rounds, of the slowest rank."""
    import torch
    import torch.distributed as dist

    def round_s(num_calls: int) -> float:
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(num_calls):
            dist.all_reduce(values)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - began_s) / num_calls

    values.zero_()  # repeated sums of anything else would overflow
    once_s = max(exchange.worst_s(round_s(3)), 1e-7)
    # From the slowest rank's figure, so that all ranks call equally often.
    num_calls = max(1, min(200, int(budget_s / _NUM_ROUNDS / once_s)))
    rounds = [round_s(num_calls) for _ in range(_NUM_ROUNDS)]
    return exchange.worst_s(median(rounds))
