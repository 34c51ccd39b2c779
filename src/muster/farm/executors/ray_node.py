"""Ray on one host for one run: a program of its own, below the far end of a connection.

``ray start`` takes ten seconds of processor time for a head and four for a node, and most of it in
series: its own imports, a dashboard that starts also where none is wanted, a log monitor, an
autoscaler, a server for Ray's clients at a port that two users of a machine cannot both have. This
starts what is left: the head's control store, and a raylet, whose workers are forked from a
process that has imported Ray (``ray_fork``). The raylet's two agents, which import Ray as
well, serve metrics, dashboards and runtime environments, of which a run has none: sleeping
processes stand in for them, as the raylet ends with its agents.

    python -m muster.farm.executors.ray_node '{"node_ip_address": …}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from muster.base.held_port import held_port
from muster.base.late_modules import imported_when_used
from muster.base.settings import kept_environment
from muster.base.shown_text import clean_text
from muster.farm.executors.ray_fork import Forks

STARTED = "Ray is up"
_EVERY_S = 0.02
_END_BYTES = 4096
#: Flags of the raylet that start its agents; it adds words of its own behind the command.
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_NOBODY = 'sh -c "exec sleep 2147483647"'  # which ends with whoever kills it
_PRESTART = "--num_prestart_python_workers"
_WORKER = "--python_worker_command"
_NO_JOB = "ffffffff"
#: A raylet looks for its own object store once a second, ten times, and Ray looks for the raylet
#: once a second: each costs that second where the first look comes too early.
_REGISTERS_S = 30.0
LOOK_OFTEN = {
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
#: A third of what Ray imports; for Google's TPUs and for runtime environments.
_RARELY_USED = ("requests", "jsonschema")
_AGENT_PORTS = (
    "DASHBOARD_AGENT_LISTEN_PORT", "METRICS_AGENT_PORT", "RUNTIME_ENV_AGENT_PORT",
    "METRICS_EXPORT_PORT",
)  # fmt: skip


def main(settings: dict[str, Any]) -> str:
    """Start it, say at which address its head is, and stay until a process of it ends; why, or why
    it cannot be started, is returned.

    ``settings``: Ray's own (``RayParams``). ``join``: a file, for which it waits, with the address
    of the head to join; without it this is the head. ``workers``: so many processes are there
    before anybody asks for them, with ``imports`` behind them.
    """
    # Ray reads these when it is imported, which is before its workers are forked. They ask by the
    # second whether the process lives that has started them: this one ends with its raylet.
    environment = {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    with kept_environment(environment), imported_when_used(*_RARELY_USED):
        import ray
    from ray import _raylet as raylet
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    place, workers = settings.pop("join", None), settings.pop("workers", 0)
    imports = settings.pop("imports", ())
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        return f"Ray {ray.__version__} cannot ask for a token; 2.52 and newer can"
    if place is not None and "_head_temp_dir" not in Node.__init__.__code__.co_names:
        # Ray's issue 57735: its sockets and logs would be where the head has them, open to all.
        return f"Ray {ray.__version__} gives a joining node no folder of its own; newer ones do"
    send_plainly(ray)
    forks = None
    if workers:  # before Ray has threads here
        forks = Forks(f"{settings['temp_dir']}.forks", imports)
    if place is not None:
        settings["gcs_address"] = _wait_for(Path(place))
    ports = {name: held_port() for name in _AGENT_PORTS}  # at which nobody is to listen

    class LeanNode(Node):
        def start_api_server(self, **_: Any) -> None:
            """Not the dashboard's process, which Ray starts, and waits for, with none wanted."""

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            """With the ports of its agents where it waits for them. -1 is an agent that serves
            nobody.
            """
            for name, port in ports.items():
                file = getattr(raylet, f"{name}_NAME", None)
                if file is not None:
                    told = port if name == "RUNTIME_ENV_AGENT_PORT" else -1
                    tell: Any = vars(raylet)["persist_port"]
                    tell(self._session_dir, self._node_id, file, told)
            super().start_raylet(*arguments, **named)

        def start_ray_processes(self) -> None:
            cast(Any, super()).start_ray_processes()
            node: Any = self
            until_s = time.monotonic() + _REGISTERS_S
            with contextlib.suppress(Exception):  # in another version; Ray waits itself after this
                while not node.dead_processes() and time.monotonic() < until_s:
                    known = node.get_gcs_client().get_all_node_info(timeout=_REGISTERS_S)
                    if node._node_id in {one.hex() for one in known}:
                        return
                    time.sleep(_EVERY_S)

    from ray._private import services, utils

    start_process: Any = vars(services)["start_ray_process"]

    def start_lean(command: list[str], *arguments: Any, **named: Any) -> Any:
        instead = {**dict.fromkeys(_AGENTS, _NOBODY), _PRESTART: workers}
        flags = [word.partition("=")[0] for word in command]
        words = [
            f"{flag}={instead[flag]}" if flag in instead else word
            for flag, word in zip(flags, command, strict=True)
        ]
        if forks is not None and _WORKER in flags:
            number = flags.index(_WORKER)
            words[number] = f"{_WORKER}={forks.command(words[number][len(_WORKER) + 1 :])}"
        return start_process(words, *arguments, **named)

    vars(services)["start_ray_process"] = start_lean
    # The libraries of the dashboard, which it would import to see whether they are there, take half
    # of what is left of a start.
    vars(utils)["get_dashboard_dependency_error"] = lambda: None
    settings |= {name.lower(): port for name, port in ports.items()}
    settings |= dict.fromkeys(("min_worker_port", "max_worker_port"), 0)  # any that is free
    settings |= dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    how = {"head": place is None, "shutdown_at_exit": False, "spawn_reaper": False}
    with imported_when_used(*_RARELY_USED):
        node: Any = LeanNode(RayParams(no_monitor=True, **settings), **how)
    sys.stdout.write(f"{STARTED} {node.gcs_address}\n")
    sys.stdout.flush()
    while not (dead := node.dead_processes()):
        time.sleep(0.5)
    return f"{dead[0][0]} has ended"


