"""The hosts of a gang over SSH: what each would start, for which they are asked and nothing is
changed; the user's code, as it goes to them; and those that were lost, which are tried until they
can be used.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.api.gangs.work import GangWork, choose_start
from muster.api.start.options import GangOptions
from muster.base.clock import human_duration
from muster.base.errors import SetupError, TargetError, UsageError
from muster.base.modules import CLASS, is_installed
from muster.base.shown_text import clean_text, count
from muster.base.target import find_source, parse_target
from muster.gang.spec import Entry, Script, Start
from muster.hosts.check import connected, here, judge, other_code
from muster.hosts.code import pack_code
from muster.hosts.connection import BACK_OFF_S, Connection, Way
from muster.hosts.names import Host, parse_hosts
from muster.run.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class HostRanks:
    """What a host does: so many ranks, on these GPUs (by their numbers there) or on its CPU."""

    host: Host
    gpus: tuple[int, ...]
    num_ranks: int
    cpus: int

    @property
    def as_planned(self) -> Host:
        """The host with the GPUs that are its in this run, also where ``--hosts`` names none."""
        return replace(self.host, gpus=self.gpus or None)

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
    facts = facts_of(hosts, options.hosts_python, options.hosts_setup, is_forced=options.force)
    unlike = [other_code(*pair) for pair in zip(hosts, facts, strict=True)]
    return HostsPlan(
        folder=work.folder, nodes=plan_hosts(hosts, facts),
        start=choose_start(work.program, options), notes=tuple(filter(None, unlike)),
    )  # fmt: skip


@lru_cache(maxsize=4)
def facts_of(
    hosts: tuple[Host, ...], python: str | None, setup: tuple[str, ...], *, is_forced: bool
) -> list[Mapping[str, Any]]:
    with connected(hosts, Way(python, setup)) as connections:
        return checked(connections, is_forced=is_forced)


def checked(connections: Sequence[Connection], *, is_forced: bool) -> list[Mapping[str, Any]]:
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
                error = SetupError(
                    f"{one.host.name} cannot be used ({finding.what}: {finding.found}).",
                    hint=finding.fix,
                )
                error.host = one.host.name
                raise error
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


_LOOK_S = 0.2
#: After so many starts that failed with a host it is not tried any more.
_MOST_STARTS = 3


class Tries:
    """Over all starts of a run: how often each lost host was tried in vain, when it is tried again,
    and how many starts have failed with it after it had answered."""

    def __init__(self) -> None:
        self._vain: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._failed: dict[str, int] = {}

    def lost(self, name: str) -> None:
        """It is tried from now on. One with which starts have failed waits for longer."""
        self._vain[name] = self._failed.get(name, 0)
        self._wait(name)

    def is_due(self, name: str) -> bool:
        return not self.is_given_up(name) and time.monotonic() >= self._due_s[name]

    def is_given_up(self, name: str) -> bool:
        return self._failed.get(name, 0) >= _MOST_STARTS

    def in_vain(self, name: str) -> tuple[int, float]:
        """It cannot be used yet. Returns how often that was so, and for how long it is left."""
        self._vain[name] += 1
        return self._vain[name], self._wait(name)

    def failed(self, name: str) -> str:
        """A start has failed with it. Returns what becomes of it, as a sentence has it."""
        self._failed[name] = self._failed.get(name, 0) + 1
        self.lost(name)
        if self.is_given_up(name):
            return f"it is not tried again, as {_MOST_STARTS} starts have failed with it"
        return f"it is tried again in {human_duration(self._due_s[name] - time.monotonic())}"

    def begun(self, name: str) -> None:
        """Its ranks have worked in a start, so that what was wrong with it is over."""
        self._failed.pop(name, None)

    def _wait(self, name: str) -> float:
        pause_s = BACK_OFF_S[min(self._vain[name], len(BACK_OFF_S) - 1)]
        self._due_s[name] = time.monotonic() + pause_s
        return pause_s


class Returns:
    """Tries the lost hosts in a thread. ``check`` raises SetupError for a host that answers and
    still cannot be used."""

    def __init__(
        self, lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
        say: Callable[[str], None], tries: Tries,
    ) -> None:  # fmt: skip
        self._lost, self._way, self._check, self._say = lost, way, check, say
        self._tries = tries
        self._is_over = threading.Event()
        self._back: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._try, name="muster-returns", daemon=True)
        self._thread.start()

    def names(self) -> tuple[str, ...]:
        """Those that can be used again."""
        return self._back

    def close(self) -> None:
        self._is_over.set()
        self._way.circle.end()
        self._thread.join()

    def _try(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            for host in self._lost:
                name = host.name
                if name in self._back or not self._tries.is_due(name):
                    continue
                why = self._why_not(host)
                if self._is_over.is_set():
                    return
                if why is None:
                    self._back += (name,)
                    continue
                count, pause_s = self._tries.in_vain(name)
                if count == 1:
                    self._say(
                        f"{name} is still lost ({why}); it is tried again in "
                        f"{human_duration(pause_s)}, and then less and less often"
                    )

    def _why_not(self, host: Host) -> str | None:
        """Why the host cannot be used; None where it can."""
        try:
            with connected([host], self._way) as connections:
                self._check(connections)
        except Exception as error:  # also of an answer that makes no sense: it is tried again
            return clean_text(str(error) or type(error).__name__).partition("\n")[0]
        return None


@contextmanager
def tried_again(
    lost: Sequence[Host], way: Way, check: Callable[[Sequence[Connection]], object],
    say: Callable[[str], None], tries: Tries,
) -> Iterator[Returns]:  # fmt: skip
    """Lost hosts are tried again within this."""
    returns = Returns(lost, way, check, say, tries)
    try:
        yield returns
    finally:
        returns.close()


_MUSTER = Path(__file__).parents[3]


@dataclass(frozen=True)
class Code:
    """The folders with the user's code, the working folder first; none where nothing is his."""

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, program: Script | Entry) -> Code:
        home = Path.cwd()
        if isinstance(program, Script):
            source: Path | None = Path(os.path.abspath(program.path))
            if program.is_module or not source or not source.is_file() or is_installed(source):
                return cls((home,))
        else:
            source = _source_of(str(program.params.get("task", program.target)))
            if source is None:
                return cls(())
        return cls((home,) if source.is_relative_to(home) else (home, source.parent))

    @cached_property
    def packed(self) -> bytes:
        """A tar file of it. Raises SetupError where it is too large to be sent."""
        return pack_code(self.roots)

    @cached_property
    def digest(self) -> str:
        return sha256(self.packed).hexdigest()[:32]

    @cached_property
    def places(self) -> frozenset[str]:
        """The files that are in it: the number of the root, and the place below that."""
        with tarfile.open(fileobj=io.BytesIO(self.packed)) as tar:
            return frozenset(tar.getnames())

    def send(self, connection: Connection) -> None:
        """Lay it out on the host, where it is sent to unless an earlier start has."""
        if self.roots and not connection.ask("has_code", self.digest, limit_s=120.0):
            connection.ask(
                "take_code", self.digest, len(self.packed), after=self.packed, limit_s=600.0
            )
            connection.ask("has_code", self.digest, limit_s=120.0)


def _source_of(target: str) -> Path | None:
    """The file of the user's that a task is in; None where it is installed, Muster's, or sent with
    the run folder."""
    try:
        ref = parse_target(target, kind=CLASS)
        source = find_source(ref)
    except TargetError:
        return None
    if source is None:
        return None
    path = Path(os.path.abspath(source))
    is_ours = path.is_relative_to(_MUSTER) and ref.kind == "module"
    return None if is_ours or is_installed(path) else path
