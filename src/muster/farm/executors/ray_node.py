"""Ray on one host for one run: a program of its own, below the far end of a connection.

A lean node (``ray_lean``), whose workers are forked from a process that has imported Ray
(``ray_fork``).

    python -m muster.farm.executors.ray_node '{"node_ip_address": …}'
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.base.late_modules import imported_when_used
from muster.base.settings import kept_environment
from muster.base.shown_text import clean_text
from muster.farm.executors.ray_fork import Forks
from muster.farm.executors.ray_lean import deaf_ports, lean

STARTED = "Ray is up"
_EVERY_S = 0.02
_END_BYTES = 4096
_NO_JOB = "ffffffff"
#: A third of what Ray imports; for Google's TPUs and for runtime environments.
_RARELY_USED = ("requests", "jsonschema")


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
    settings |= {name.lower(): port for name, port in deaf_ports().items()}
    settings |= dict.fromkeys(("min_worker_port", "max_worker_port"), 0)  # any that is free
    settings["include_dashboard"] = False
    how = {"head": place is None, "shutdown_at_exit": False, "spawn_reaper": False}
    of_worker = forks.command if forks else str  # as it is
    with lean(ray, workers, of_worker) as node_class, imported_when_used(*_RARELY_USED):
        node = node_class(RayParams(**settings), **how)
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