def send_plainly(ray: Any) -> Callable[[], None]:
    """Have this process serialize plain values alone, as ours are; the returned call undoes it.

    Ray imports pydantic, pyarrow and NumPy before a first value, to be ready for theirs: in each
    worker, and on the command's way to its first worker.
    """
    addons = getattr(ray.util, "serialization_addons", None)
    usual = getattr(addons, "apply", None)
    if addons is None or usual is None:  # another version of Ray: it takes longer
        return lambda: None
    addons.apply = lambda context: None

    def restore() -> None:
        addons.apply = usual

    return restore


def _wait_for(path: Path) -> str:
    """What it holds once it is there; it is written whole."""
    while not path.exists():
        time.sleep(_EVERY_S)
    return path.read_text()


def reason(log: str, code: int | None, limit_s: float) -> str:
    """Why Ray is not up after so many seconds, in a line: what this program said last, before it
    ended with ``code``, if it did.
    """
    lines = [line.strip() for line in clean_text(log).splitlines() if line.strip()]
    last = lines[-1][-400:].rstrip(".") if lines else "it has said nothing"
    if code is None:
        return f"it was not up after {limit_s:g} s; it said last: {last}"
    return last if code > 0 else f"signal {-code} ended it; it said last: {last}"


def told(settings: dict[str, Any]) -> str:
    """Why it has ended, or could not be started. Before that it prints what is known of it: the
    traceback, and the ends of what Ray's own processes have logged, which go with their folder.
    """
    folder = Path(settings.get("temp_dir", "r"))
    try:
        why = main(settings)
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
    for path in sorted(folder.glob("session_2*/logs/*")):
        if path.is_file() and (text := path.read_bytes()[-_END_BYTES:].strip()):
            sys.stderr.write(f"--- the end of {path.name}\n{text.decode(errors='replace')}\n")
    return f"\n{why}"


if __name__ == "__main__":
    sys.exit(told(json.loads(sys.argv[1])))
