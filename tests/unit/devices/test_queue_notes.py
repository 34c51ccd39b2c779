"""What runs say of themselves in the lease folder, and what other users of it can do to that."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.processes import at_work
from tests.unit.api.test_lending import facts

from muster.base.errors import SetupError
from muster.base.settings import Settings, child_environment, read_settings
from muster.devices.leases import held_by
from muster.devices.queue import Reservation, Rules, Terms
from muster.devices.queue_rules import read_rules
from muster.devices.tickets import (
    Note,
    Use,
    add_up,
    as_ticket,
    own_uid,
    read_notes,
    use_of,
)

SOURCE = Path(__file__).parents[3] / "src"
TICKET = {"pid": 1, "run": "r", "since_s": 1.0, "devices": ["GPU-a"], "least": 1, "most": 1}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can own files as others")

#: Writes a note, says so, and waits; with "fork" a child of it lives on.
WRITER = """
import json, os, sys, time
from pathlib import Path
from muster.devices.tickets import Note
note = Note(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
child = os.fork() if sys.argv[4] == "fork" else -1
if child == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


#: Puts another text into a note, where no file may be longer than 64 bytes.
ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from muster.devices.tickets import Note
note = Note(Path(sys.argv[1]), "claim", {"run": "r"})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
try:
    note.put({"run": "r" * 99})
except OSError:
    print(note.path.read_text(), end="")
"""


@contextmanager
def written(folder: Path, kind: str, record: object = TICKET, how: str = "alone") -> Iterator[int]:
    with at_work(WRITER, str(folder), kind, json.dumps(record), how) as (pid, _):
        yield pid


def alive(folder: Path) -> list[str]:
    return [note.kind for note in read_notes(folder) if note.is_alive]


def until_dead(folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while alive(folder):
        assert time.monotonic() < deadline_s, "a killed process is taken for a living one"
        time.sleep(0.01)


def test_a_full_disk_leaves_a_note_as_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == '{"run": "r"}\n'
    assert [path.suffix for path in tmp_path.iterdir()] == [".claim"]


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_ticket_of_a_killed_process_vanishes_even_if_a_child_lives_on(
    tmp_path: Path, how: str
) -> None:
    with written(tmp_path, "ticket", how=how) as pid:
        [note] = read_notes(tmp_path)
        assert (note.uid, note.run, note.is_alive) == (own_uid(), "r", True)
        os.kill(pid, signal.SIGKILL)
        until_dead(tmp_path)
        assert read_notes(tmp_path) == []


def test_nobody_else_can_keep_the_ticket_of_a_killed_process_alive(tmp_path: Path) -> None:
    """Another user may read it, and so may lock it in every way that reading allows."""
    with written(tmp_path, "ticket") as pid:
        [path] = tmp_path.glob("*.ticket")
        assert path.stat().st_mode & 0o777 == 0o644
        locker = (
            "import fcntl, os, sys, time\n"
            "handle = os.open(sys.argv[1], os.O_RDONLY)\n"
            "fcntl.flock(handle, fcntl.LOCK_EX)\n"
            "print(flush=True)\n"
            "while True:\n"
            "    try: fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB); break\n"
            "    except OSError: time.sleep(0.01)\n"
            "print(flush=True); time.sleep(60)\n"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", locker, str(path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert alive(tmp_path) == ["ticket"]
            os.kill(pid, signal.SIGKILL)
            other.stdout.readline()
            assert alive(tmp_path) == []
        finally:
            other.kill()
            other.communicate()


def test_a_process_that_looks_keeps_its_own_ticket_locked(tmp_path: Path) -> None:
    """To open a file and close it gives up every record lock that the process has on it."""
    note = Note(tmp_path, "ticket", TICKET)
    for _ in range(3):
        assert alive(tmp_path) == ["ticket"]
        note.put({**TICKET, "not_now": ["GPU-a"]})
        note.touch()
    code = (
        "import sys; from pathlib import Path; from muster.devices.tickets import read_notes\n"
        "print([(n.is_alive, n.record['not_now']) for n in read_notes(Path(sys.argv[1]))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
        env=child_environment({"PYTHONPATH": str(SOURCE)}),
    )  # fmt: skip
    assert found.stdout.strip() == "[(True, ['GPU-a'])]"
    note.remove()
    note.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_second_name_of_a_file_makes_nothing_count_twice(tmp_path: Path) -> None:
    add_up(tmp_path, 1e9, Use(100.0, 1.0))
    [used] = tmp_path.glob("*.used")
    assert len(read_notes(tmp_path)) == 1
    os.link(used, tmp_path / "0-0-0.used")
    assert read_notes(tmp_path) == []


@needs_root
def test_whose_a_note_is_says_its_owner_and_not_its_text(tmp_path: Path) -> None:
    path = tmp_path / "1-1-1.used"
    path.write_text(json.dumps({"uid": 0, "user": "root", "gpu_s": 10.0, "at_s": time.time()}))
    os.chown(path, 4321, 4321)
    [note] = read_notes(tmp_path)
    assert note.uid == 4321
    add_up(tmp_path, 1e9, Use(1.0, 1.0))  # what is another's is neither added up nor removed
    assert sorted(round(use_of(n, time.time(), 1e9).gpu_s) for n in read_notes(tmp_path)) == [1, 10]


def test_one_user_cannot_make_others_read_any_number_of_files(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:04}-1-1.used").write_text('{"gpu_s": 1}')
        (tmp_path / f"{number:04}-1-1.ticket").write_text(json.dumps(TICKET))
    own = Note(tmp_path, "ticket", TICKET)
    kinds = [note.kind for note in read_notes(tmp_path)]
    assert (kinds.count("used"), kinds.count("ticket")) == (256, 1), "who waits sees itself"
    own.remove()


#: Counts what it opens and lists while it runs a command line of muster's.
COUNTS = """
import json, sys
counts = {"open": 0, "os.scandir": 0, "os.listdir": 0}
folder = sys.argv[1]
def hear(event, args):
    if event in counts and str(args[0] or "").startswith(folder):
        counts[event] += 1
from muster.cli.main import main
sys.addaudithook(hear)
code = main(sys.argv[2:])
print(json.dumps([code, counts]), file=sys.stderr)
"""


@needs_root
@pytest.mark.parametrize("command", ["queue", "devices"])
def test_whoever_looks_lists_the_folder_a_fixed_number_of_times(
    command: str, tmp_path: Path
) -> None:
    """However many GPUs there are, and however many files another user has planted."""
    folder = tmp_path / "leases"
    folder.mkdir()
    for number in range(2000):
        path = folder / f"{number:04}-1-1.{('ticket', 'claim', 'used', 'part')[number % 4]}"
        path.write_text(json.dumps(TICKET))
        os.chown(path, 4321, 4321)
    (tmp_path / "facts.json").write_bytes(facts(8))
    names = {"MUSTER_LEASE_DIR": folder, "MUSTER_DEVICE_FACTS": tmp_path / "facts.json"}
    environment = {"PYTHONPATH": str(SOURCE), **{name: str(at) for name, at in names.items()}}
    done = subprocess.run(
        [sys.executable, "-c", COUNTS, str(folder), command], capture_output=True, text=True,
        env=child_environment(environment), check=False,
    )  # fmt: skip
    code, counts = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    assert counts["os.scandir"] + counts["os.listdir"] <= 2, counts
    assert counts["open"] <= 3 * 256, counts
    assert ("4321 has 2,000 files" in done.stderr) == (command == "queue")


@needs_root
@pytest.mark.thorough
def test_a_run_that_waits_beside_thirty_thousand_planted_files_spares_the_processor(
    tmp_path: Path,
) -> None:
    """Looking gets slower for everybody, so everybody looks less often."""
    folder = tmp_path / "leases"
    folder.mkdir()
    for number in range(30_000):
        os.close(os.open(folder / f"{number:06}-1-1.ticket", os.O_CREAT | os.O_WRONLY))
        os.chown(folder / f"{number:06}-1-1.ticket", 4321, 4321)
    (tmp_path / "facts.json").write_bytes(facts(1))
    waits = (
        "import sys, time; from pathlib import Path\n"
        "from muster.base.errors import PlacementError\n"
        "from muster.base.settings import Settings\n"
        "from muster.devices.inventory import parse_devices\n"
        "from muster.devices.leases import acquire\n"
        "from muster.devices.waiting import Wait, lease_in_turn\n"
        "place = Path(sys.argv[1])\n"
        "settings = Settings(device_facts=place / 'facts.json', lease_folder=place / 'leases')\n"
        "lease = acquire('GPU-0', 'r', settings)\n"
        "begun = time.process_time(), time.monotonic()\n"
        "try: lease_in_turn(parse_devices('1'), settings, run_name='r', wait=Wait(most_s=20))\n"
        "except PlacementError: pass\n"
        "print((time.process_time() - begun[0]) / (time.monotonic() - begun[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", waits, str(tmp_path)], capture_output=True, text=True, check=True,
        env=child_environment({"PYTHONPATH": str(SOURCE)}),
    )  # fmt: skip
    assert float(done.stdout) < 0.15, "a part of one processor; it was most of one"


@pytest.mark.parametrize(
    "change",
    [
        {"least": 0}, {"least": -1}, {"least": 2}, {"most": 0}, {"group": 0}, {"group": 2},
        {"devices": []}, {"devices": "GPU-a"}, {"devices": [1, None]}, {"least": 10**400},
        {"least": 1e300},
    ],
)  # fmt: skip
def test_a_ticket_that_makes_no_sense_is_none(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "1-1-1.claim").write_text(json.dumps({**TICKET, **change}))
    [note] = read_notes(tmp_path)
    # A number that is none is as if it were left out, so that it asks for one GPU.
    found = as_ticket(note, time.time())
    assert found is None or found.least == found.most == 1


def test_a_ticket_with_hostile_values_harms_nobody(tmp_path: Path) -> None:
    record = {
        **TICKET, "run": "\x1b[2J\n\u202ex", "pid": "x", "since_s": 1e300, "most": 1e18,
        "priority": -1e18, "not_now": [1, "GPU-b"], "group": True,
    }  # fmt: skip
    (tmp_path / "1-1-1.claim").write_text(json.dumps(record))
    [note] = read_notes(tmp_path)
    found = as_ticket(note, 100.0)
    assert found is not None
    assert (found.since_s, found.group, found.not_now) == (100.0, 1, {"GPU-b"})
    assert note.run.isprintable() and note.pid is None


def test_a_lease_from_no_year_that_there_is_can_be_shown(tmp_path: Path) -> None:
    note = Note(tmp_path, "claim", {"device": "GPU-a", "pid": 1, "since_s": 1e13})
    held = held_by("GPU-a", Settings(lease_folder=tmp_path))
    assert held is not None and held.since is None
    note.remove()


def test_what_was_used_is_added_up_and_what_a_killed_run_had_used_too(tmp_path: Path) -> None:
    now = time.time()
    begun = {"device": "GPU-a", "pid": 1, "run": "r", "since_s": now - 500}
    with written(tmp_path, "claim", begun) as pid:
        [claim] = tmp_path.glob("*.claim")
        os.utime(claim, (now - 100, now - 100))
        os.kill(pid, signal.SIGKILL)
        until_dead(tmp_path)
    add_up(tmp_path, 1e12, Use(50.0, 1.0))
    add_up(tmp_path, 1e12)
    [used] = read_notes(tmp_path)
    assert used.kind == "used"
    assert use_of(used, now, 1e12).gpu_s == pytest.approx(450.0, abs=1.0)
    assert use_of(used, now, 1e12).leases == pytest.approx(2.0, abs=0.01)
    assert [path.suffix for path in tmp_path.iterdir()] == [".used"]


def test_two_processes_that_add_up_at_once_count_nothing_twice(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from muster.devices.tickets import Use, add_up\n"
        "for _ in range(40): add_up(Path(sys.argv[1]), 1e12, Use(1.0, 1.0))"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=child_environment({"PYTHONPATH": str(SOURCE)}),
        )
        for _ in range(2)
    ]
    assert [one.wait(timeout=300) for one in both] == [0, 0]
    total = sum(use_of(note, time.time(), 1e12).gpu_s for note in read_notes(tmp_path))
    assert total == pytest.approx(80.0, abs=0.1)


@pytest.mark.parametrize("lie", [-1e9, math.inf, math.nan, 1.7e308, "x", None])
def test_no_negative_or_endless_use_is_believed(tmp_path: Path, lie: object) -> None:
    (tmp_path / "1-1-1.used").write_text(json.dumps({"gpu_s": lie, "at_s": 1e300, "leases": lie}))
    [note] = read_notes(tmp_path)
    assert use_of(note, time.time(), 1e6) == Use(0.0, 0.0)


def test_what_killed_processes_have_left_is_cleared_away_by_their_user(tmp_path: Path) -> None:
    for name in ("1-1-1.ticket", "1-1-2.part", "1-1-3.used.abc"):
        (tmp_path / name).write_text(json.dumps(TICKET))
        os.utime(tmp_path / name, (1.0, 1.0))
    (tmp_path / "GPU-a.lock").write_text("")
    note = Note(tmp_path, "ticket", TICKET)
    os.utime(note.path, (1.0, 1.0))
    add_up(tmp_path, 1e9)
    assert {path.name for path in tmp_path.iterdir()} == {"GPU-a.lock", note.path.name}
    note.remove()


def test_a_lock_of_the_writer_is_there_before_the_file_is(tmp_path: Path) -> None:
    """Whoever could lock it for reading first would make it look dead."""
    note = Note(tmp_path, "ticket", TICKET)
    handle = os.open(note.path, os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(handle)
    note.remove()


# ---------------------------------------------------------------------- the administrator's rules

RULES = """
half_life = "2d"
[default]
max_gpus = 2
[users.0]
share = 3
max_priority = 5
[users.4711]
max_gpus = 8
[users.nobody-of-this-name]
share = 9
[[reservation]]
users = [4711]
gpus = ["GPU-a"]
from = 2026-01-01T00:00:00Z
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "etc").mkdir(mode=0o755)
    (tmp_path / "etc" / "queue.toml").write_text(RULES)
    (tmp_path / "leases").mkdir()
    return read_settings(
        {
            "MUSTER_LEASE_DIR": str(tmp_path / "leases"),
            "MUSTER_QUEUE_RULES": str(tmp_path / "etc" / "queue.toml"),
        }
    )


