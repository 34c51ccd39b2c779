"""A Ray that is started for one run is started without what nobody looks at.

Ray's own start of a head takes up to ten seconds of processor time, most of it in series: a
dashboard that starts, and is waited for, also where none is wanted, a log monitor, an autoscaler,
and two agents of the raylet that import Ray as well. What is left is the control store and the
raylet. The agents serve metrics, dashboards and runtime environments, of which a run has none:
waiting processes stand in for them, as the raylet ends with its agents, and they with it.

The module ``ray`` comes in as a value.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from muster.base.held_port import held_port
from muster.farm.executors import ray_pilot

#: Flags of the raylet that start its agents; it adds words of its own behind the command.
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
#: Ends with who kills it, and with its standard input, which the raylet holds while it lives.
NOBODY = 'sh -c "[ -p /dev/stdin ] && exec cat > /dev/null; exec sleep 2147483647"'
_PRESTART = "--num_prestart_python_workers"
_WORKER = "--python_worker_command"
_AGENT_PORTS = (
    "DASHBOARD_AGENT_LISTEN_PORT", "METRICS_AGENT_PORT", "RUNTIME_ENV_AGENT_PORT",
    "METRICS_EXPORT_PORT",
)  # fmt: skip
_EVERY_S = 0.02
_REGISTERS_S = 30.0
#: In the environment of what is started. A raylet looks for its own object store once a second, ten
#: times, and Ray looks for the raylet once a second: each costs that second where the first look
#: comes too early. Nobody is there for metrics. Processes for the workers import Ray, and what is
#: to run there, before they are asked.
ENVIRONMENT = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    "RAY_enable_worker_prestart": "1",
    "RAY_preload_python_modules": ray_pilot.__name__,
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}


class GivenUpError(Exception):
    """Nobody waits for this start any more."""


@functools.cache
def deaf_ports() -> Mapping[str, int]:
    """At which nobody listens as long as this process lives, by the agents that would."""
    return {name: held_port() for name in _AGENT_PORTS}


@contextlib.contextmanager
def lean(
    ray: Any,
    workers: int,
    of_worker: Callable[[str], str] = lambda command: command,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Iterator[type[Any]]:
    """The class of a lean node, which is Ray's own within this. ``workers``: so many processes are
    there before anybody asks for them, started with what ``of_worker`` makes of Ray's command.

    ``is_given_up``: asked until the node is there, which then ends with GivenUpError. Later a start
    cannot be ended: Ray ends a process whose control store has gone.
    """
    private, raylet = ray._private, ray._raylet

    def go_on() -> None:
        if is_given_up():
            raise GivenUpError

    class LeanNode(private.node.Node):  # type: ignore[misc, name-defined]
        def start_api_server(self, **_: Any) -> None:
            """Not the dashboard's process."""

        def start_log_monitor(self) -> None:
            """Nor what sends the output of workers to the driver."""

        def start_monitor(self) -> None:
            """Nor the autoscaler."""

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            """With the ports of its agents where it waits for them. -1 is an agent that serves
            nobody.
            """
            for name, port in deaf_ports().items():
                file = getattr(raylet, f"{name}_NAME", None)
                if file is not None:
                    told = port if name == "RUNTIME_ENV_AGENT_PORT" else -1
                    raylet.persist_port(self._session_dir, self._node_id, file, told)
            super().start_raylet(*arguments, **named)

        def start_ray_processes(self) -> None:
            cast(Any, super()).start_ray_processes()
            node: Any = self
            until_s = time.monotonic() + _REGISTERS_S
            with contextlib.suppress(Exception):  # in another version; Ray waits itself after this
                while not (is_given_up() or node.dead_processes()) and time.monotonic() < until_s:
                    known = node.get_gcs_client().get_all_node_info(timeout=_REGISTERS_S)
                    if node._node_id in {one.hex() for one in known}:
                        break
                    time.sleep(_EVERY_S)
            go_on()

    wait_for_port = private.node.wait_for_persisted_port

    def wait(folder: str, node_id: str, name: str, timeout_ms: int, **named: Any) -> int:
        """Ray itself waits with the interpreter's lock held, and no Ctrl-C is heard."""
        until_s = time.monotonic() + timeout_ms / 1000
        while not any(Path(folder).glob(f"{name}*")) and time.monotonic() < until_s:
            go_on()
            time.sleep(_EVERY_S)
        go_on()
        return int(wait_for_port(folder, node_id, name, timeout_ms=timeout_ms, **named))

    start_process = private.services.start_ray_process

    def start_lean(command: list[str], *arguments: Any, **named: Any) -> Any:
        go_on()
        instead = {**dict.fromkeys(_AGENTS, NOBODY), _PRESTART: workers}
        words = []
        for word in command:
            flag, _, value = word.partition("=")
            if flag == _WORKER:
                word = f"{_WORKER}={of_worker(value)}"
            words.append(f"{flag}={instead[flag]}" if flag in instead else word)
        return start_process(words, *arguments, **named)

    with (
        replaced(private.node, Node=LeanNode, wait_for_persisted_port=wait),
        replaced(private.services, start_ray_process=start_lean),
        # The libraries of the dashboard, which it would import to see whether they are there, take
        # half of what is left of a start.
        replaced(private.utils, get_dashboard_dependency_error=lambda: None),
    ):
        yield LeanNode


@contextlib.contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Within this, these names of the module mean something else."""
    usual = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(usual)


@contextlib.contextmanager
def at_loopback(ray: Any) -> Iterator[None]:
    """Ray would join 127.0.0.1 by an outer address of the machine, at which nothing listens."""
    with replaced(ray._private.services, resolve_ip_for_localhost=lambda host: host):
        yield
