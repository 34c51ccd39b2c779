"""What another user of the same machine does to the lease folder, as a process of that user.

One user waits for a GPU that a second one holds; a third attacks; then the GPU is given back. Each
attack has failed if the first user begins, at the place that he had, and whoever looks is shown the
truth about whose each file is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.unit.api.test_lending import facts

from muster.base.settings import child_environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

WAITS, ATTACKS = 4001, 4002

#: What the attacker does; ``folder`` is the lease folder, ``theirs`` the ticket of who waits.
#: ``refused(what)`` runs something that the kernel has to refuse.
ATTACK = {
    "takes away": """
for path in folder.iterdir():
    refused(path.unlink)
    refused(lambda: path.rename(folder / "mine"))
    refused(lambda: path.chmod(0o777))
    refused(lambda: os.utime(path, (1, 1)))
    if path.suffix != ".lock":  # those can be opened by everybody, and hold nothing
        refused(lambda: path.write_text("{}"))
refused(folder.rmdir)
refused(lambda: folder.chmod(0o700))
""",
    "a second name": """
refused(lambda: os.link(theirs, folder / f"000-{theirs.name}"))
""",
    "in another's name": """
record = json.loads(theirs.read_text()) | {"uid": 4001, "user": "4001", "owner": 4001}
keep.append(Note(folder, "ticket", record | {"devices": ["GPU-9"]}))
""",
    "links": """
for kind in ("ticket", "claim", "used", "part"):
    (folder / f"0-link.{kind}").symlink_to(theirs)
    (folder / f"0-loop.{kind}").symlink_to(f"0-loop.{kind}")
    (folder / f"0-zero.{kind}").symlink_to("/dev/zero")
""",
    "what is no file": """
for number, kind in enumerate(("ticket", "claim", "used", "part", "lock")):
    os.mkfifo(folder / f"0-fifo.{kind}")
    (folder / f"0-folder.{kind}").mkdir()
    keep.append(socket.socket(socket.AF_UNIX))
    keep[-1].bind(str(folder / f"0-socket.{kind}"))
""",
    "huge": """
for kind in ("ticket", "claim", "used"):
    with (folder / f"0-huge.{kind}").open("wb") as file:
        file.write(b'{"devices": ["GPU-0", ' + b'"x", ' * 1_000_000)
        file.truncate(1 << 40)
    (folder / f"0-deep.{kind}").write_text("[" * 8000)
""",
    "many": """
for number in range(1000):
    (folder / f"0-{number}.ticket").write_text("{}")
    (folder / f"0-{number}.claim").write_text('{"device": "GPU-0", "since_s": 1}')
""",
    "numbers": """
for number, value in enumerate((-1e308, 1e308, float("nan"), float("inf"), -1, 1e11, True, None,
                                "1", [1], {"a": 1}, 10**400)):
    record = dict.fromkeys(("since_s", "least", "most", "group", "priority", "pid", "gpu_s",
                            "leases", "at_s", "ends_s"), value) | {"devices": ["GPU-9"]}
    try:
        text = json.dumps(record)
    except ValueError:
        continue
    for kind in ("ticket", "claim", "used"):
        (folder / f"0-{number}.{kind}").write_text(text)
        os.utime(folder / f"0-{number}.{kind}", (4e9, 4e9) if number % 2 else (-4e9, -4e9))
""",
    "another time": """
for since_s in (0, 1, -1e10, 4e9):  # of GPUs that there are not, so that no place is taken
    keep.append(Note(folder, "ticket", {"pid": 1, "run": "r", "since_s": since_s, "least": 1,
                                        "most": 1, "devices": ["GPU-9"]}))
    os.utime(keep[-1].path, (4e9, 4e9))
""",
    "names": """
for name in ("\\x1b[2J\\x1b]0;owned\\x07", "\\n\\nmuster: error", "\\u202e", "a" * 200):
    keep.append(Note(folder, "ticket", {"pid": 1, "run": name, "since_s": 1, "least": 1, "most": 1,
                                        "devices": ["GPU-9", name]}))
    (folder / f"{name.replace('/', '')[:100]}.ticket").write_text("{}")
""",
    "locks": """
for path in folder.glob("*.ticket"):
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    refused(lambda: fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB))  # for reading alone
    keep.append(handle)
""",
    "changes": """
