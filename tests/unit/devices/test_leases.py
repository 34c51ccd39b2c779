"""Leases between real processes: what a lock promises can only be seen from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.processes import at_work

from muster.base.errors import PlacementError, SetupError
from muster.base.settings import Settings
from muster.devices.inventory import Device, Inventory, parse_devices
from muster.devices.leases import Lease, LeaseHeld, acquire, place_and_lease
from muster.devices.placement import Placement
from muster.devices.tickets import own_uid, user_name

SOURCE = Path(__file__).parents[3] / "src"
#: Whose files ours are, as the kernel says: what a user calls himself is not asked.
ME = user_name(own_uid())

#: Takes the lease, says so, and waits; with "child", first starts a process that outlives it.
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from muster.base.settings import Settings
from muster.devices.leases import Lease, acquire
folder, uuid, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
lease = acquire(uuid, "night-sweep", Settings(lease_folder=folder))
assert isinstance(lease, Lease), lease
child = 0
if how == "exec":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                             close_fds=False, stdout=subprocess.DEVNULL).pid
if how == "fork":
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def holder(folder: Path, uuid: str, how: str = "alone") -> AbstractContextManager[tuple[int, int]]:
    """A process that holds the lease: its pid and its child's (0: none)."""
    return at_work(HOLDER, str(folder), uuid, how)


def leased_after_death(uuid: str, settings: Settings) -> Lease | LeaseHeld:
    """The kernel frees the lock while the killed process is being torn down: soon, not at once."""
    deadline_s = time.monotonic() + 300
    while True:
        answer = acquire(uuid, "next", settings)
        if isinstance(answer, Lease) or time.monotonic() > deadline_s:
            return answer
        time.sleep(0.01)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(lease_folder=tmp_path / "leases", user="bob", cpu_count=8)


def host(count: int) -> Inventory:
    return Inventory(
        devices=tuple(Device(index=i, uuid=f"GPU-{i}{i}", name="T4") for i in range(count))
    )


def test_a_second_run_is_told_who_holds_the_gpu(settings: Settings) -> None:
    with holder(settings.lease_folder, "GPU-a") as (pid, _):
        held = acquire("GPU-a", "mine", settings)
        assert isinstance(held, LeaseHeld)
        assert (held.pid, held.user, held.run) == (pid, ME, "night-sweep")
        assert held.since is not None
        assert str(held) == f"leased by run night-sweep of {ME} (pid {pid}) since {held.since}"
        other = acquire("GPU-b", "mine", settings)
        assert isinstance(other, Lease)
        other.release()


@pytest.mark.parametrize("how", ["alone", "exec", "fork"])
def test_kill_9_frees_the_gpu_even_if_a_child_lives_on(settings: Settings, how: str) -> None:
    with holder(settings.lease_folder, "GPU-a", how) as (pid, child):
        os.kill(pid, signal.SIGKILL)
        lease = leased_after_death("GPU-a", settings)
        assert isinstance(lease, Lease), str(lease)
        if child:
            os.kill(child, 0)  # Still there: it is not its end that freed the lock.
        lease.release()


def test_release_and_the_end_of_a_with_block_give_the_gpu_back(settings: Settings) -> None:
    with _leased("GPU-a", settings) as lease:
        assert isinstance(acquire("GPU-a", "again", settings), LeaseHeld)
        lease.release()
        lease.release()
        with _leased("GPU-a", settings):
            pass


def test_the_note_beside_the_lock_says_who(settings: Settings) -> None:
    with _leased("GPU-a", settings):
        [note] = _notes(settings, "claim")
        record = json.loads(note.read_text())
        assert record.keys() == {"pid", "device", "run", "since_s"}
        assert (record["pid"], record["device"], record["run"]) == (os.getpid(), "GPU-a", "test")
    assert _notes(settings, "claim") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"device": 3}', '{"device": "GPU-b"}'])
def test_a_note_that_cannot_be_read_leaves_the_holder_unknown(
    settings: Settings, text: str
) -> None:
    with holder(settings.lease_folder, "GPU-a"):
        _notes(settings, "claim")[0].write_text(text)
        held = acquire("GPU-a", "again", settings)
        assert held == LeaseHeld(uuid="GPU-a")
        assert str(held) == "leased by another muster run"


def test_other_users_may_use_the_folder_and_its_locks_and_read_its_notes(
    settings: Settings,
) -> None:
    before = os.umask(0o077)
    try:
        with _leased("MIG-GPU-a/1/0", settings):
            modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in _files(settings)}
    finally:
        os.umask(before)
    assert stat.S_IMODE(settings.lease_folder.stat().st_mode) == 0o1777
    assert modes == {".lock": 0o666, ".claim": 0o644}
    assert (settings.lease_folder / "MIG-GPU-a_1_0.lock").exists()


