"""A gang on hosts that are reached by SSH: each runs its part as a node, and this machine drives.

Every start connects to the hosts anew, sends them what they lack, has each begin its part
(``gang_node``), and stays with them: it shows what the ranks print, brings home what they write,
and passes signals on. All that a host holds of a start goes with its connection. See
docs/decisions/0040-gangs-over-ssh.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from muster.api.gangs.host_code import Code
from muster.api.gangs.host_parts import Outcome, Part, Watch
from muster.api.gangs.work import (
    GangAudience,
    GangEnding,
    GangWork,
    check_gang,
    choose_start,
    note_ending,
    tell_ending,
    wants_limits,
)
from muster.api.start.earlier_work import move_aside
from muster.api.start.limits import refuse_to_begin
from muster.api.start.options import GangOptions
from muster.api.start.services import run_services
from muster.base.clock import human_duration
from muster.base.code import code_id
from muster.base.codec import as_read_back, to_json
from muster.base.errors import (
    EXIT_REQUEUE,
    EXIT_SOME_FAILED,
    SetupError,
    UsageError,
)
from muster.base.settings import read_settings
from muster.base.shown_text import clean_text, count, shell_word
from muster.base.signals import Requests, listening
from muster.gang.spec import Start
from muster.hosts.check import (
    SKEW_S,
    connected,
    here,
    how_to_link,
    judge,
    other_code,
    try_links,
)
from muster.hosts.code import moved_path
from muster.hosts.connection import Connection, Way
from muster.hosts.names import Host, parse_hosts
from muster.run.folder import RunFolder
from muster.run.session import Session, open_run
from muster.run.state import has_saved

#: Without a word from here a host ends its part: long enough for a laptop's lid.
_SILENCE_S = 600.0
#: What a node is told of the options of the run.
_CARRIED = (
    "force", "monitor_interval_s", "max_restarts", "stall_timeout_s", "grace_s", "start",
    "restart_on", "allow_changed_code",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """What a host does: so many ranks, on these GPUs (by their numbers there) or on its CPU."""

    host: Host
    gpus: tuple[int, ...]
    num_ranks: int
    cpus: int

    @property
    def labels(self) -> list[str]:
        name = self.host.name
        if self.gpus:
            return [f"{name}:{gpu}" for gpu in self.gpus]
        return [f"{name}:cpu:{number}" for number in range(self.num_ranks)]

    @property
    def threads_per_rank(self) -> int:
        return max(1, self.cpus // self.num_ranks)

    @property
    def shown(self) -> str:
        ranks = count(self.num_ranks, "rank")
        if not self.gpus:
            return f"{self.host.name}: {ranks} on its CPU"
        which = "GPU" if len(self.gpus) == 1 else "GPUs"
        return f"{self.host.name}: {ranks} on {which} {', '.join(map(str, self.gpus))}"

    @property
    def said(self) -> str:
        """The host as ``--hosts`` has it."""
        if self.host.cpu_workers is not None:
            return f"{self.host.name}:cpu:{self.host.cpu_workers}"
        chosen = "+".join(map(str, self.host.gpus or ()))
        return f"{self.host.name}:{chosen}" if chosen else self.host.name


@dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """What would be started on which host: ``--dry-run`` shows it."""

    folder: RunFolder
    nodes: tuple[HostRanks, ...]
    start: Start
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[str]:
        return [label for node in self.nodes for label in node.labels]

    @property
    def threads_per_rank(self) -> int:
        return min(node.threads_per_rank for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def lines(self) -> list[str]:
        return [*(node.shown for node in self.nodes), *self.notes]


def plan_on_hosts(work: GangWork, options: GangOptions) -> HostsPlan:
    """What would be started, where; it changes nothing. SetupError for a host that cannot be used,
    UsageError for hosts of which some have a GPU and some have none."""
    assert options.hosts is not None
    hosts = parse_hosts(options.hosts)
    facts = _facts_of(hosts, options.hosts_python, options.hosts_setup, is_forced=options.force)
    unlike = [other_code(*pair) for pair in zip(hosts, facts, strict=True)]
    return HostsPlan(
        folder=work.folder, nodes=plan_hosts(hosts, facts),
        start=choose_start(work.program, options), notes=tuple(filter(None, unlike)),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _facts_of(
    hosts: tuple[Host, ...], python: str | None, setup: tuple[str, ...], *, is_forced: bool
) -> list[Mapping[str, Any]]:
    with connected(hosts, Way(python, setup)) as connections:
        return _checked(connections, is_forced=is_forced)


def _checked(connections: Sequence[Connection], *, is_forced: bool) -> list[Mapping[str, Any]]:
    """Their facts. Raises SetupError for a host that cannot be used, and for unlike versions of
    torch: ranks of two could not talk to each other. ``is_forced``: also GPUs that others hold."""
    first = connections[0]
    found: list[Mapping[str, Any]] = []
    for one in connections:
        facts = dict(one.facts)
        if is_forced:
            facts["gpus"] = [{**gpu, "held": ""} for gpu in facts["gpus"]]
        found.append(facts)
        for finding in judge(one.host, facts, here()):
            # Ray has no part in this, and here torch need not be installed.
            if finding.state == "failure" and finding.what not in ("ray", "torch"):
                raise SetupError(
                    f"{one.host.name} cannot be used ({finding.what}: {finding.found}).",
                    hint=finding.fix,
                )
        if one.facts["torch"] is None:
            raise SetupError(
                f"{one.host.name} cannot be used: there is no torch for its Python "
                f"{one.facts['python']}.",
                hint=f"on {one.host.name}: {one.facts['python']} -m pip install "
                "'muster-gpu[torch]'",
            )
        if one.facts["torch"].split("+")[0] != first.facts["torch"].split("+")[0]:
            raise SetupError(
                f"{first.host.name} has torch {first.facts['torch']} and {one.host.name} has "
                f"{one.facts['torch']}: ranks of two versions do not understand each other.",
                hint="install the same on all hosts.",
            )
    return found


def plan_hosts(hosts: Sequence[Host], facts: Sequence[Mapping[str, Any]]) -> tuple[HostRanks, ...]:
    """A rank on each GPU, or on the CPU. Raises UsageError where only some would have a GPU."""
    nodes = []
    for host, about in zip(hosts, facts, strict=True):
        gpus: tuple[int, ...] = ()
        if host.cpu_workers is None:
            free = (gpu["index"] for gpu in about["gpus"] if not gpu.get("held"))
            gpus = host.gpus or tuple(free)
        nodes.append(
            HostRanks(
                host=host, gpus=gpus, num_ranks=len(gpus) or host.cpu_workers or 1,
                cpus=int(about["cpus"]),
            )
        )  # fmt: skip
    without = [node.host.name for node in nodes if not node.gpus]
    if 0 < len(without) < len(nodes):
        raise UsageError(
            f"{', '.join(without)} would work without a GPU and the other hosts with one: the "
            "ranks of a gang must be alike.",
            hint=f"leave out {', '.join(without)}, or use the CPU everywhere (HOST:cpu:N).",
        )
    return tuple(nodes)


def run_on_hosts(work: GangWork, options: GangOptions, audience: GangAudience) -> GangEnding:
    """Run a gang to its end on the hosts that the options name. Raises what ``plan_on_hosts``
    raises, and SetupError when somebody works on the folder."""
    with listening() as requests, ExitStack() as stack:
        check_gang(options)
        settings, folder = read_settings(), work.folder
        has_limits = wants_limits(work, options)
        if has_limits:
            refuse_to_begin(folder, options, requests, is_new=options.restart)
        plan = plan_on_hosts(work, options)
        _facts_of.cache_clear()  # who has which GPU is another matter the next time
        for note in plan.notes:
            audience.warn(note)
        has_gpus = any(node.gpus for node in plan.nodes)
        options.check_idle(has_gpus=has_gpus, records=options.monitor_interval_s > 0)
        code = Code.of(work.program)
        _ = code.digest  # refuses what is too large
        if options.restart:
            move_aside(folder, work.kind, audience.say)
        session = stack.enter_context(open_run(folder, work.renewal(options, audience.argv)))
        # The hosts sample themselves.
        watched = dataclasses.replace(options, monitor_interval_s=0.0, min_utilisation=None)
        services = stack.enter_context(
            run_services(
                folder, watched, session, requests, settings, lambda: (), audience.warn
            )
        )  # fmt: skip
        services.options = options
        session.begin(ranks=plan.ranks, code=code_id(work.code))
        with services.limited(lambda: len(plan.ranks)) if has_limits else nullcontext():
            ending = _Drive(work, options, audience, requests, session, code).run(plan.nodes)
        note_ending(ending, session, folder, audience)
        services.is_urgent = bool(ending.stopped_by)
        tell_ending(ending, services)
        return ending


# ---------------------------------------------------------------- one start after the other


class _Drive:
    def __init__(
        self, work: GangWork, options: GangOptions, audience: GangAudience, requests: Requests,
        session: Session, code: Code,
    ) -> None:  # fmt: skip
        self._work, self._options, self._audience = work, options, audience
        self._requests, self._session = requests, session
        self._code = code

    def run(self, nodes: Sequence[HostRanks]) -> GangEnding:
        """Start on all of them, and again on the rest where some are lost and that is allowed."""
        restarts = 0
        while True:
            outcome = self._start(nodes)
            rest = [node for node in nodes if node.host.name not in outcome.lost]
            ending = dataclasses.replace(
                outcome.ending, restarts=max(restarts, outcome.ending.restarts)
            )
            if not outcome.lost or ending.stopped_by:
                return ending
            names = ", ".join(outcome.lost)
            why = "; ".join(outcome.lost.values())
            least = self._options.min_nodes
            if not rest or least is None or len(rest) < least:
                return self._paused(ending, f"{names} was lost: {why}", rest or nodes)
            if restarts == self._options.max_restarts:
                return self._paused(ending, f"{names} was lost as well: {why}", rest)
            if nodes[0].host.name in outcome.lost and self._options.master_addr is not None:
                self._audience.warn(
                    f"--master-addr {self._options.master_addr} belonged to {nodes[0].host.name}: "
                    f"the others meet at an address of {rest[0].host.name} that they all reach"
                )
                self._options = dataclasses.replace(self._options, master_addr=None)
            restarts += 1
            others = ", ".join(node.host.name for node in rest)
            self._audience.warn(f"restart {restarts} of {self._options.max_restarts}, on {others}")
            nodes = rest

    def _paused(self, ending: GangEnding, what: str, rest: Sequence[HostRanks]) -> GangEnding:
        folder = self._work.folder
        hosts = ",".join(node.said for node in rest)
        if self._work.kind == "run":
            again = f"start it again with --run-dir {shell_word(folder.path)} --hosts {hosts}"
        else:
            again = f"go on with: muster resume {shell_word(folder.path)} --hosts {hosts}"
        is_saved = has_saved(folder)
        lines = what.splitlines()
        state = "what it has saved is here" if is_saved else "it has saved nothing yet"
        return dataclasses.replace(
            ending,
            exit_code=EXIT_REQUEUE if is_saved else EXIT_SOME_FAILED,
            report=(*lines, f"the other ranks were ended, and {state}", again),
        )

    def _start(self, nodes: Sequence[HostRanks]) -> Outcome:
        hosts, options, folder = [node.host for node in nodes], self._options, self._work.folder
        way = Way(options.hosts_python, options.hosts_setup)
        with connected(hosts, way) as connections:
            _checked(connections, is_forced=options.force)
            folder.ending_json.unlink(missing_ok=True)
            for old in folder.logs.glob("rank-*.error.json"):
                old.unlink(missing_ok=True)
            parts = [
                Part(number, one, folder, self._code) for number, one in enumerate(connections)
            ]
            with ThreadPoolExecutor(len(parts)) as pool:
                try:
                    list(pool.map(Part.learn, parts))
                    self._tell_of_clocks(parts)
                    address, port = self._meeting(connections)
                    list(pool.map(lambda one: self._begin(one, nodes, address, port), parts))
                except BaseException:  # Ctrl-C: the pool waits for its threads
                    way.circle.end()
                    raise
            num_ranks = sum(node.num_ranks for node in nodes)
            return Watch(
                parts, num_ranks, folder, self._audience, self._requests, self._session,
                self._options.grace_s,
            ).run()  # fmt: skip

    def _tell_of_clocks(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if abs(part.skew_s) > SKEW_S:
                self._audience.warn(
                    f"the clock of {part.name} is {human_duration(abs(part.skew_s))} "
                    f"{'ahead' if part.skew_s > 0 else 'behind'}: the times in what its ranks "
                    "write are by that clock"
                )

    def _meeting(self, connections: Sequence[Connection]) -> tuple[str, int]:
        """Where the nodes meet: an address of the first that all others have reached."""
        options, first = self._options, connections[0]
        if len(connections) == 1:
            return "127.0.0.1", 0
        if options.master_addr is not None:
            place = (options.master_addr, first.ask("listen", options.master_addr))
            reached = [(one.host.name, one.ask("reach", [place])[0]) for one in connections[1:]]
            broken = [(name, first.host.name, why) for name, why in reached if why]
            address = options.master_addr
        else:
            links = try_links(connections)
            is_here = any(one.host.is_local for one in connections)
            broken = [link for link in links.broken if is_here or "here" not in link[:2]]
            address = links.addresses.get(first.host.name, links.head or "127.0.0.1")
        if broken:
            shown = "; ".join(f"{a} does not reach {b} ({clean_text(w)})" for a, b, w in broken[:4])
            raise SetupError(
                f"The hosts cannot work together: {shown}.",
                hint=f"{how_to_link(broken[0])} --master-addr names an address of "
                f"{first.host.name} that the others reach.",
            )
        return address, options.master_port or first.ask("free_port", address)

    def _begin(self, part: Part, nodes: Sequence[HostRanks], address: str, port: int) -> None:
        """Send the host what it lacks and start its part of the gang."""
        work, options, node = self._work, self._options, nodes[part.number]
        connection = part.connection
        place = connection.ask("make", work.folder.name)
        part.places = {
            f"{place}/run": str(work.folder.path.absolute()),
            **{f"{place}/code/{n}": str(root) for n, root in enumerate(self._code.roots)},
        }
        self._code.send(connection)
        if left_out := part.shared.send():
            names = ", ".join(clean_text(path.name) for path in left_out[:5])
            more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
            self._audience.warn(
                f"{part.name} gets your {names}{more} as the code has it, not as a program has "
                f"written it in an earlier start: {left_out[0].parent}"
            )
        chosen = {name: getattr(options, name) for name in _CARRIED}
        devices: dict[str, Any] = {"devices": f"cpu:{node.num_ranks}"}
        if node.gpus:
            devices = {"gpu_ids": ",".join(map(str, node.gpus))}
        here = GangOptions(
            **chosen, **devices, num_nodes=len(nodes), node_rank=part.number, master_addr=address,
            master_port=port, ranks_of_nodes=tuple(one.num_ranks for one in nodes),
        )  # fmt: skip
        about = {
            "folder": f"{place}/run", "program": self._program_there(place), "kind": work.kind,
            "code": dict(work.code), "about": work.about, "options": here,
        }  # fmt: skip
        data = to_json(about)
        connection.ask("put", "part.json", 0, len(data), after=data)
        argv = [connection.facts["python"], "-u", "-P", "-m", "muster.api.gangs.node"]
        connection.ask("begin", [*argv, f"{place}/part.json"], {}, _SILENCE_S)

    def _program_there(self, place: str) -> Any:
        """The program, with the driver's files by the places where the host has them."""
        here = str(self._work.folder.path.absolute())

        def moved(value: Any) -> Any:
            if isinstance(value, str) and (value == here or value.startswith(f"{here}/")):
                return f"{place}/run{value[len(here) :]}"
            code = Path(place, "code")
            return moved_path(value, self._code.roots, code) if isinstance(value, str) else value

        program = as_read_back(self._work.program)
        if "target" in program:
            params = {name: moved(value) for name, value in program["params"].items()}
            if "task" in params:
                params["task"] = moved(_absolute(program["params"]["task"]))
            return {**program, "params": params}
        return {**program, "path": moved(_absolute(program["path"]))}


def _absolute(path: Any) -> Any:
    """A file outside of the working folder, which on a host is in another place beside it."""
    return os.path.abspath(path) if isinstance(path, str) and path.startswith("../") else path
