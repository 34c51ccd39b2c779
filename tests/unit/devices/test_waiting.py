"""Taking GPUs in turn: what is kept for others, what the rules allow, and how long one waits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock
from tests.conftest import MusterCli
from tests.unit.devices.test_queue_notes import written

from muster.api.start.options import GangOptions, SweepOptions
from muster.base.codec import to_json
from muster.base.errors import PlacementError, SetupError, UsageError
from muster.base.settings import Settings
from muster.base.signals import Interrupted, listening
from muster.devices.inventory import Device, Holder, Inventory, parse_devices, parse_gpu_ids
from muster.devices.leases import Lease, acquire
from muster.devices.placement import Placement
from muster.devices.tickets import Note, own_uid, user_name
from muster.devices.waiting import Wait, lease_in_turn

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root owns rules that are kept")
ME = user_name(own_uid())


def host(
    path: Path, num_gpus: int, busy: tuple[int, ...] = (), lost: tuple[int, ...] = (),
    pid: int = 4711,
) -> None:  # fmt: skip
    gpus = (
        Device(
            index=i, uuid=f"GPU-{i}", name="T4", memory_total_mib=16_000,
            memory_used_mib=9000 if i in busy else 0,
            holders=(Holder(pid=pid, user="bob", used_mib=9000),) if i in busy else (),
            lost="it has fallen off the bus" if i in lost else None,
        )
        for i in range(num_gpus)
    )  # fmt: skip
    part = path.with_suffix(".part")  # a run that waits may look at any time
    part.write_bytes(to_json(Inventory(devices=tuple(gpus))))
    part.replace(path)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    host(tmp_path / "facts.json", 2)
    return Settings(
        device_facts=tmp_path / "facts.json", lease_folder=tmp_path / "leases", cpu_count=8,
        queue_rules=tmp_path / "queue.toml",
    )  # fmt: skip


@contextmanager
def taken(
    settings: Settings, devices: str, wait_s: float = 0.0, group: int = 1, **more: object
) -> Iterator[Placement]:
    request = parse_gpu_ids(devices[4:]) if devices.startswith("ids:") else parse_devices(devices)
    placement, leases = lease_in_turn(
        request, settings, gpus_per_task=group, run_name="mine",
        wait=Wait(most_s=wait_s), **more,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        yield placement
    finally:
        for lease in leases:
            lease.release()


def labels(placement: Placement) -> list[str]:
    return [slot.label for slot in placement.slots]


def held(settings: Settings, uuid: str) -> Lease:
    lease = acquire(uuid, "theirs", settings)
    assert isinstance(lease, Lease)
    return lease


def waits(settings: Settings, *, ago_s: float, least: int = 2) -> Note:
    """A run that has waited for some time."""
    settings.lease_folder.mkdir(exist_ok=True)
    return Note(settings.lease_folder, "ticket", {
        "pid": os.getpid(), "run": "patient", "since_s": time.time() - ago_s,
        "devices": ["GPU-0", "GPU-1"], "least": least, "most": least, "group": 1,
    })  # fmt: skip


def test_a_run_that_does_not_wait_takes_nothing_that_is_kept_for_one_that_does(
    settings: Settings,
) -> None:
    """Otherwise the many that ask for one GPU would always be before one that needs two."""
    with held(settings, "GPU-0"):
        ticket = waits(settings, ago_s=10)
        with taken(settings, "1") as placement:  # for some minutes others may pass it
            assert labels(placement) == ["cuda:1"]
        ticket.remove()
        ticket = waits(settings, ago_s=400)
        with pytest.raises(PlacementError, match=f"cuda:1: kept for run patient of {ME}"):
            with taken(settings, "1"):
                pass
        with taken(settings, "1", force=True) as placement:
            assert labels(placement) == ["cuda:1"]
        ticket.remove()
    with taken(settings, "2") as placement:
        assert labels(placement) == ["cuda:0", "cuda:1"]


def test_a_stopped_process_keeps_nothing(settings: Settings) -> None:
    settings.lease_folder.mkdir()
    record = {"run": "patient", "since_s": 1.0, "devices": ["GPU-0"], "least": 1, "most": 1}
    with written(settings.lease_folder, "ticket", record):
        with pytest.raises(PlacementError, match="kept for run patient"):
            with taken(settings, "2", group=2):
                pass
        [ticket] = settings.lease_folder.glob("*.ticket")
        os.utime(ticket, (time.time() - 60,) * 2)
        with taken(settings, "2", group=2) as placement:
            assert labels(placement) == ["cuda:0+1"]


def test_a_run_waits_until_it_has_what_it_needs(settings: Settings, tmp_path: Path) -> None:
    lease = held(settings, "GPU-0")
    timer = threading.Timer(0.3, lease.release)
    timer.start()
    said: list[str] = []
    placement, leases = lease_in_turn(
        parse_devices("2"), settings, gpus_per_task=2, run_name="mine",
        wait=Wait(most_s=300, say=said.append),
    )  # fmt: skip
    timer.join()
    assert [one.uuid for one in leases] == ["GPU-0", "GPU-1"]
    assert placement.slots[0].label == "cuda:0+1"
    assert said == [
        f"waiting: 1 of 1 in the queue for 2 of 2 GPUs: 1 is free; run theirs of {ME} has 1; "
        "when it begins cannot be estimated"
    ]
    assert not list(settings.lease_folder.glob("*.ticket"))
    for one in leases:
        one.release()


def test_auto_waits_for_a_gpu_where_there_are_some_and_not_where_there_is_none(
    settings: Settings, tmp_path: Path
) -> None:
    with held(settings, "GPU-0"), held(settings, "GPU-1"):
        with taken(settings, "auto") as placement:
            assert placement.slots[0].kind == "cpu"
        with pytest.raises(PlacementError, match=r"for at least 1 of 2 GPUs: none is free"):
            with taken(settings, "auto", wait_s=0.1):
                pass
        with taken(settings, "cpu:2", wait_s=300) as placement:
            assert labels(placement) == ["cpu:0", "cpu:1"]
    host(tmp_path / "facts.json", 0)
    with taken(settings, "auto", wait_s=300) as placement:
        assert placement.slots[0].kind == "cpu"


def test_a_gpu_that_another_program_uses_is_waited_for_too(
    settings: Settings, tmp_path: Path
) -> None:
    host(tmp_path / "facts.json", 2, busy=(0, 1))
    with pytest.raises(PlacementError, match="programs without a lease use the others"):
        with taken(settings, "2", wait_s=0.1):
            pass
    timer = threading.Timer(0.3, host, (tmp_path / "facts.json", 2, (0,)))
    timer.start()
    with taken(settings, "2", wait_s=300) as placement:
        assert labels(placement) == ["cuda:1"]
    timer.join()


def test_a_lease_without_a_word_does_not_hold_up_the_first_in_line(settings: Settings) -> None:
    """As an older muster has it, or one that found the disk full."""
    settings.lease_folder.mkdir()
    lock = FileLock(settings.lease_folder / "GPU-0.lock", mode=0o666)
    lock.acquire()
    with taken(settings, "1", wait_s=300) as placement:
        assert labels(placement) == ["cuda:1"]
    lock.release()


def test_a_pair_is_sought_without_the_gpu_that_could_not_be_leased(
    settings: Settings, tmp_path: Path
) -> None:
    host(tmp_path / "facts.json", 3)
    settings.lease_folder.mkdir()
    lock = FileLock(settings.lease_folder / "GPU-0.lock", mode=0o666)
    lock.acquire()
    with taken(settings, "auto", 300, 2) as placement:
        assert labels(placement) == ["cuda:1+2"]
    lock.release()


def test_who_waits_is_told_when_a_gpu_is_lost_that_it_cannot_do_without(
    settings: Settings, tmp_path: Path
) -> None:
    with held(settings, "GPU-0"):
        timer = threading.Timer(0.3, host, (tmp_path / "facts.json", 2, (), (1,)))
        timer.start()
        with pytest.raises(PlacementError, match="cuda:1: lost: it has fallen off the bus"):
            with taken(settings, "2", 300, 2):
                pass
        timer.join()


def test_a_wait_ends_although_others_take_and_give_back_all_the_time(
    settings: Settings, tmp_path: Path
) -> None:
    host(tmp_path / "facts.json", 1)
    settings.lease_folder.mkdir()
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from muster.devices.tickets import Note\n"
        "kept, end_s = [], time.monotonic() + 300\n"
        "while time.monotonic() < end_s:\n"
        "    claim = {'device': 'GPU-0', 'since_s': time.time()}\n"
        "    kept.append(Note(Path(sys.argv[1]), 'claim', claim))\n"
        "    if len(kept) > 240:\n"  # so many that every look finds some of them
        "        kept.pop(0).remove()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(settings.lease_folder)])
    try:
        while len([*settings.lease_folder.glob("*.claim")]) < 240:
            assert other.poll() is None
            time.sleep(0.01)
        with pytest.raises(PlacementError, match="Waited"), taken(settings, "1", 1):
            pass
        assert other.poll() is None, "it went on until nobody changed anything any more"
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("num_gpus", "taken_first", "sentence"),
    [
        (1, True, "0 of 1 GPU is free"), (1, False, "1 of 1 GPU is free"),
        (2, True, "1 of 2 GPUs is free"), (2, False, "2 of 2 GPUs are free"),
    ],
)  # fmt: skip
def test_the_queue_counts_what_is_free(
    settings: Settings, tmp_path: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch,
    num_gpus: int, taken_first: bool, sentence: str,
) -> None:  # fmt: skip
    host(tmp_path / "facts.json", num_gpus)
    lease = held(settings, "GPU-0") if taken_first else None
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(settings.lease_folder))
    monkeypatch.setenv("MUSTER_DEVICE_FACTS", str(settings.device_facts))
    done = muster_main("queue")
    assert done.stdout.splitlines()[-1] == sentence, done.stderr
    if lease is not None:
        lease.release()


@needs_root
def test_rules_that_change_meanwhile_hold_for_who_waits_already(settings: Settings) -> None:
    settings.queue_rules.write_text("[[reservation]]\nusers = [4711]\n")
    later = threading.Timer(0.6, settings.queue_rules.write_text, ("",))

    def change(line: str) -> None:
        assert "reserved for other users" in line
        settings.queue_rules.write_text("[default")  # as an editor leaves it: that ends no wait
        later.start()

    wait = Wait(most_s=300, say=change)
    _, [lease] = lease_in_turn(parse_devices("1"), settings, run_name="mine", wait=wait)
    lease.release()
    later.join()


def test_a_gpu_that_only_this_process_uses_is_not_kept_for_others(
    settings: Settings, tmp_path: Path
) -> None:
    """As a notebook has it, whose kernel has computed there before."""
    host(tmp_path / "facts.json", 1, busy=(0,), pid=os.getpid())
    settings.lease_folder.mkdir()
    record = {"pid": 2**30, "since_s": 1.0, "devices": ["GPU-0"]}
    ticket = Note(settings.lease_folder, "ticket", record)
    with taken(settings, "1") as placement:
        assert labels(placement) == ["cuda:0"]
    ticket.remove()


def test_a_request_to_end_from_before_the_queue_is_heard(settings: Settings) -> None:
    with listening() as requests:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), taken(settings, "1", 300):
            pass
        requests.take()
    assert not list(settings.lease_folder.glob("*.ticket"))


@pytest.mark.parametrize(
    ("devices", "group", "says"),
    [
        ("3", 1, "this host has 2"), ("ids:7", 1, "there is no GPU 7"),
        ("4", 4, "this host has 2"),
    ],
)  # fmt: skip
def test_what_can_never_be_is_refused_at_once(
    settings: Settings, devices: str, group: int, says: str
) -> None:
    with pytest.raises(PlacementError, match=says), taken(settings, devices, 300, group):
        pass


@needs_root
def test_a_quota_holds_for_runs_that_wait_and_for_those_that_do_not(settings: Settings) -> None:
    settings.queue_rules.write_text("[default]\nmax_gpus = 1\n")
    for wait_s in (0.0, 300.0):
        with pytest.raises(PlacementError, match="rules of this machine allow"):
            with taken(settings, "2", wait_s, group=2):
                pass
        with taken(settings, "2", wait_s) as placement:
            assert labels(placement) == ["cuda:0"]
            with pytest.raises(PlacementError, match=r"rules of this machine|may hold 1"):
                with taken(settings, "1", min(wait_s, 0.1)):
                    pass
    with taken(settings, "2", group=2, force=True) as placement:
        assert len(placement.slots) == 1
    settings.queue_rules.chmod(0o666)
    with pytest.raises(SetupError, match="others than root may write to it"):
        with taken(settings, "1"):
            pass


@needs_root
def test_a_reservation_holds_for_runs_that_wait_and_for_those_that_do_not(
    settings: Settings,
) -> None:
    settings.queue_rules.write_text('[[reservation]]\nusers = [4711]\ngpus = ["GPU-0"]\n')
    for wait_s in (0.0, 300.0):
        with taken(settings, "2", wait_s) as placement:
            assert labels(placement) == ["cuda:1"]
            assert "reserved for other users" in placement.skipped[0].reason
    settings.queue_rules.write_text(f"[[reservation]]\nusers = [{own_uid()}]\n")
    with taken(settings, "2", group=2) as placement:
        assert len(placement.slots) == 1


def test_a_folder_that_cannot_be_written_is_no_queue(settings: Settings, tmp_path: Path) -> None:
    settings.lease_folder.write_text("")
    with pytest.raises(SetupError, match="Cannot queue in"), taken(settings, "1", 300):
        pass


def test_options_that_contradict_each_other_are_refused() -> None:
    for kind in (SweepOptions, GangOptions):
        for more, says in (
            ({"wait_s": 5.0, "force": True}, "--wait and --force contradict"),
            ({"wait_s": -1.0}, "is not a time"),
            ({"wait_s": float("inf")}, "is not a time"),
            ({"queue_priority": 3}, "no effect without --wait"),
        ):
            with pytest.raises(UsageError, match=says):
                kind(**more)
    with pytest.raises(UsageError, match="queue of one machine"):
        GangOptions(wait_s=5.0, num_nodes=2, master_addr="a", master_port=1)


@pytest.mark.parametrize("what", ["its ticket", "the folder"])
def test_who_waits_keeps_its_place_when_the_folder_is_cleared(
    settings: Settings, what: str
) -> None:
    folder = settings.lease_folder
    first = [held(settings, f"GPU-{i}") for i in range(2)]
    found: list[list[str]] = []

    def wait() -> None:
        with taken(settings, "2", 60.0) as placement:
            found.append(labels(placement))

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        deadline_s = time.monotonic() + 60
        while not (tickets := list(folder.glob("*.ticket"))) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        since = json.loads(tickets[0].read_text())["since_s"]
        for path in tickets if what == "its ticket" else list(folder.iterdir()):
            path.unlink()
        if what == "the folder":
            folder.rmdir()
        while not (tickets := list(folder.glob("*.ticket"))):
            assert time.monotonic() < deadline_s, "it waits without a place in the queue"
            time.sleep(0.01)
        assert json.loads(tickets[0].read_text())["since_s"] == since
    finally:
        for lease in first:
            lease.release()
        waiting.join(60)
    assert found == [["cuda:0", "cuda:1"]]
