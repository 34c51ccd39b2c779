"""The supervisor, between launcher and ranks: ``python -m muster.supervisor.main PID [fork]``.

It is started before the launcher knows what to run, because importing torch takes most of the time
until a rank can work. The spec comes as a line of JSON on standard input; events go out as lines
of JSON on what was standard output. With ``fork`` it splits off the fork server right after the
import, while it has one thread only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from muster.base.reaper import die_with_parent
from muster.base.signals import ENDING, WARNING, handled
from muster.gang.spec import Entry, GangSpec, Script

#: Seconds for the nodes of a gang to come together; torch's own default.
_JOIN_S = 900.0
#: What the supervisor and its fork server need of torch, imported once for both.
_IMPORTS = ("torch", "torch.distributed.elastic.agent.server.api", "muster.supervisor.elastic")


def main(argv: list[str]) -> int:
    launcher_pid = int(argv[0])
    die_with_parent(launcher_pid)
    events = _Events()
    gc.disable()  # what is imported stays: the collector would spend a tenth of the time on it
    for name in _IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    forks = None
    if "fork" in argv[1:]:
        from muster.gang import rank
        from muster.supervisor.forkserver import ForkServer, serve

        # Forked now, between the import and the first thread: later the store's threads run here,
        # and a forked process would have their locks without them.
        ours, theirs = socket.socketpair()
        supervisor_pid = os.getpid()
        if os.fork() == 0:
            ours.close()
            events.close()
            sys.stdin.close()
            os.open(os.devnull, os.O_RDONLY)
            words = serve(theirs, supervisor_pid)
            return 0 if words is None else rank.become_and_leave(words)
        theirs.close()
        forks = ForkServer(ours)
    gc.enable()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the launcher has found nothing to run
    spec = GangSpec.from_line(line)
    _log_to(spec.folder.agent_log(spec.node_rank))
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    return _run(spec, forks, events)


def _run(spec: GangSpec, forks: Any, events: _Events) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

    from muster.supervisor.elastic import Supervisor

    if forks is not None:
        entry = spec.program.target if isinstance(spec.program, Entry) else None
        if why := forks.prepare(entry, spec.num_ranks):
            events.tell("remark", text=f"ranks are started one by one, not forked: {why}")
            forks.close()
            forks = None
    rendezvous = _rendezvous(spec)
    worker_spec = WorkerSpec(
        role="default",
        local_world_size=spec.num_ranks,
        entrypoint="muster.gang.rank",
        rdzv_handler=rendezvous,
        max_restarts=spec.max_restarts,
        monitor_interval=0.05,
    )
    supervisor = Supervisor(worker_spec, spec, forks, events.tell)
    stopping: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not stopping:  # later ones would break into the orderly end
            stopping.append(number)
            raise SignalException(f"signal {number}", sigval=signal.Signals(number))

    taking = contextlib.ExitStack()
    taking.enter_context(handled(ENDING, stop, always=("SIGTERM",)))
    taking.enter_context(
        handled((), lambda number, _: supervisor.forward(number), always=(WARNING,))
    )
    try:
        result = supervisor.run()
    except SignalException:
        events.tell("done", state="stopped")
        return 0
    except RendezvousClosedError:
        events.tell("done", state="failed")
        return 0
    except Exception as error:
        logging.getLogger(__name__).exception("the gang could not be run")
        events.tell("done", state="broken", message=f"{type(error).__name__}: {error}")
        return 0
    finally:
        if forks is not None:
            forks.close()
    failed = result is None or result.is_failed()
    if failed:
        with contextlib.suppress(DistError, RuntimeError):  # its host has gone already
            rendezvous.set_closed()
    elif isinstance(spec.program, Script) and spec.world_size > 1 and _never_met(rendezvous):
        events.tell(
            "remark",
            text=f"The {spec.world_size} ranks never made a process group (torch.distributed."
            f"init_process_group): {spec.world_size} copies of the program have run side by side. "
            "For independent runs use `muster sweep`.",
        )
    events.tell("done", state="failed" if failed else "succeeded")
    rendezvous.shutdown()
    return 0


def _never_met(rendezvous: Any) -> bool:
    from muster.supervisor.rendezvous import GangRendezvous

    return isinstance(rendezvous, GangRendezvous) and rendezvous.ranks_met() is False


def _rendezvous(spec: GangSpec) -> Any:
    """Ours for a fixed set of nodes; torch's own where nodes may come and go."""
    if spec.min_nodes is None or spec.min_nodes == spec.num_nodes:
        from muster.supervisor.rendezvous import GangRendezvous

        return GangRendezvous(
            spec.run_id, spec.node_rank, spec.num_nodes, spec.master_addr, spec.master_port, _JOIN_S
        )
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{spec.master_addr}:{spec.master_port}",
        run_id=spec.run_id,
        min_nodes=spec.min_nodes,
        max_nodes=spec.num_nodes,
        is_host=spec.node_rank == 0,
        timeout=int(_JOIN_S),
    )
    return get_rendezvous_handler(parameters)


class _Events:
    """Owns the pipe to the launcher: whatever else is printed here goes to the supervisor's log."""

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def tell(self, event: str, **values: Any) -> None:
        logging.getLogger("muster.gang").info("%s %s", event, values)
        data = json.dumps({"event": event, **values}).encode() + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._pipe, data) :]
            except BrokenPipeError:
                return  # the launcher is gone, and this process ends with it

    def close(self) -> None:
        os.close(self._pipe)


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def _end_with_launcher() -> None:
    """End when the launcher's end of the pipe closes, where the kernel does not see to it."""
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
