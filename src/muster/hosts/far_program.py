"""What a far end does for a program that runs there, with files that come and go.

It is imported on the host by the far end (``use``), so that host needs the same Muster. All of a
start lies in one folder, which goes with the connection: ``run`` is a run folder, ``code/0`` the
working folder. Only code stays, by the hash of its contents, for the next start.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from typing import Any

from muster.base.held_port import held_port
from muster.base.processes import send_signal, set_subreaper
from muster.base.reaper import guarded
from muster.base.settings import child_environment
from muster.hosts.code import is_below
from muster.hosts.kept_code import KeptCode, closed

if sys.platform != "win32":
    import fcntl

#: What a far end that was killed has left goes after so many seconds.
_LEFT_S = 86_400.0
_LOCK = ".lock"
_BLOCK = 1 << 20
#: A longer line of a program is left out.
_LINE_BYTES = 8 << 20
#: A lock is touched so often: its age tells of the start's where others cannot see the lock itself.
_TOUCH_S = 60.0
#: Of a checkpoint all files belong together.
_STEP = "step-"


def calls(folder: list[str]) -> dict[str, Callable[..., Any]]:
    """The far end's further calls. ``folder``: what it removes at its end, after all that runs."""
    place = _Place(folder)
    return {
        "make": place.make, "has_code": place.has_code, "take_code": place.take_code,
        "put": place.put, "begin": place.begin, "look": place.look, "signal": place.signal,
        "changed": place.changed, "get": place.get, "held_port": held_port,
    }  # fmt: skip