@needs_root
def test_the_rules_are_read_from_a_file_of_roots(settings: Settings) -> None:
    found = read_rules(settings)
    assert (found.half_life_s, found.default) == (172_800.0, Terms(max_gpus=2))
    assert found.users == {
        0: Terms(share=3.0, max_gpus=2, max_priority=5),
        4711: Terms(max_gpus=8),
    }
    begin_s = 1_767_225_600.0
    assert found.reservations == (
        Reservation(uids=frozenset({4711}), devices=frozenset({"GPU-a"}), from_s=begin_s),
    )
    settings.queue_rules.unlink()
    assert read_rules(settings) == Rules()


@needs_root
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("another's", "it belongs to user 4321"),
        ("group", "others than root may write to it"),
        ("folder", "others than root may write to its folder"),
        ("folder of another's", "belongs to user 4321"),
        ("a folder", "cannot be read|is not a regular file"),
    ],
)
def test_rules_that_others_than_root_can_write_are_refused(
    settings: Settings, what: str, says: str
) -> None:
    path = settings.queue_rules
    match what:
        case "another's":
            os.chown(path, 4321, 0)
        case "group":
            path.chmod(0o664)
        case "folder":
            path.parent.chmod(0o777)
        case "folder of another's":
            os.chown(path.parent, 4321, 0)
        case "a folder":
            path.unlink()
            path.mkdir(0o755)
    with pytest.raises(SetupError, match=says):
        read_rules(settings)


