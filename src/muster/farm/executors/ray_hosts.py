"""Ray on hosts that are reached by SSH, for as long as one run lasts.

Ray runs below the far end of each connection, also on this machine, so that all of it ends with
this process, however that ends. See docs/decisions/0035-hosts-over-ssh.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

from muster.base.errors import SetupError
from muster.base.shown_text import clean_text
from muster.farm.executors import ray_lean, ray_links, ray_node, ray_pilot
from muster.farm.executors.cluster import NO_WORKERS, ClusterRequest, Node, plan_nodes
from muster.hosts.check import close_all, here, judge, open_all, other_code, try_links
from muster.hosts.connection import BACK_OFF_S, Circle, Connection, Way
from muster.hosts.names import LOCAL, Host, parse_hosts
from muster.run.folder import RunFolder

_START_S = 120.0
_LOOK_EVERY_S = 0.5
#: Of this machine, where it runs nothing but the head.
_HERE: Mapping[str, Any] = {"python": sys.executable, "gpus": ()}


def ask_hosts(request: ClusterRequest) -> tuple[ClusterRequest, list[Node]]:
    """The request with the workers that the hosts have room for, and what each host gets.

    Connects to each of them and starts nothing. Raises SetupError for one that cannot be used.
    """
    hosts = parse_hosts(request.hosts or "")
    asked = _ask(hosts, request.hosts_python, request.hosts_setup)
    return plan_nodes(request, hosts, asked.facts)


class _Asked:
    """What hosts have said, and the connections by which they did, with one to this machine behind
    them: a start that follows takes those over, for connecting takes longer than asking.
    """

    def __init__(self, connections: list[Connection], num_hosts: int) -> None:
        self.facts = [_checked(one) for one in connections[:num_hosts]]
        self._open = connections
        self._taking = threading.Lock()

    def take(self) -> list[Connection]:
        """Those that are open still; they are the caller's from then on."""
        with self._taking:
            taken, self._open = self._open, []
        return taken


_kept: list[_Asked] = []
_num_keepers = 0


@contextlib.contextmanager
def kept_open() -> Iterator[None]:
    """Hosts that are asked within this stay connected for a start within it."""
    global _num_keepers
    _ask.cache_clear()  # who has which GPU is another matter than the last time
    _num_keepers += 1
    try:
        yield
    finally:
        _num_keepers -= 1
        _ask.cache_clear()
        while _kept:
            close_all(_kept.pop().take())


@lru_cache(maxsize=4)  # a start asks several times what is to run where
def _ask(hosts: tuple[Host, ...], python: str | None, setup: tuple[str, ...]) -> _Asked:
    way = Way(python, setup)
    ways, known = [(host, way) for host in hosts], {}
    if _num_keepers and not any(host.is_local for host in hosts):
        ways.append((Host(LOCAL), Way()))  # where the head of a start will be
        known[LOCAL] = _HERE
    connections = open_all(ways, known)
    try:
        asked = _Asked(connections, len(hosts))
    except BaseException:
        close_all(connections)
        raise
    if _num_keepers:
        _kept.append(asked)
    else:
        close_all(asked.take())
    return asked


def _checked(connection: Connection) -> Mapping[str, Any]:
    for finding in judge(connection.host, connection.facts, here()):
        if finding.state == "failure":
            raise SetupError(
                f"{connection.host.name} cannot be used ({finding.what}: {finding.found}).",
                hint=f"{finding.fix}\n`muster hosts check` shows all that it finds.",
            )
    return connection.facts


