"""Two hosts and one run folder: never fewer results than were acknowledged.

Every operation runs in a process of its own that can be killed between any two of its writes:
the child counts its calls into C (write, fsync, rename, execute, …) and ends itself at one of
them, without unwinding anything.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from muster.base.errors import LedgerError
from muster.farm import metrics
from muster.farm.ledger.away import AwayLedger, open_at_home
from muster.farm.ledger.home import Choice, Mark, choose
from muster.farm.ledger.read import LedgerReader
from muster.farm.ledger.store import Ledger
from muster.farm.metrics import curves_of
from muster.farm.task import AttemptRecord, Finished, NewTask, Outcome, SlotSpec, TaskState

SLOT = SlotSpec(slot_id=0, label="cpu:0", devices=())
NUM_TASKS = 30
KILLED = 9
_WRITES = frozenset(
    "write fsync rename replace unlink open close mkdir connect execute executemany executescript "
    "backup chmod".split()
)
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the operations are forked"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def a(shipments: int, acknowledged: int | None = None) -> Mark:
    return Mark("a", shipments, shipments if acknowledged is None else acknowledged)


def b(shipments: int, *, parted_at: int, acknowledged: int | None = None) -> Mark:
    known = shipments if acknowledged is None else acknowledged
    return Mark("b", shipments, known, (("a", parted_at),))


@pytest.mark.parametrize(
    ("home", "away", "expected"),
    [
        (a(5), a(5), Choice.AWAY),
        (a(5), a(6, 5), Choice.AWAY),  # killed before the last was shipped
        (a(5), a(9), Choice.AWAY),  # the run folder was put back to an older state
        (a(5), a(4), Choice.HOME),  # the local disk was
        (b(7, parted_at=5), a(5), Choice.HOME),
        (b(7, parted_at=5), a(6, 5), Choice.HOME),  # the sixth never arrived
        (b(7, parted_at=5), a(6), Choice.REFUSED),
        (a(5), b(5, parted_at=5), Choice.AWAY),  # killed before its first snapshot
        (a(6), b(5, parted_at=5), Choice.HOME),
        (a(6), b(7, parted_at=5), Choice.REFUSED),
        (Mark("c", 9, 9, (("a", 6),)), b(6, parted_at=6), Choice.HOME),
        (Mark("c", 9, 9, (("a", 6),)), b(7, parted_at=6), Choice.REFUSED),
        (Mark("c", 9, 9, (("a", 5), ("b", 7))), a(5), Choice.HOME),
        (Mark("c", 9, 9, (("a", 5), ("b", 7))), b(8, parted_at=5, acknowledged=7), Choice.HOME),
        (Mark(), Mark("a", 0, 0, (("", 0),)), Choice.AWAY),  # restored from an old muster's
        (Mark("x", 3, 3), Mark("y", 3, 3), Choice.REFUSED),
    ],
)
def test_the_ledger_that_has_all_that_was_acknowledged_is_gone_on_with(
    home: Mark, away: Mark, expected: Choice
) -> None:
    assert choose(home, away) is expected


def key_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


class Place:
    """A run folder, the local disks of two hosts, and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path / "home" / "ledger.sqlite"
        self.home.parent.mkdir()
        self.acknowledged: set[bytes] = set()

    def open(self, host: str) -> Ledger:
        """``server``: a host that has the run folder on its own disk."""
        if host == "server":
            return open_at_home(self.home)
        return AwayLedger(self.path / host / "ledger.sqlite", self.home)

    def run(self, host: str, turns: int, *, kill_at: int = 0, snapshots: bool = False) -> bool:
        """A session of ``turns`` commits; whether it came to its end."""
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                sys.setprofile(_kill_at(kill_at))
                self._session(host, turns, snapshots, lambda key: os.write(writing, key))
            except BaseException as error:
                sys.setprofile(None)
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(1)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            keys = told.read()
        self.acknowledged |= {keys[i : i + 16] for i in range(0, len(keys), 16)}
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, KILLED), "see the error above"
        return code == 0

    def _session(
        self, host: str, turns: int, snapshots: bool, tell: Callable[[bytes], object]
    ) -> None:
        ledger = self.open(host)
        ledger.begin()
        target = ledger.target_id("f")
        ledger.recover()
        ledger.add_tasks(NewTask(key_of(i), target, b"{}") for i in range(NUM_TASKS))
        ledger.commit()
        ledger.snapshot()
        ledger.begin()
        ledger.worker_started(ledger.next_worker_id(), SLOT, host, "log")
        tasks = ledger.claim(2 * turns)
        ledger.commit()
        for turn in range(turns):
            group = tasks[2 * turn : 2 * turn + 2]
            ends = [Finished(t.task_id, t.token, Outcome.OK, 0, 0, 0, 0, None) for t in group]
            records = [AttemptRecord(f.task_id, f.token, 1, f) for f in ends]
            for serial in range(2):  # numbers come in ahead of the results, in turns of their own
                ledger.begin()
                point = metrics.encode([("loss", serial, 0.0, float(os.getpid()))])
                ledger.record_metrics([(t.task_id, t.token, serial, point) for t in group])
                ledger.commit()
            ledger.begin()
            ledger.record_done(records, [(b'{"y":1}', None)] * len(records))
            ledger.commit()
            for task in group:
                tell(task.key)
            if snapshots:
                ledger.snapshot()
        ledger.close()

    def check(self) -> None:
        """Looking at the run folder alone sees everything that was acknowledged."""
        if not self.home.exists():
            assert not self.acknowledged
            return
        with LedgerReader(self.home) as reader:
            tasks = [task for task in reader.tasks() if task.state is TaskState.DONE]
            done = {task.key for task in tasks}
            for task in tasks:
                curve = curves_of(reader, task.task_id)["loss"]
                assert curve.step.tolist() == [0, 1]
                assert len(set(curve.value.tolist())) == 1, "one attempt has logged all of it"
        assert self.acknowledged <= done, f"{len(self.acknowledged - done)} results are lost"

    def lose(self, host: str) -> None:
        shutil.rmtree(self.path / host, ignore_errors=True)

    def tear(self) -> None:
        """The coordinator was killed in the middle of a line."""
        segment = self.home.with_suffix(".segment")
        if segment.exists():
            with segment.open("ab") as file:
                file.write(b'0123abcd ["done","')