def test_a_planted_link_is_not_followed(settings: Settings, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    settings.lease_folder.mkdir()
    victim_note = tmp_path / "leases" / "0-0-0.claim"
    victim_note.symlink_to(victim)
    with _leased("GPU-a", settings):
        assert isinstance(acquire("GPU-a", "again", settings), LeaseHeld)
        assert victim.read_text() == "precious"


def _plant(path: Path, what: str) -> None:
    """What another user may have put where everybody may write."""
    path.parent.mkdir(exist_ok=True)
    match what:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "dangling link":
            path.symlink_to(path.parent / "nowhere")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "large":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "deep":
            path.write_text("[" * 100_000)
        case "escapes":
            path.write_text(json.dumps({"user": "\x1b[2Jm\n", "run": "r" * 10_000, "pid": 1}))


PLANTED = [
    "fifo", "folder", "dangling link", "link to a device", "socket", "large", "deep", "escapes",
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", PLANTED)
def test_nothing_planted_beside_a_lock_stops_anybody(settings: Settings, what: str) -> None:
    """Neither who takes the lease nor who asks who has it waits, or reads without end."""
    for kind in ("claim", "ticket", "used"):
        _plant(settings.lease_folder / f"0-1-2.{kind}", what)
    with _leased("GPU-a", settings):
        held = acquire("GPU-a", "again", settings)
        assert isinstance(held, LeaseHeld) and held.pid == os.getpid()
        assert str(held).isprintable() and len(str(held)) < 500


def test_what_a_holder_calls_its_run_cannot_reach_a_terminal(settings: Settings) -> None:
    lease = acquire("GPU-a", "\x1b[2Jm\n\u202e" + "r" * 10_000, settings)
    assert isinstance(lease, Lease)
    with lease:
        held = acquire("GPU-a", "again", settings)
        assert str(held).isprintable() and len(str(held)) < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", PLANTED)
def test_nothing_planted_in_place_of_a_lock_makes_anybody_wait(
    settings: Settings, what: str
) -> None:
    _plant(settings.lease_folder / "GPU-a.lock", what)
    try:
        lease = acquire("GPU-a", "mine", settings)
    except SetupError as error:
        assert "Cannot lease GPU GPU-a" in str(error)
    else:
        assert isinstance(lease, Lease)
        assert isinstance(acquire("GPU-a", "again", settings), LeaseHeld)
        lease.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_what_another_user_plants_in_place_of_a_lock_costs_that_gpu_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="muster-planted-") as place:
        folder = Path(place)
        folder.chmod(0o1777)
        (folder / "GPU-00.lock").touch(0o600)
        (folder / "GPU-11.lock").mkdir()
        pid = os.fork()
        if pid == 0:
            is_good = False
            try:
                os.setuid(4321)
                settings = Settings(lease_folder=folder, cpu_count=8)
                got, _ = _place_and_lease("auto", 3, settings)
                reasons = [skipped.reason for skipped in got.skipped]
                is_good = all("is root's and cannot be opened" in reason for reason in reasons)
                is_good &= [slot.label for slot in got.slots] == ["cuda:2"]
            finally:
                os._exit(not is_good)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_folder_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "leases"
    with pytest.raises(SetupError) as caught:
        acquire("GPU-a", "run", Settings(lease_folder=folder))
    assert str(caught.value) == (
        f"Cannot lease GPU GPU-a in {folder}: Not a directory. "
        "Without a lease two runs could take the same GPU.\n"
        "Hint: make the folder writable for everybody (chmod 1777), or name another with "
        "MUSTER_LEASE_DIR, the same for all users of this host."
    )


def test_cpu_slots_need_no_lease(settings: Settings) -> None:
    got, leases = _place_and_lease("cpu:8", 0, settings)
    assert (len(got.slots), leases) == (8, [])
    assert not settings.lease_folder.exists()


def test_two_runs_that_each_want_two_of_four_gpus_both_get_two(settings: Settings) -> None:
    first, first_leases = _place_and_lease("2", 4, settings)
    second, second_leases = _place_and_lease("2", 4, settings)
    assert [slot.label for slot in first.slots] == ["cuda:0", "cuda:1"]
    assert [slot.label for slot in second.slots] == ["cuda:2", "cuda:3"]
    assert [item.device for item in second.skipped] == ["cuda:0", "cuda:1"]
    _release(first_leases + second_leases)


def test_a_run_for_which_too_little_is_left_holds_nothing(settings: Settings) -> None:
    with _leased("GPU-11", settings):
        with pytest.raises(PlacementError, match=r"cuda:1: leased by run test of "):
            _place_and_lease("2", 2, settings, gpus_per_task=2)
        # Given back on purpose, not by the garbage collector, which would leave the note.
        assert [json.loads(one.read_text())["device"] for one in _notes(settings, "claim")] == [
            "GPU-11"
        ]
        with _leased("GPU-00", settings):
            pass


def test_leases_that_the_caller_keeps_pass_from_one_start_to_the_next(settings: Settings) -> None:
    kept = {uuid: _leased(uuid, settings) for uuid in ("GPU-00", "GPU-22")}
    with _leased("GPU-11", settings):
        with pytest.raises(PlacementError):
            _place_and_lease("2", 2, settings, gpus_per_task=2, kept=kept)
        assert isinstance(acquire("GPU-00", "other", settings), LeaseHeld), "still the caller's"
    _, leases = _place_and_lease("2", 3, settings, kept=kept)
    assert [lease.uuid for lease in leases] == ["GPU-00", "GPU-11"]
    assert leases[0] is kept["GPU-00"]
    with _leased("GPU-22", settings):  # not needed, so others may have it
        _release(leases)


def test_all_leased_is_an_error_unless_the_cpu_will_do(settings: Settings) -> None:
    with _leased("GPU-00", settings):
        with pytest.raises(PlacementError, match="no GPU is free"):
            _place_and_lease("1", 1, settings)
        got, leases = _place_and_lease("auto", 1, settings)
        assert ({slot.kind for slot in got.slots}, leases) == ({"cpu"}, [])


def test_force_uses_a_leased_gpu_without_a_lease(settings: Settings) -> None:
    with _leased("GPU-00", settings):
        got, leases = _place_and_lease("2", 2, settings, force=True)
        assert [slot.label for slot in got.slots] == ["cuda:0", "cuda:1"]
        assert [lease.uuid for lease in leases] == ["GPU-11"]
        _release(leases)


def test_a_task_uses_the_gpus_that_its_sweep_has_leased(settings: Settings) -> None:
    with _leased("GPU-00", settings):
        got, leases = _place_and_lease("auto", 1, replace(settings, is_task=True))
        assert ([slot.label for slot in got.slots], leases) == (["cuda:0"], [])


def test_an_error_in_the_middle_leaves_nothing_leased(settings: Settings) -> None:
    # A folder in the place of the second lock file: the first GPU is leased by then.
    (settings.lease_folder / "GPU-11.lock").mkdir(parents=True)
    with pytest.raises(SetupError):
        _place_and_lease("2", 2, settings)
    assert _notes(settings, "claim") == []
    with _leased("GPU-00", replace(settings, user="eve")):
        pass


def _leased(uuid: str, settings: Settings) -> Lease:
    lease = acquire(uuid, "test", settings)
    assert isinstance(lease, Lease), str(lease)
    return lease


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


def _notes(settings: Settings, kind: str) -> list[Path]:
    return sorted(settings.lease_folder.glob(f"*.{kind}"))


def _files(settings: Settings) -> list[Path]:
    return sorted(settings.lease_folder.iterdir())


def _place_and_lease(
    devices: str,
    count: int,
    settings: Settings,
    *,
    gpus_per_task: int = 1,
    force: bool = False,
    kept: Mapping[str, Lease] | None = None,
) -> tuple[Placement, list[Lease]]:
    return place_and_lease(
        parse_devices(devices),
        host(count),
        per_gpu=1,
        gpus_per_task=gpus_per_task,
        force=force,
        run_name="sweep",
        settings=settings,
        kept=kept or {},
    )


# ---------------------------------------------------------------------- a folder that is cleaned


def used_for_a_while(lease: Lease) -> list[str]:
    """What a run is told when it says the next time that it uses its GPU."""
    lease._touched_s -= 3600
    told = lease.touch()
    return [told] if told else []


@pytest.mark.parametrize("what", ["the lock", "everything", "the folder"])
def test_a_lease_outlives_what_clears_old_files_away(settings: Settings, what: str) -> None:
    """systemd-tmpfiles and others remove files of /tmp that nobody has changed for days."""
    folder = settings.lease_folder
    lease = acquire("GPU-a", "night-sweep", settings)
    assert isinstance(lease, Lease)
    with lease:
        [lock] = folder.glob("*.lock")
        os.utime(lock, (1.0, 1.0))
        assert used_for_a_while(lease) == []
        assert time.time() - lock.stat().st_mtime < 600, "it looks as old as on the first day"
        for path in [lock] if what == "the lock" else list(folder.iterdir()):
            path.unlink()
        if what == "the folder":
            folder.rmdir()
        assert used_for_a_while(lease) == []
        answer = acquire("GPU-a", "other", settings)
        assert isinstance(answer, LeaseHeld) and "night-sweep" in str(answer)
    again = acquire("GPU-a", "other", settings)
    assert isinstance(again, Lease)
    again.release()


def test_a_lease_that_another_run_has_now_is_said_to_be_lost(settings: Settings) -> None:
    lease = acquire("GPU-a", "night-sweep", settings)
    assert isinstance(lease, Lease)
    [lock] = settings.lease_folder.glob("*.lock")
    lock.unlink()
    with holder(settings.lease_folder, "GPU-a"):
        [told] = used_for_a_while(lease)
        assert "another run may use GPU GPU-a too" in told and str(lock) in told
        assert used_for_a_while(lease) == [], "once"
    assert used_for_a_while(lease) == [] == used_for_a_while(lease)
    assert isinstance(acquire("GPU-a", "other", settings), LeaseHeld), "it is ours again"
    lease.release()