class RayHosts:
    """Ray on all hosts: its start begins with construction, in a thread, and ``close`` ends it.

    ``address``: of its head, which is here; known once there is one. A host that is lost later is
    taken back when it can be reached again.
    """

    def __init__(self, request: ClusterRequest, token: str, folder: RunFolder) -> None:
        self.address = ""
        self.news: SimpleQueue[str] = SimpleQueue()
        self._request, self._token, self._folder = request, token, folder
        self._circle = Circle()
        self._way = Way(request.hosts_python, request.hosts_setup, self._circle)
        self._connections: dict[str, Connection] = {}  # by host
        self._addresses: Mapping[str, str] = {}
        self._ports: Mapping[str, ray_links.Ports] = {}  # by host, where they go through SSH
        self._has_head, self._has_room, self._is_up, self._is_over = (
            threading.Event() for _ in range(4)
        )
        self._leading = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="hosts", daemon=True)
        self._thread.start()

    @property
    def goes_through_ssh(self) -> bool:
        """Whether all of Ray is at 127.0.0.1; known once there is a head."""
        return bool(self._ports)

    def has_head(self, timeout_s: float) -> bool:
        """Whether there is a head to connect to; waits. Raises SetupError for what went wrong."""
        return self._wait(self._has_head, timeout_s)

    def has_room(self, timeout_s: float) -> bool:
        """Whether a host has joined it, which is enough to begin; waits. Raises SetupError for what
        went wrong."""
        return self._wait(self._has_room, timeout_s)

    def is_up(self, timeout_s: float) -> bool:
        """Whether all hosts have joined it; waits. Raises SetupError for what went wrong."""
        return self._wait(self._is_up, timeout_s)

    def close(self) -> None:
        """End Ray everywhere, also while it starts."""
        self._is_over.set()
        self._circle.end()
        self._thread.join()
        close_all([*self._connections.values()])

    def _wait(self, event: threading.Event, timeout_s: float) -> bool:
        is_set = event.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return is_set

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            far = self._bring_up()
        except BaseException as error:
            self._error = error
        finally:
            self._has_head.set()
            self._has_room.set()
            self._is_up.set()
        if self._error is None:
            self._keep(far)

    def _bring_up(self) -> list[Node]:
        """Start the head and the nodes. Returns those that are reached by SSH."""
        request = self._request
        hosts = parse_hosts(request.hosts or "")
        asked = _ask(hosts, request.hosts_python, request.hosts_setup)
        for note in filter(None, map(other_code, hosts, asked.facts)):
            self.news.put(note)
        nodes = [node for node in plan_nodes(request, hosts, asked.facts)[1] if node.workers]
        known = {host.name: about for host, about in zip(hosts, asked.facts, strict=True)}
        far = [node for node in nodes if not node.host.is_local]
        near = next((node for node in nodes if node.host.is_local), NO_WORKERS)
        # This machine runs the head also where it has no workers, with the Python of this process.
        ways = {LOCAL: (Host(LOCAL), self._way if near.workers else Way(circle=self._circle))}
        ways |= {node.host.name: (node.host, self._way) for node in far}
        known.setdefault(LOCAL, _HERE)
        spare = []
        for open_one in asked.take():
            name = open_one.host.name
            if name in ways and open_one.is_open:
                self._circle.add(open_one)
                self._connections[name] = open_one
                del ways[name]
            else:
                spare.append(open_one)
        try:
            opened = open_all([*ways.values()], known)
        finally:
            close_all(spare)
        self._connections |= {one.host.name: one for one in opened}
        if request.through_ssh or not self._reach_each_other(nodes):
            self._go_through_ssh(near, far, known)
        # All import Ray at once, and the nodes wait for the address of the head.
        with ThreadPoolExecutor(len(far) + 1) as pool:
            try:
                _first_failure(pool, self._begin, (near, *far))
                self.address = self._finish(near)
                self._has_head.set()
                if near.workers:
                    self._has_room.set()
                _first_failure(pool, self._join, far)
            except BaseException:
                self._hang_up(far)
                raise
        return far

    def _hang_up(self, far: Sequence[Node]) -> None:
        """Let nobody wait for a host any more. The head stays once it is there: the driver may have
        joined, and Ray ends a process that has lost its head, with words of its own a minute later.
        """
        if not self._has_head.is_set():
            self._circle.end()
            return
        for node in far:
            self._connections[node.host.name].hang_up()

    def _reach_each_other(self, nodes: Sequence[Node]) -> bool:
        links = try_links([self._connections[node.host.name] for node in nodes])
        if links.broken:
            self.news.put(_told(links.broken))
        elif links.head is not None:
            self._addresses = {**links.addresses, LOCAL: links.head}
        return bool(self._addresses)

    def _join(self, node: Node) -> None:
        self._finish(node)
        self._has_room.set()

    def _go_through_ssh(
        self, near: Node, far: Sequence[Node], known: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Connect to the hosts anew, with Ray's ports forwarded, now that it is known which."""
        workers = {node.host.name: node.workers for node in (near, *far)}
        self._ports = ray_links.find_ports([*self._connections.values()], workers, LOCAL)
        self._addresses = dict.fromkeys(workers, ray_links.ADDRESS)
        close_all([self._connections.pop(node.host.name) for node in far])
        ray_links.hold(self._connections[LOCAL], self._ports, LOCAL)
        forwards = [ray_links.Forwards(node.host.name, self._ports) for node in far]
        ways = [(node.host, self._with(one)) for node, one in zip(far, forwards, strict=True)]
        opened = open_all(ways, known)
        self._connections |= {one.host.name: one for one in opened}
        with ThreadPoolExecutor(len(far)) as pool:
            try:
                _first_failure(pool, self._lead, opened, forwards)
            except BaseException:
                self._hang_up(far)
                raise

    def _lead(self, connection: Connection, forwards: ray_links.Forwards) -> None:
        ray_links.connect(connection, self._connections[LOCAL], forwards, self._leading)

    def _with(self, forwards: ray_links.Forwards) -> Way:
        return dataclasses.replace(self._way, forwards=forwards.words)

    def _keep(self, far: Sequence[Node]) -> None:
        """Take hosts back that were lost, until it is over."""
        tries: dict[str, tuple[int, float]] = {}  # how many there were, and when the next is due
        while not self._is_over.wait(_LOOK_EVERY_S):
            for node in far:
                name, now = node.host.name, time.monotonic()
                if self._connections[name].is_open:
                    continue
                if name not in tries:
                    tries[name] = (0, now + BACK_OFF_S[0])
                    self.news.put(
                        f"{name} is lost: other hosts take over its tasks. It is tried again in "
                        f"{BACK_OFF_S[0]:g} s, and then less and less often."
                    )
                count, due = tries[name]
                if now < due:
                    continue
                self._connections[name].close()
                why = self._take_back(node)
                if why is None:
                    del tries[name]
                    self.news.put(f"{name} is back.")
                else:
                    pause = BACK_OFF_S[min(count + 1, len(BACK_OFF_S) - 1)]
                    tries[name] = (count + 1, time.monotonic() + pause)
                    if not count:
                        self.news.put(f"{name} is still lost: {why}")

    def _take_back(self, node: Node) -> str | None:
        """Why it cannot be; None where it has been."""
        forwards = ray_links.Forwards(node.host.name, self._ports) if self._ports else None
        try:
            connection = Connection(node.host, self._with(forwards) if forwards else self._way)
        except SetupError as error:
            return str(error).partition("\n")[0]
        self._connections[node.host.name] = connection
        try:
            _checked(connection)
            if forwards is not None:
                self._lead(connection, forwards)
            self._begin(node)
            self._finish(node)
        except SetupError as error:
            connection.close()
            return str(error).partition("\n")[0]
        return None

    def _begin(self, node: Node) -> None:
        """Lease its GPUs, and start the program that imports Ray."""
        name = node.host.name
        connection = self._connections[name]
        gpus = connection.facts["gpus"] if node.gpus else ()
        uuids = [gpu["uuid"] for gpu in gpus if gpu["index"] in node.gpus]
        if uuids and (held := connection.ask("lease", uuids, self._folder.name)):
            raise SetupError(
                f"A GPU of {name} is taken: {clean_text('; '.join(held))}.",
                hint=f"wait until that ends (`muster queue` on {name} shows it), or name others.",
            )
        address = self._addresses[name]
        settings: dict[str, Any] = {
            "node_ip_address": address, "node_name": name, "num_cpus": node.cpus,
            "num_gpus": len(node.gpus), "temp_dir": "{folder}/r", "workers": node.workers,
            "imports": [ray_pilot.__name__],
        }  # fmt: skip
        if self._ports:
            settings |= self._ports[name].settings()
        if node.memory_mib is not None:  # Ray itself would count a part of it
            settings["memory"] = node.memory_mib << 20
        if not node.host.is_local:
            settings["join"] = "{folder}/head"
        argv = [connection.facts["python"], "-m", ray_node.__name__, json.dumps(settings)]
        environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{folder}/auth_token",
            "RAY_AUTH_TOKEN": "", "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": "{folder}",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus)),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers are nvidia-smi's
            "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
            **ray_lean.ENVIRONMENT,
        }  # fmt: skip
        connection.ask("start", argv, environment, {"auth_token": self._token})

    def _finish(self, node: Node) -> str:
        """Wait until Ray is up there, and return the address of its head."""
        name = node.host.name
        connection = self._connections[name]
        if not node.host.is_local:
            connection.ask("write", "head", self.address)
        answer = connection.ask("wait", ray_node.STARTED, _START_S, limit_s=_START_S + 30)
        if "said" not in answer:
            log = str(answer["log"])
            why = ray_node.reason(log, answer["code"], _START_S)
            raise SetupError(
                f"Ray could not be started on {name}: {why}.{self._keep_log(name, log)}",
                hint=f"see what `muster hosts check {name}` says.",
            )
        return str(answer["said"])

    def _keep_log(self, name: str, text: str) -> str:
        """Where the log of Ray's start is from now on, in a sentence: it goes on the host."""
        path = self._folder.ray_log(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            return f" Its log could not be kept in {path}: {error.strerror}."
        return f" Its log is {path}."


def _first_failure(
    pool: ThreadPoolExecutor, work: Callable[..., Any], *given: Sequence[Any]
) -> None:
    """Do it with each of these at once. What goes wrong first is raised then, and not when its turn
    comes: who does not answer at all is waited for long."""
    for done in as_completed([pool.submit(work, *each) for each in zip(*given, strict=True)]):
        done.result()


def _told(broken: Sequence[tuple[str, str, str]]) -> str:
    shown = "; ".join(f"{a} does not reach {b} ({clean_text(why)})" for a, b, why in broken[:4])
    return f"{shown}: Ray's connections go through SSH, by way of this machine."
