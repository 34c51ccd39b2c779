"""A gang on hosts that are reached by SSH: each runs its part as a node, and this machine drives.

Every start connects to the hosts anew, sends them what they lack, has each begin its part
(``gang_node``), and stays with them: it shows what the ranks print, brings home what they write,
and passes signals on. All that a host holds of a start goes with its connection. See
docs/decisions/0040-gangs-over-ssh.md.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster.api.gangs.host_parts import Outcome, Part, Watch
from muster.api.gangs.host_plan import (
    Code,
    HostRanks,
    Tries,
    checked,
    facts_of,
    plan_on_hosts,
    tried_again,
)
from muster.api.gangs.work import (
    GangAudience,
    GangEnding,
    GangWork,
    check_gang,
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
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_SOME_FAILED,
    MusterError,
    SetupError,
)
from muster.base.settings import read_settings
from muster.base.shown_text import clean_text, shell_word
from muster.base.signals import Requests, listening
from muster.hosts.check import (
    SKEW_S,
    close_all,
    connect_all,
    how_to_link,
    try_links,
)
from muster.hosts.code import moved_path
from muster.hosts.connection import Connection, Way
from muster.run.session import Session, open_run
from muster.run.state import has_saved

#: Without a word from here a host ends its part: long enough for a laptop's lid.
_SILENCE_S = 600.0
#: What a node is told of the options of the run.
_CARRIED = (
    "force", "monitor_interval_s", "max_restarts", "stall_timeout_s", "grace_s", "start",
    "restart_on", "allow_changed_code",
)  # fmt: skip


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
        facts_of.cache_clear()  # who has which GPU is another matter the next time
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
            drive = _Drive(work, options, audience, requests, session, code)
            ending = drive.run(plan.nodes).without_late_request()
        note_ending(ending, session, folder, audience)
        services.is_urgent = bool(ending.stopped_by or requests.reason)
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
        self._address = options.master_addr
        self._lost: set[str] = set()  # names of hosts
        self._returned: set[str] = set()  # with which the next start tries to begin
        self._tries = Tries()
        self._has_begun = False

    def run(self, nodes: Sequence[HostRanks]) -> GangEnding:
        """Start on all of them; on the rest where some are lost and that is allowed; and on all of
        them again once those can be used."""
        restarts, most = 0, self._options.max_restarts
        while True:
            outcome = self._start_on_those_here(nodes)
            ending = dataclasses.replace(
                outcome.ending, restarts=max(restarts, outcome.ending.restarts)
            )
            failed = self._failed(outcome)
            if ending.stopped_by or not (outcome.lost or outcome.back or failed):
                return ending
            self._note(outcome, failed)
            rest = [node for node in nodes if node.host.name not in self._lost]
            others = ", ".join(node.host.name for node in rest)
            gone = {**outcome.lost, **failed}
            names, why = ", ".join(gone), "; ".join(gone.values())
            least = self._options.min_nodes
            if gone and (not rest or least is None or len(rest) < least):
                return self._paused(ending, f"{names} was lost: {why}", rest or nodes)
            if not outcome.lost:
                self._audience.warn(f"begins again on {others}")
                continue
            if restarts == most:
                return self._paused(ending, f"{names} was lost as well: {why}", rest)
            restarts += 1
            self._audience.warn(f"restart {restarts} of {most}, on {others}")

    def _failed(self, outcome: Outcome) -> Mapping[str, str]:
        """Hosts that were back, and with which nothing could be done after all: a GPU that is
        broken shows in the ranks alone."""
        ending, name = outcome.ending, outcome.culprit
        has_failed = ending.exit_code not in (EXIT_OK, EXIT_REQUEUE)
        if has_failed and not (outcome.lost or outcome.back) and name in self._returned:
            return {name: ending.report[0] if ending.report else "a rank there has failed"}
        return outcome.failed

    def _note(self, outcome: Outcome, failed: Mapping[str, str]) -> None:
        """Who is lost, and who is back, from now on."""
        for name, why in failed.items():
            then = self._tries.failed(name)
            self._audience.warn(
                f"goes on without {name}, as nothing could be done with it: {why}; {then}"
            )
        for name in outcome.lost:
            self._tries.lost(name)
        gone = outcome.lost.keys() | failed.keys()
        if outcome.has_run:
            for name in self._returned - gone:
                self._tries.begun(name)
            self._returned = set()
        self._returned = (self._returned - gone) | set(outcome.back)
        self._lost = (self._lost - set(outcome.back)) | gone

    def _start_on_those_here(self, nodes: Sequence[HostRanks]) -> Outcome:
        """A training saves for a host that is back. What a program has not saved would be lost, so
        it is left alone."""
        here = [node for node in nodes if node.host.name not in self._lost]
        away = [node.as_planned for node in nodes if node.host.name in self._lost]
        address = self._address if here[0] is nodes[0] else None
        if address is None is not self._options.master_addr:
            self._audience.warn(
                f"--master-addr {self._address} belonged to {nodes[0].host.name}: the others meet "
                f"at an address of {here[0].host.name} that they all reach"
            )
        self._options = options = dataclasses.replace(self._options, master_addr=address)
        try:
            if not away or self._work.kind == "run":
                return self._start(here, tuple)
            way = Way(options.hosts_python, options.hosts_setup)
            with tried_again(
                away, way, lambda found: checked(found, is_forced=options.force),
                self._audience.warn, self._tries,
            ) as returns:  # fmt: skip
                return self._start(here, returns.names)
        except MusterError as error:
            # It may be nobody's in particular, as that two do not reach each other.
            without = self._returned if not error.host else self._returned & {error.host}
            if not without:
                raise
            return _not_begun(failed=dict.fromkeys(sorted(without), _first_line(error)))

    def _unreached(self, missing: Sequence[SetupError]) -> Outcome:
        """That a host is not there ends no training that has begun, no more than at any other
        moment."""
        if not self._has_begun:
            raise missing[0]
        whys = {error.host: _first_line(error) for error in missing}
        failed = {name: why for name, why in whys.items() if name in self._returned}
        return _not_begun(failed, {n: why for n, why in whys.items() if n not in failed})

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

    def _start(self, nodes: Sequence[HostRanks], back: Callable[[], tuple[str, ...]]) -> Outcome:
        hosts = [node.as_planned for node in nodes]
        options, folder = self._options, self._work.folder
        way = Way(options.hosts_python, options.hosts_setup)
        with ExitStack() as stack:
            found = connect_all([(host, way) for host in hosts])
            connections = [one for one in found if isinstance(one, Connection)]
            stack.callback(close_all, connections)
            if len(connections) < len(found):
                return self._unreached([one for one in found if isinstance(one, SetupError)])
            checked(connections, is_forced=options.force)
            folder.ending_json.unlink(missing_ok=True)
            for old in folder.logs.glob("rank-*.error.json"):
                old.unlink(missing_ok=True)
            parts = [
                Part(number, one, folder, self._code) for number, one in enumerate(connections)
            ]
            with ThreadPoolExecutor(len(parts)) as pool:
                try:
                    list(pool.map(_learn, parts))
                    self._tell_of_clocks(parts)
                    address, port = self._meeting(connections)

                    def begin(part: Part) -> None:
                        with _blamed(part):
                            self._begin(part, nodes, address, port)

                    list(pool.map(begin, parts))
                except BaseException:  # Ctrl-C: the pool waits for its threads
                    way.circle.end()
                    raise
            self._has_begun = True
            num_ranks = sum(node.num_ranks for node in nodes)
            return Watch(
                parts, num_ranks, folder, self._audience, self._requests, self._session,
                self._options.grace_s, back,
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
        return address, options.master_port or first.ask("held_port")

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
        argv = [connection.facts["python"], "-u", "-P", "-m", "muster.api.gang_node"]
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


def _not_begun(
    failed: Mapping[str, str], lost: Mapping[str, str] = MappingProxyType({})
) -> Outcome:
    ending = GangEnding(exit_code=EXIT_REQUEUE)
    return Outcome(ending=ending, lost=lost, failed=failed, has_run=False)


def _first_line(error: MusterError) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _blamed(part: Part) -> Iterator[None]:
    try:
        yield
    except MusterError as error:
        error.host = part.name
        raise


def _learn(part: Part) -> None:
    with _blamed(part):
        part.learn()


def _absolute(path: Any) -> Any:
    """A file outside of the working folder, which on a host is in another place beside it."""
    return os.path.abspath(path) if isinstance(path, str) and path.startswith("../") else path
