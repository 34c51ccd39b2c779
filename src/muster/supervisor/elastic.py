"""torch.distributed's elastic agent, with our way of starting, watching and ending ranks.

``SimpleElasticAgent`` keeps what is hard about several nodes: rendezvous, ranks, restarts, the
barrier at the end. Its ready-made subclass sees only the first failure, and not when the other
ranks ended or why; whose fault it was could not be told from that.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from muster.base.metric_log import METRICS_FILE, mark_start
from muster.base.processes import KILL, send_signal, signal_group
from muster.base.settings import child_environment
from muster.gang.blame import MAX_LINES, RankEnd, consequence, mark, read_rank_error
from muster.gang.spec import Entry, GangSpec
from muster.gang.topology import SLOT
from muster.run.folder import RunFolder
from muster.supervisor.forkserver import Child, ForkServer
from muster.supervisor.rendezvous import interface_towards
from muster.supervisor.watchdog import Watchdog, dump_stacks

#: Seconds that the others have to notice that one has failed, before they are told to end.
_NOTICE_S = 0.5
#: Seconds that a rank has to write down why it has left the others, where they have failed by that.
_CAUSE_S = 5.0
#: Seconds that ranks may take which are told to end because another has failed.
_AFTER_FAILURE_S = 5.0
_AFTER_STALL_S = 1.0
_POLL_S = 0.01
#: Where gloo and NCCL listen; a node may have interfaces that the others cannot reach.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

#: NCCL's record of what each rank has called, by the names that torch has for it from 2.9 on, and
#: before. Only one of the two is set: torch warns of the old one.
_RECORD_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORD_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_IS_OLD = torch.__version__ < (2, 9)  # type: ignore[operator]

Tell = Callable[..., None]


#: A rank's process: a child of the supervisor, or of the fork server.
RankProcess = subprocess.Popen[bytes] | Child


@dataclasses.dataclass
class _Rank:
    rank: int
    process: RankProcess
    code: int | None = None
    ended_s: float = 0.0
    was_stopped: bool = False


class Supervisor(SimpleElasticAgent):
    """``tell`` sends an event to the launcher; ``forks`` is None where ranks are not forked."""

    def __init__(
        self, worker_spec: WorkerSpec, spec: GangSpec, forks: ForkServer | None, tell: Tell
    ) -> None:
        super().__init__(worker_spec)
        self._spec = spec
        self._forks = forks
        self._tell = tell
        self._ranks: list[_Rank] = []
        self._watchdog: Watchdog | None = None
        self._asked_s: float | None = None  # when the ranks were asked to end, while they do
        self._num_starts = self._world_size = 0

    def forward(self, number: int) -> None:
        """Pass a signal on to the ranks."""
        for rank in self._running():
            send_signal(rank.process.pid, number)

    # ------------------------------------------------------------ what the elastic agent asks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Not what is left of max_restarts: a node that is called to the next round before its own
        # ranks have failed spends none, and all nodes must come to the same number.
        restart = self._num_starts
        self._num_starts += 1
        numbers = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        world_size = self._world_size = worker_group.workers[0].world_size
        self._ranks = []
        for local_rank, rank in sorted(numbers.items()):
            self._spec.folder.rank_error(rank).unlink(missing_ok=True)
            environment = self._environment(worker_group, local_rank, rank, restart)
            if rank == 0:
                self._mark_numbers(environment.get(METRICS_FILE))
            self._ranks.append(_Rank(rank, self._start(rank, environment)))
        pids = {rank.rank: rank.process.pid for rank in self._ranks}
        self._tell("ranks", pids=pids, restart=restart, world_size=world_size)
        if worker_group.group_rank == 0:
            self._spec.folder.rank_phases.unlink(missing_ok=True)
        if self._spec.stall_timeout_s > 0:
            self._watchdog = Watchdog(
                str(worker_group.master_addr),
                int(worker_group.master_port or 0),
                pids=pids,
                world_size=world_size,
                restart_count=restart,
                judges=worker_group.group_rank == 0,
                limit_s=self._spec.stall_timeout_s,
                phases=self._spec.folder.rank_phases,
                remark=lambda text: self._tell("remark", text=text),
            )
            self._watchdog.start()
        return {local: self._ranks[i].process.pid for i, local in enumerate(sorted(numbers))}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        verdict = self._watchdog.verdict if self._watchdog is not None else None
        if any(rank.code for rank in self._ranks):
            # The first that was seen to fail need not be the first that failed: the others get a
            # moment to end by themselves and say why, before they are told to.
            self._await(_NOTICE_S)
            if self._spec.num_nodes == 1:  # else the cause may be on another node
                self._await(_CAUSE_S, until=self._knows_cause)
            self._end(signal.SIGTERM, min(_AFTER_FAILURE_S, self._spec.grace_s))
        elif verdict is not None and self._running():
            self._tell("stall", text=verdict.text, culprits=list(verdict.culprits))
            pids = {rank.rank: rank.process.pid for rank in self._running()}
            dump_stacks(pids, self._spec.folder)
            self._end(signal.SIGTERM, min(_AFTER_STALL_S, self._spec.grace_s))
        elif self._running():
            return RunResult(state=WorkerState.HEALTHY)
        else:
            self._close_watchdog()
            results = {rank.rank: None for rank in self._ranks}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=results)
        is_stall = verdict is not None and all(r.was_stopped for r in self._ranks if r.code)
        if self._spec.restart_on == "crash" and not (is_stall or self._may_help()):
            self._remaining_restarts = 0
        self._tell_failure()
        return RunResult(state=WorkerState.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._end(signal.SIGTERM, min(_AFTER_FAILURE_S, self._spec.grace_s))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        was_running = bool(self._running())
        self._end(signal.SIGTERM, self._spec.grace_s)
        if was_running:
            self._tell_failure()

    # ------------------------------------------------------------------------------- ours

    def _start(self, rank: int, environment: dict[str, str]) -> RankProcess:
        argv, log = self._argv(), self._spec.folder.rank_log(rank)
        if self._forks is not None:
            return self._forks.fork(argv, environment, log)
        # Without -P a file of the user's named like a module of Python's would be taken for it.
        command = [sys.executable, "-u", "-P", "-m", "muster.gang.rank", *argv]
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _mark_numbers(self, path: str | None) -> None:
        """Say in the file of a program's numbers that it starts again. A training cuts its own."""
        if isinstance(self._spec.program, Entry) or not path:
            return
        if self._spec.folder.rank_log(0).exists():  # else other programs of a task have written it
            try:
                mark_start(Path(path))
            except OSError as error:
                said = f"some steps may be recorded twice in {path}: {error.strerror}"
                self._tell("remark", text=said)

    def _argv(self) -> list[str]:
        program, parent = self._spec.program, str(os.getpid())
        folder = str(self._spec.folder.path)
        if isinstance(program, Entry):
            import json

            return [folder, parent, "entry", program.target, json.dumps(program.params)]
        kind = "module" if program.is_module else "script" if program.is_python else "command"
        return [folder, parent, kind, program.path, *program.args]

    def _environment(
        self, group: WorkerGroup, local_rank: int, rank: int, restart: int
    ) -> dict[str, str]:
        """A rank's environment: what torchrun sets, with our devices and threads."""
        spec, workers = group.spec, group.workers
        threads = str(self._spec.threads_per_rank)
        values = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(workers[local_rank].world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(workers[local_rank].role_rank),
            "ROLE_WORLD_SIZE": str(workers[local_rank].role_world_size),
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "NUMEXPR_NUM_THREADS": threads,
        }
        if self._spec.visible_devices is not None:
            values["CUDA_VISIBLE_DEVICES"] = self._spec.visible_devices
            values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if self._spec.slot is not None:
            values[SLOT] = self._spec.slot
        said = child_environment({})
        if not isinstance(self._spec.program, Entry) and rank == 0:
            # Of a program that is itself a task of a sweep the numbers are the task's.
            values[METRICS_FILE] = said.get(METRICS_FILE) or str(self._spec.folder.metrics)
        values |= self._defaults(said)
        whole = child_environment(values)
        if rank:  # of a task of a sweep all would get it, and write every step once each
            whole.pop(METRICS_FILE, None)
        return whole

    def _defaults(self, said: Mapping[str, str]) -> dict[str, str]:
        """Our defaults for variables that the user's environment has ``said`` nothing of."""
        spec, values = self._spec, dict[str, str]()
        if spec.slot != "cpu":
            values |= flight_recorder(said, spec.folder)
        missing = [name for name in _INTERFACES if name not in said]
        if spec.num_nodes > 1 and missing:
            found = interface_towards(spec.master_addr, spec.master_port)
            values |= {} if found is None else dict.fromkeys(missing, found)
        return values

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _may_help(self) -> bool:
        """Whether a restart may help: a rank was killed, here or on another node.

        An exception that a rank raised here would only be raised again.
        """
        failed = [rank for rank in self._ranks if rank.code and not rank.was_stopped]
        if any((rank.code or 0) < 0 for rank in failed):
            return True
        return self._spec.num_nodes > 1 and all(map(self._is_consequence, failed))

    def _error_of(self, rank: _Rank) -> dict[str, Any] | None:
        """What it has raised, as much of it as a report has room for."""
        error = read_rank_error(self._spec.folder.rank_error(rank.rank))
        if error is None:
            return None
        return dataclasses.asdict(dataclasses.replace(error, frames=error.frames[-MAX_LINES:]))

    def _was_leaving(self, rank: _Rank) -> bool:
        """Whether an exception had ended its program before it was asked to end: to leave takes
        some time, and the others may have noticed and failed meanwhile.
        """
        error = read_rank_error(self._spec.folder.rank_error(rank.rank))
        return error is not None and error.time_s < (self._asked_s or 0.0)

    def _is_consequence(self, rank: _Rank) -> bool:
        error = read_rank_error(self._spec.folder.rank_error(rank.rank))
        end = RankEnd(rank=rank.rank, code=rank.code or 0, time_s=0.0, error=error)
        return consequence(end) is not None

    def _look(self) -> None:
        if self._forks is not None:
            self._forks.poll()
        for rank in self._running():
            rank.code = rank.process.poll()
            if rank.code is not None:
                rank.ended_s = time.time()
                rank.was_stopped = self._asked_s is not None
                if rank.was_stopped and self._was_leaving(rank):
                    rank.was_stopped, rank.code = False, 1
                if self._watchdog is not None:
                    self._watchdog.forget(rank.rank)

    def _knows_cause(self) -> bool:
        """Whether a rank has failed, or has written down an error, that follows from no other's."""
        paths = self._spec.folder
        over = [
            one for one in self._ranks
            if one.code or read_rank_error(paths.rank_error(one.rank)) is not None
        ]  # fmt: skip
        return not all(map(self._is_consequence, over))

    def _await(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        self._look()
        while self._running() and time.monotonic() < deadline and not until():
            time.sleep(_POLL_S)
            self._look()

    def _end(self, number: int, grace_s: float) -> None:
        """Ask the ranks to end, then kill them with everything in their process groups."""
        self._close_watchdog()
        self._look()
        self._asked_s = time.time()
        self.forward(number)
        self.forward(getattr(signal, "SIGCONT", number))  # a stopped process hears nothing
        self._await(grace_s)
        # Ended ranks too: loader processes of theirs may have been left in the group.
        for rank in self._ranks:
            signal_group(rank.process.pid, KILL)
        self._await(_AFTER_FAILURE_S)
        self._asked_s = None

    def _close_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _tell_failure(self) -> None:
        # With what each has raised: the records are gone once the ranks start again, and the
        # launcher may hear of it later, while whoever reads its output is slow.
        self._mark_consequences()
        ends = [
            {
                "rank": rank.rank,
                "code": rank.code,
                "time_s": rank.ended_s,
                "was_stopped": rank.was_stopped,
                "log_size": self._spec.folder.rank_log(rank.rank).stat().st_size,
                "error": self._error_of(rank),
            }
            for rank in self._ranks
        ]
        self._tell("failed", ends=ends, restarts_left=self._remaining_restarts)

    def _mark_consequences(self) -> None:
        """Say in the log of a rank that failed because of another one which that was: whoever reads
        it finds a broken connection there, and no cause."""
        folder = self._spec.folder
        ends = [
            RankEnd(
                rank=one.rank, code=-KILL if one.code is None else one.code, time_s=one.ended_s,
                was_stopped=one.was_stopped, error=read_rank_error(folder.rank_error(one.rank)),
            )
            for one in self._ranks
        ]  # fmt: skip
        for end in ends:
            if line := mark(end, ends, self._world_size):
                with suppress(OSError), folder.rank_log(end.rank).open("a") as log:
                    log.write(f"{line}\n")


def flight_recorder(said: Mapping[str, str], folder: RunFolder) -> dict[str, str]:
    """Variables that make NCCL write down, beside the ranks' logs, what it gave up waiting for.

    What the environment has ``said`` under either name stays as it is.
    """
    wanted = (
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",) * 2, "1"),
        (_RECORD_SIZE, "2000"),
        (_RECORD_FILE, str(folder.logs / "nccl-rank-")),
    )
    return {
        names[_IS_OLD]: value for names, value in wanted if not any(name in said for name in names)
    }