def _kill_at(number: int) -> Callable[[FrameType, str, object], None]:
    left = number

    def hook(frame: FrameType, event: str, called: object) -> None:
        nonlocal left
        if event == "c_call" and getattr(called, "__name__", "") in _WRITES:
            left -= 1
            if left == 0:
                os._exit(KILLED)

    return hook


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_on_to_another_host_and_back_again(place: Place) -> None:
    for host, turns in (("a", 2), ("b", 3), ("a", 2), ("server", 1), ("b", 1), ("a", 1)):
        before = len(place.acknowledged)
        assert place.run(host, turns)
        assert len(place.acknowledged) == before + 2 * turns, "nothing was done a second time"
        place.check()


def test_two_that_went_on_apart_are_both_kept(place: Place, tmp_path: Path) -> None:
    place.run("a", 1)
    backup = shutil.copytree(tmp_path / "home", tmp_path / "backup")
    place.run("a", 2)
    shutil.rmtree(tmp_path / "home")
    backup.rename(tmp_path / "home")
    place.run("b", 1)
    before = place.home.read_bytes(), (tmp_path / "a" / "ledger.sqlite").read_bytes()
    with pytest.raises(LedgerError, match="gone on apart") as error:
        place.open("a")
    assert f"move {tmp_path / 'a'}" in str(error.value)
    assert before == (place.home.read_bytes(), (tmp_path / "a" / "ledger.sqlite").read_bytes())


def test_a_coordinator_that_was_overtaken_does_not_write_over_the_other(
    place: Place, tmp_path: Path
) -> None:
    ledger = place.open("a")
    place.run("b", 2)  # the lock of the run folder did not hold
    ledger.set_meta("x", "y")
    with pytest.raises(LedgerError, match="Another coordinator"):
        ledger.close()
    place.check()


@pytest.mark.parametrize("kill_at", [1, 20, 35, 50])
def test_killed_on_the_way_to_another_host(place: Place, kill_at: int) -> None:
    _check_killed_takeover(place, kill_at)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("second", "step"),
    [("b", 4), pytest.param("b", 1, marks=pytest.mark.slow),
     pytest.param("server", 1, marks=pytest.mark.slow)],  # TestHosts draws it too
)  # fmt: skip
def test_killed_at_each_write_on_the_way_to_another_host(second: str, step: int) -> None:
    """In short at every fourth, begun at a random one."""
    for kill_at in range(random.randint(1, step), 1000, step):
        with _folder() as name:
            if not _check_killed_takeover(Place(Path(name)), kill_at, second):
                return
    raise AssertionError("never came to an end")


def _check_killed_takeover(place: Place, kill_at: int, second: str = "b") -> bool:
    """A, then B killed, then A and B again; whether B was killed."""
    place.run("a", 2, kill_at=60)
    place.tear()
    was_killed = not place.run(second, 1, kill_at=kill_at)
    place.check()
    place.run("a", 1)
    place.check()
    place.lose("a")
    place.run(second, 1)
    place.check()
    return was_killed


def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


class Hosts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = _folder()
        self.place = Place(Path(self.folder.name))

    @rule(
        host=st.sampled_from(["a", "b", "server"]),
        turns=st.integers(0, 3),
        kill_at=st.just(0) | st.integers(1, 120),
        snapshots=st.booleans(),
    )
    def run(self, host: str, turns: int, kill_at: int, snapshots: bool) -> None:
        self.place.run(host, turns, kill_at=kill_at, snapshots=snapshots)

    @rule(host=st.sampled_from(["a", "b"]))
    def lose(self, host: str) -> None:
        self.place.lose(host)

    @rule()
    def tear(self) -> None:
        self.place.tear()

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        self.place.check()

    def teardown(self) -> None:
        self.folder.cleanup()


TestHosts = pytest.mark.thorough(Hosts.TestCase)
TestHosts.settings = settings(
    max_examples=60, stateful_step_count=12, suppress_health_check=list(HealthCheck)
)