(place / "said").touch()
for number in itertools.count():  # all the time GPUs that there are not are taken and given back
    keep.append(Note(folder, "claim", {"device": f"GPU-{9 + number}", "since_s": time.time()}))
    if len(keep) > 240:
        keep.pop(0).remove()
""",
}

#: Forks a process for each of the three; only this one can read Muster, so it is imported before.
PROGRAM = """
import ctypes, fcntl, filelock, itertools, json, os, signal, socket, sys, time
from pathlib import Path
from muster.base.settings import Settings
from muster.devices.inventory import parse_devices
from muster.devices.discovery import discover
from muster.devices.leases import Lease, acquire
from muster.devices.queue import Rules
from muster.devices.tickets import Note, read_notes
from muster.devices.waiting import Wait, lease_in_turn, look

place, attack = Path(sys.argv[1]), sys.argv[2]
folder = place / "leases"
settings = Settings(device_facts=place / "facts.json", lease_folder=folder, cpu_count=2)

parent = os.getpid()

def as_user(uid, what):
    pid = os.fork()
    if pid:
        return pid
    code = 4
    try:
        os.setgroups([]); os.setgid(uid); os.setuid(uid)
        # It ends with this one: who waits for what is printed waits for all that may print.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        assert os.getppid() == parent
        what()
        code = 0
    except BaseException as error:
        print(uid, repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)

def until(found):
    end = time.monotonic() + 120
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value

def holds():
    lease = acquire("GPU-0", "first", settings)
    assert isinstance(lease, Lease)
    until((place / "give-back").exists)
    lease.release()

def waits():
    _, leases = lease_in_turn(parse_devices("1"), settings, run_name="mine", wait=Wait(most_s=100))
    assert [lease.uuid for lease in leases] == ["GPU-0"]
    leases[0].release()

def owner(path):
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # gone since it was read
        return None

def refused(what):
    try:
        what()
    except OSError:
        return
    raise AssertionError("it was not refused")

def attacks():
    keep = []
    exec(attack, {**globals(), "keep": keep, "theirs": theirs})
    (place / "said").touch()
    signal.pause()

holder = as_user(4003, holds)
until(lambda: list(folder.glob("*.claim")))
waiting = as_user(4001, waits)
[theirs] = until(lambda: list(folder.glob("*.ticket")))
(place / "said").touch(); (place / "said").chmod(0o666); (place / "said").unlink()
attacker = as_user(4002, attacks)
until(lambda: (place / "said").exists() or os.waitpid(attacker, os.WNOHANG)[0])
begun = time.process_time()
line = look(discover(settings), settings, Rules())
took_s = time.process_time() - begun
first = line.standings[0].ticket
said = {
    "first": [first.uid, first.name == theirs.name],
    "whose": {str(uid): sum(n.uid == uid and n.kind == "ticket" for n in read_notes(folder))
              for uid in (4001, 4002)},
    "wrong": [n.path.name for n in read_notes(folder) if owner(n.path) not in (None, n.uid)],
    "shown": [note.run for note in line.notes.values()], "took_s": took_s,
    "has_said": (place / "said").exists(),
}
(place / "give-back").touch()
said["codes"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (holder, waiting)]
try:
    os.kill(attacker, signal.SIGKILL)
except ProcessLookupError:
    pass
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=[pytest.mark.thorough] if w == "changes" else []) for w in ATTACK],
)
def test_another_user_stops_nobody_and_passes_for_nobody(what: str) -> None:
    # Not below tmp_path, into which other users cannot look.
    with tempfile.TemporaryDirectory(prefix="muster-attack-") as place:
        folder = Path(place)
        folder.chmod(0o1777)
        (folder / "facts.json").write_bytes(facts(1))
        (folder / "leases").mkdir()
        (folder / "leases").chmod(0o1777)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, place, ATTACK[what]], capture_output=True, text=True,
            timeout=300, env=child_environment({}), check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["has_said"], done.stderr
    assert said["codes"] == [0, 0], (done.stderr, said)
    assert said["first"] == [WAITS, True] or what in ("another time", "names"), said
    assert said["whose"][str(WAITS)] == 1 and said["wrong"] == []
    assert not any(sign in name for name in said["shown"] for sign in "\x1b\x07\n\u202e"), said
    assert said["took_s"] < 5, "a look reads what others have put there"