@needs_root
@pytest.mark.parametrize(
    "text",
    [
        "[default", "quota = 3", "[default]\nshare = 0", "[default]\nmax_gpus = -1",
        '[default]\nmax_gpus = "x"', "[default]\nmax_gpus = true", "default = 3",
        '[[reservation]]\ngpus = ["GPU-a"]', '[[reservation]]\nusers = ["nobody-of-this-name"]',
        '[[reservation]]\nusers = [1]\nfrom = "x"',
        'half_life = "soon"', 'half_life = "0"', "users = 3", "\udcff",
    ],
)  # fmt: skip
def test_rules_that_cannot_be_understood_are_no_reason_to_go_on(
    settings: Settings, text: str
) -> None:
    settings.queue_rules.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SetupError, match="cannot be understood"):
        read_rules(settings)


def test_the_folder_that_all_share_is_the_same_whatever_tmpdir_says(tmp_path: Path) -> None:
    code = "from muster.base.settings import read_settings; print(read_settings().lease_folder)"
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "/tmp/muster-leases"


def test_nobody_leaves_the_rules_in_the_folder_that_all_share(tmp_path: Path) -> None:
    own = str(tmp_path / "own.toml")
    (tmp_path / "link").symlink_to("/tmp/muster-leases")
    for leases in (None, "/tmp/muster-leases", "/tmp/../tmp/muster-leases", str(tmp_path / "link")):
        env = {"MUSTER_QUEUE_RULES": own} | ({} if leases is None else {"MUSTER_LEASE_DIR": leases})
        assert read_settings(env).queue_rules == Path("/etc/muster/queue.toml"), leases


@needs_root
def test_nobody_leaves_the_rules_in_a_folder_that_another_has_made(settings: Settings) -> None:
    os.chown(settings.lease_folder, 4321, 4321)
    assert read_rules(settings) == read_rules(Settings())


def test_without_locks_a_ticket_lives_while_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows, where a killed process leaves its ticket behind."""
    path = tmp_path / "1-2-3.ticket"
    path.write_text(json.dumps(TICKET))
    monkeypatch.setattr("muster.devices.tickets.sys.platform", "win32")
    assert [note.path for note in read_notes(tmp_path)] == [path]
    left_s = time.time() - 60
    os.utime(path, (left_s, left_s))
    assert read_notes(tmp_path) == []