class _Place:
    def __init__(self, folder: list[str]) -> None:
        self._removed_at_end = folder
        self._known: dict[str, tuple[int, int, int]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_s = 0.0
        self._touched_s = time.monotonic()

    def make(self, name: str) -> str:
        """The folder of this start."""
        self._code = KeptCode()
        gangs = closed(self._code.cache / "gangs")
        self.path = gangs / f"{name}-{secrets.token_hex(6)}"
        self.path.mkdir(mode=0o700)
        self._lock = _locked(self.path / _LOCK)
        self._removed_at_end[0] = str(self.path)
        (self.path / "run").mkdir()
        (self.path / "code" / "0").mkdir(parents=True)
        for left in gangs.iterdir():
            with suppress(OSError):
                _remove_left(left)
        return str(self.path)

    def has_code(self, digest: str) -> bool:
        """Have the working folder filled with this code, if all of it is here."""
        return self._code.lay_out(digest, self.path / "code")

    def take_code(self, digest: str, size: int) -> None:
        """Keep the code, as a tar file of so many bytes behind the request."""
        packed = self._code.folder / f".{digest}-{secrets.token_hex(4)}.tar"
        try:
            _receive(packed, size)
            with packed.open("rb") as file:
                if not file_digest(file, "sha256").hexdigest().startswith(digest):
                    raise ValueError("the code has not arrived as it was sent")
                file.seek(0)
                self._code.take(digest, file)
        finally:
            packed.unlink(missing_ok=True)

    def put(self, place: str, position: int, size: int) -> None:
        """Write so many bytes behind the request into a file below the folder."""
        try:
            path = self._path(place)
        except ValueError:
            _receive(None, size)
            raise
        _receive(path, size, position)

    def begin(self, argv: list[str], environment: dict[str, str], silence_s: float) -> int:
        """Start the program in its working folder; what it prints is for ``look``.

        All of it ends when nothing was asked for ``silence_s`` seconds: a link may break, and a
        machine stop, without a word of it.
        """
        self._asked_s = time.monotonic()
        threading.Thread(target=self._end_in_silence, args=(silence_s,), daemon=True).start()
        self._known = dict(self._listed())  # what was sent is no news
        set_subreaper(True)  # what loses its parent is found, and killed, at the end
        with (self.path / "out").open("wb") as out, (self.path / "err").open("wb") as err:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                cwd=self.path / "code" / "0", env=child_environment({**guarded(), **environment}),
            )  # fmt: skip
        return self._process.pid

    def look(self, position: int, wait_s: float) -> dict[str, Any]:
        """What the program has printed from ``position`` on, once it has printed or ended, or after
        ``wait_s`` seconds. ``code``: None while it runs; then ``err`` is what it complained of."""
        assert self._process is not None
        self._asked_s = time.monotonic()
        if self._asked_s - self._touched_s > _TOUCH_S:
            self._touched_s = self._asked_s
            with suppress(OSError):
                os.utime(self.path / _LOCK)
        deadline = self._asked_s + wait_s
        while True:
            code = self._process.poll()
            data, size = _lines_at(self.path / "out", position)
            if size or code is not None or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        found = {"text": data.decode(errors="replace"), "size": size, "code": code, "err": ""}
        if code is not None:
            found["err"] = (self.path / "err").read_bytes()[-2000:].decode(errors="replace")
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the program, which passes on to its ranks what is meant for them."""
        if self._process is not None and self._process.poll() is None:
            send_signal(self._process.pid, number)

    def changed(self) -> dict[str, Any]:
        """``files``: place and size of each that is new or other than at the last call; of a
        checkpoint of which one is, all are named. ``gone``: those that were there then. ``steps``:
        the checkpoints that there are."""
        now = dict(self._listed())
        news = {place for place, sign in now.items() if self._known.get(place) != sign}
        steps = {str(Path(place).parent) for place in news if _is_of_step(place)}
        gone = sorted(self._known.keys() - now.keys())
        self._known = now
        files = [
            (place, size)
            for place, (size, _, _) in now.items()
            if place in news or (_is_of_step(place) and str(Path(place).parent) in steps)
        ]
        names = sorted({Path(place).parts[2] for place in now if _is_of_step(place)})
        return {"files": files, "gone": gone, "steps": names}

    def get(self, place: str, position: int, size: int) -> bytes:
        """At most so many bytes of a file; fewer where it is shorter, or gone."""
        self._asked_s = time.monotonic()
        with suppress(FileNotFoundError), self._path(place).open("rb") as file:
            file.seek(position)
            return file.read(size)
        return b""

    def _end_in_silence(self, silence_s: float) -> None:
        while time.monotonic() - self._asked_s < silence_s:
            time.sleep(min(1.0, silence_s))
        send_signal(os.getpid(), signal.SIGTERM)

    def _path(self, place: str) -> Path:
        parts = Path(place).parts
        is_known = parts == ("part.json",) or parts[:1] in (("run",), ("code",))
        if not (is_known and is_below(place)):
            raise ValueError(f"{place!r} is not below the folder of a start")
        return self.path.joinpath(*parts)

    def _listed(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for root in ("run", "code"):
            for parent, folders, names in os.walk(self.path / root):
                folders[:] = [n for n in folders if not n.startswith(".") and n != "__pycache__"]
                for name in names:
                    path = Path(parent) / name
                    if name.startswith(".") and not Path(parent).name.startswith(_STEP):
                        continue  # what is being written, and gets its name when it is whole
                    with suppress(OSError):
                        about = path.lstat()
                        if not path.is_symlink() and path.is_file():
                            place = path.relative_to(self.path).as_posix()
                            yield place, (about.st_size, about.st_mtime_ns, about.st_ino)


def _lines_at(path: Path, position: int) -> tuple[bytes, int]:
    """The whole lines from there on, about ``_BLOCK`` of them, and how far they go. An empty line
    stands for one that is too long."""
    with path.open("rb") as file:
        file.seek(position)
        data = file.read(_BLOCK)
        whole = data.rfind(b"\n") + 1
        if whole or len(data) < _BLOCK:
            return data[:whole], whole
        data += file.readline(_LINE_BYTES - len(data))
        if data.endswith(b"\n"):
            return data, len(data)
        size = len(data)
        while more := file.readline(_BLOCK):
            size += len(more)
            if more.endswith(b"\n"):
                return b"\n", size
    return b"", 0


def _locked(path: Path) -> int:
    """Held as long as this process lives. Raises BlockingIOError where another one holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks: nobody will get one, nor remove anything
        pass
    return descriptor


def _remove_left(folder: Path) -> None:
    """The folder of a start whose far end was killed."""
    lock = folder / _LOCK
    if time.time() - lock.stat().st_mtime < _LEFT_S:
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_of_step(place: str) -> bool:
    parts = Path(place).parts
    return len(parts) == 4 and parts[1] == "checkpoints" and parts[2].startswith(_STEP)


def _receive(path: Path | None, size: int, position: int = 0) -> None:
    """All of it is read, also where it is not to be written, or cannot be: a request follows it."""
    file, problem = None, None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("r+b" if position else "wb")
            file.seek(position)
    except OSError as error:
        problem = error
    while size > 0 and (data := sys.stdin.buffer.read(min(size, _BLOCK))):
        size -= len(data)
        try:
            if file is not None and problem is None:
                file.write(data)
        except OSError as error:
            problem = error
    try:
        if file is not None:
            file.close()
    except OSError as error:
        problem = problem or error
    if problem is not None:
        raise problem
