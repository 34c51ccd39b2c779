"""The watchdog beside the supervisor: reads the heartbeats from the gang's store and has them
judged.

It runs on the first node; on the others it only waits for that verdict, so that every node writes
down the stacks of its own ranks.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from muster.base.codec import write_json
from muster.base.processes import send_signal
from muster.gang.beacon import EVERY_S, family_cpu_s, heartbeat_key
from muster.gang.rank import stack_signal
from muster.gang.stall import Heartbeat, StallDetector, Verdict
from muster.run.folder import RunFolder

_DUMP_S = 5.0
_TELL_PHASES_S = 10.0


class Watchdog:
    """``verdict`` is set once the gang must end; remarks go to ``remark`` from its thread.

    ``pids``: rank → process, of this node. The one that judges counts what each rank is at
    whenever it looks, and writes the seconds to ``phases`` now and then.
    """

    def __init__(
        self,
        addr: str,
        port: int,
        *,
        pids: Mapping[int, int],
        world_size: int,
        restart_count: int,
        judges: bool,
        limit_s: float,
        phases: Path,
        remark: Callable[[str], None],
    ) -> None:
        self._address = (addr, port)
        self._pids = dict(pids)
        self._world_size = world_size
        self._restart_count = restart_count
        self._verdict_key = f"muster/verdict/{restart_count}"
        self._judges = judges
        self._remark = remark
        self._watch = StallDetector(world_size, limit_s)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster-watchdog", daemon=True)
        self._known: set[int] = set()
        self._phases = phases
        self._seconds: dict[int, dict[str, float]] = defaultdict(dict)
        self._looked_s = self._told_s = time.monotonic()
        self.verdict: Verdict | None = None

    def start(self) -> None:
        self._thread.start()

    def forget(self, rank: int) -> None:
        with self._lock:
            self._watch.forget(rank)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        with contextlib.suppress(DistError, RuntimeError, ValueError):  # the store is gone
            store = TCPStore(
                *self._address,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
            )
            while self.verdict is None and not self._stop.wait(EVERY_S):
                self._tell_cpu(store)
                if self._judges:
                    self._look(store)
                elif store.check([self._verdict_key]):
                    text = store.get(self._verdict_key).decode()
                    self.verdict = Verdict(culprits=(), text=text)
        self._tell_phases()

    def _tell_cpu(self, store: TCPStore) -> None:
        """Report the CPU time of our ranks: one whose interpreter is held cannot do so itself."""
        for rank, pid in self._pids.items():
            used_s = family_cpu_s(pid)
            if used_s is not None:
                store.set(self._cpu_key(rank), str(used_s))

    def _cpu_key(self, rank: int) -> str:
        return f"muster/cpu/{self._restart_count}/{rank}"

    def _look(self, store: TCPStore) -> None:
        heartbeats, used = [], {}
        for rank in range(self._world_size):
            key = heartbeat_key(self._restart_count, rank)
            if rank in self._known or store.check([key]):
                self._known.add(rank)
                heartbeats.append(Heartbeat.from_record(json.loads(store.get(key))))
            if rank in self._known and store.check([self._cpu_key(rank)]):
                used[rank] = float(store.get(self._cpu_key(rank)))
        now_s = time.monotonic()
        self._count(heartbeats, now_s)
        with self._lock:
            for heartbeat in heartbeats:
                self._watch.hear(heartbeat, now_s)
            for rank, cpu_s in used.items():
                self._watch.see_cpu(rank, cpu_s, now_s)
            verdict = self._watch.judge(now_s)
        if verdict is None:
            return
        if verdict.is_final:
            # The other nodes first: this node ends its ranks on its own verdict, and the store that
            # carries the word goes with them.
            store.set(self._verdict_key, verdict.text)
            self.verdict = verdict
        else:
            self._remark(verdict.text)

    def _count(self, heartbeats: Iterable[Heartbeat], now_s: float) -> None:
        since_s, self._looked_s = now_s - self._looked_s, now_s
        for heartbeat in heartbeats:
            if not heartbeat.has_ended:
                spent, at = self._seconds[heartbeat.rank], heartbeat.activity
                spent[at] = spent.get(at, 0.0) + since_s
        if now_s - self._told_s >= _TELL_PHASES_S:
            self._told_s = now_s
            self._tell_phases()

    def _tell_phases(self) -> None:
        if self._seconds:
            with contextlib.suppress(OSError):  # shown, and nothing depends on it
                write_json(self._phases, self._seconds)


def dump_stacks(pids: Mapping[int, int], folder: RunFolder) -> None:
    """Write where every rank (rank → process) stands to its ``.stack`` file.

    With py-spy if it is installed, which also reads a process that has stopped; otherwise the rank
    is asked to do it itself.
    """
    program = shutil.which("py-spy")
    asked = []
    for rank, pid in pids.items():
        path = folder.rank_stack(rank)
        if program is not None and _spy(program, pid, folder, rank):
            continue
        number = stack_signal()
        if number is not None and path.exists():  # it listens for the signal
            send_signal(pid, number)
            send_signal(pid, getattr(signal, "SIGCONT", 0))
            asked.append(path)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not all(path.stat().st_size for path in asked):
        time.sleep(0.02)


def _spy(program: str, pid: int, folder: RunFolder, rank: int) -> bool:
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_DUMP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode != 0:  # the system does not allow it
        return False
    folder.rank_stack(rank).write_bytes(done.stdout)
    return True
