"""Runs on a host for as long as its connection lives; sent there as text.

It needs Python 3.8 and the standard library until it is to start something. It reads requests as
lines of JSON from stdin and answers each with a line. The end of stdin is the end: everything that
was started is killed and its folder removed, so nothing stays when whoever asked is killed, or
when the connection breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Iterator, NoReturn

_FOLDER = [""]  # removed at the end, and what is named behind it
_HOME, _NAME, _LOCK = "/tmp", "muster-hosts-", ".lock"  # sockets there have short names
_LISTENERS: list[socket.socket] = []  # kept open to the end
_CHILDREN: list[subprocess.Popen[bytes]] = []  # the one that was started
_LEASES: list[Any] = []  # held until what uses the GPUs is gone
_ENDING, _TOUCHING = threading.Lock(), threading.Lock()  # none given back is touched
_LOG_CHARS = 1 << 18  # of a program that did not come up
_TOUCH_EVERY_S = 20.0  # a lease counts by itself when it was touched last


def facts() -> dict[str, Any]:
    """What this host has. Versions are read from what is installed; nothing heavy is imported."""
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    gpus: list[dict[str, Any]] = []
    driver, problem = None, ""
    try:
        asked = "--query-gpu=index,name,memory.total,memory.used,driver_version,uuid"
        told = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30,
        )  # fmt: skip
        text = told.stdout.decode(errors="replace")
        if told.returncode:
            problem = " ".join(text.split())[:200]
        for line in [] if problem else text.splitlines():
            words = [word.strip() for word in line.split(",")]
            if len(words) == 6 and words[0].isdigit():
                total, used = (int(w) if w.isdigit() else None for w in words[2:4])
                gpus.append({"index": int(words[0]), "name": words[1], "memory_total_mib": total,
                             "memory_used_mib": used, "uuid": words[5],
                             "held": _held(words[5])})  # fmt: skip
                driver = words[4]
    except FileNotFoundError:
        pass
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)[:200]
    linux = hasattr(os, "sched_getaffinity")
    addresses = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "hostname": socket.gethostname(),
        "python": sys.executable,
        "python_version": ".".join(str(part) for part in sys.version_info[:3]),
        "muster": version("muster-gpu"),
        "torch": version("torch"),
        "ray": version("ray"),
        "gpus": gpus,
        "driver": driver,
        "gpu_problem": problem,
        "cpus": len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1,
        "memory_mib": _memory_mib(),
        "disk_free_mib": _free_mib(tempfile.gettempdir()),
        "temp_dir": tempfile.gettempdir(),
        "cache": _cache(),
        "system": sys.platform,
        # Client and server of the connection, as this end sees them; nothing on the machine itself.
        "peer": addresses[0] if len(addresses) == 4 else "",
        "address": addresses[2] if len(addresses) == 4 else "",
        "muster_code": muster_code(),
    }


def _cache() -> dict[str, Any]:
    """Where trainings and programs keep code (``far_program``), and whether they can."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    there = place = os.path.join(home, "muster")
    while not os.path.exists(there) and there != os.path.dirname(there):
        there = os.path.dirname(there)
    can = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return {"place": place, "lacks": "" if can else there, "free_mib": _free_mib(there)}


def _free_mib(place: str) -> int:
    return shutil.disk_usage(place).free >> 20


def muster_code() -> str:
    """What tells two checkouts of one version apart; "" without Muster."""
    spec = importlib.util.find_spec("muster")
    found = hashlib.sha256()
    for place in (spec.submodule_search_locations or []) if spec else []:
        for parent, _, names in sorted(os.walk(place)):
            for name in sorted(name for name in names if name.endswith(".py")):
                with open(os.path.join(parent, name), "rb") as file:
                    text = file.read()
                about = os.path.relpath(os.path.join(parent, name), place), len(text)
                found.update(repr(about).encode() + text)
    return found.hexdigest()[:16] if spec else ""


def _memory_mib() -> int | None:
    """What programs can still get of the memory."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) >> 10
    except (OSError, LookupError, ValueError):
        return None


def _held(uuid: str) -> str:
    """Which run of Muster has leased the GPU on this host; "" for none, or without Muster."""
    try:
        from muster.base.settings import read_settings
        from muster.devices.leases import held_by
    except ImportError:
        return ""
    return str(held_by(uuid, read_settings()) or "")


def lease(uuids: list[str], run: str) -> list[str]:
    """Lease the GPUs for as long as this process lives, as a run of this host does.

    Returns why some cannot be; then none is. None is either where what they are for does not start.
    """
    from muster.base.settings import read_settings
    from muster.devices.leases import Lease, acquire

    settings = read_settings()
    problems = []
    with _given_back():
        for uuid in uuids:
            found = acquire(uuid, run, settings)
            if isinstance(found, Lease):
                _LEASES.append(found)
            else:
                problems.append(str(found))
    if problems:
        _give_back()
    elif _LEASES:
        threading.Thread(target=_keep_leases, daemon=True).start()
    return problems


def _keep_leases() -> None:
    """What clears old files away is not to take the locks of a run that lasts for days."""
    while _LEASES:
        with _TOUCHING:
            for each in _LEASES:
                with contextlib.suppress(Exception):  # a full disk: it is tried again
                    told = each.touch()
                    sys.stderr.write(told and told + "\n")
        time.sleep(_TOUCH_EVERY_S)


@contextlib.contextmanager
def _given_back() -> Iterator[None]:
    """What is leased is given back where something fails."""
    try:
        yield
    except BaseException:
        _give_back()
        raise


def _give_back() -> None:
    with _TOUCHING:
        while _LEASES:
            with contextlib.suppress(Exception):
                _LEASES.pop().release()


def listen(address: str) -> int:
    """Take connections, and close them, at a free port of the address."""
    server = socket.create_server((address, 0))
    _LISTENERS.append(server)

    def take() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=take, daemon=True).start()
    return int(server.getsockname()[1])


def reach(places: list[tuple[str, int]]) -> list[str]:
    """Why each (address, port) cannot be connected to; "" for one that can."""
    found = []
    for address, port in places:
        try:
            socket.create_connection((address, port), timeout=3).close()
            found.append("")
        except OSError as error:
            found.append(error.strerror or str(error))
    return found


def swallow(count: int) -> None:
    """Read so many bytes, whatever they are."""
    while count > 0:
        data = sys.stdin.buffer.read(min(count, 1 << 16))
        if not data:
            return
        count -= len(data)


def start(argv: list[str], environment: dict[str, str], files: dict[str, str]) -> str:
    """Start a program; ``{folder}`` is a new folder, closed to others, which is returned."""
    if _FOLDER[0]:
        raise RuntimeError("something was started already")
    with _given_back():
        _FOLDER[0] = _make_folder()
        for name, text in files.items():
            write(name, text)
        _CHILDREN.append(_started(argv, environment))
    return _FOLDER[0]


def _started(argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    from muster.base.reaper import guarded

    def place(text: str) -> str:
        return text.replace("{folder}", _FOLDER[0])

    marked = guarded()
    if sys.platform == "linux":  # what loses its parent becomes a child of this process
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    with open(os.path.join(_FOLDER[0], "log"), "wb") as log:
        return subprocess.Popen(
            [place(word) for word in argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **marked, **{k: place(v) for k, v in environment.items()}},
            start_new_session=True, cwd=_FOLDER[0],
        )  # fmt: skip


def _make_folder() -> str:
    """A folder that is locked as long as this process lives. Those that are not any more go: they
    are of far ends that were killed.
    """
    # It gets its name once it is locked, or another start might take it for such a one.
    hidden = tempfile.mkdtemp(prefix="." + _NAME, dir=_HOME)
    _lock(os.path.join(hidden, _LOCK), os.O_CREAT)
    folder = os.path.join(_HOME, os.path.basename(hidden)[1:])
    os.rename(hidden, folder)
    for name in os.listdir(_HOME):
        left = os.path.join(_HOME, name)
        with contextlib.suppress(OSError):  # no such lock, held, or not ours
            if name.startswith(_NAME) and os.lstat(left).st_uid == os.getuid():
                number = _lock(os.path.join(left, _LOCK))
                shutil.rmtree(left, ignore_errors=True)
                os.close(number)
    return folder


def _lock(path: str, flags: int = 0) -> int:
    """Raises OSError where another process holds it."""
    number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            raise
    return number


def write(name: str, text: str) -> None:
    """A file for the program, whole as soon as it is there."""
    path = os.path.join(_FOLDER[0], name)
    with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.rename(f"{path}.new", path)


def wait(until: str, limit_s: float) -> dict[str, Any]:
    """Wait until the program has printed ``until``, and return what follows it in that line; where
    it does not come to that, its log, and the code with which it has ended, if it has.

    With the program this process ends from then on. What has not come so far is killed.
    """
    (child,) = _CHILDREN
    deadline = time.monotonic() + limit_s
    while True:
        code = child.poll()
        with open(os.path.join(_FOLDER[0], "log"), "rb") as said:
            text = said.read().decode(errors="replace")
        _, found, rest = text.partition(until)
        if found and "\n" in rest and code is None:
            threading.Thread(target=follow, args=(child,), daemon=True).start()
            return {"said": rest.partition("\n")[0].strip()}
        if code is not None or time.monotonic() > deadline:
            with contextlib.suppress(Exception):
                _kill_all()
            _give_back()  # nobody uses them any more
            return {"log": text[-_LOG_CHARS:], "code": code}
        # Nothing is asked before this is answered: what can be read is the end.
        if select.select([0], [], [], 0.02)[0] and not os.read(0, 1):
            end(3)


def follow(child: subprocess.Popen[bytes]) -> None:
    """End with the program, so that whoever is connected knows."""
    child.wait()
    end(3)


def end(code: int) -> NoReturn:
    """Kill what was started, remove its folder, and be gone. ``code``: not 1 or 2, with which a
    Python ends that never began."""
    _ENDING.acquire()
    if _FOLDER[0]:
        with contextlib.suppress(Exception):
            _kill_all()
        shutil.rmtree(_FOLDER[0], ignore_errors=True)
    for path in _FOLDER[1:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    _give_back()
    os._exit(code)


def _kill_all() -> None:
    import psutil  # a dependency of Muster's, and only what needs Muster is started here

    me, deadline = psutil.Process(), time.monotonic() + 20
    while time.monotonic() < deadline:
        children = me.children(recursive=True)
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(children, timeout=1)


def main() -> None:
    """Answer until stdin ends."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=end, args=(3,)).start())
    calls: dict[str, Callable[..., Any]] = {
        "echo": lambda: None, "facts": facts, "lease": lease, "listen": listen, "reach": reach,
        "start": start, "time": time.time, "swallow": swallow, "wait": wait, "write": write,
    }  # fmt: skip

    def use(module: str) -> None:
        """Learn the calls of a module of Muster's, which is installed here."""
        calls.update(importlib.import_module(module).calls(_FOLDER))

    calls["use"] = use
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            end(0)
        name, arguments = json.loads(line)
        data = b""
        try:
            found = calls[name](*arguments)
            if isinstance(found, bytes):  # it follows the line
                data, found = found, len(found)
            answer = {"is": found}
        except Exception as error:
            kind = "" if hasattr(error, "exit_code") else "%s: " % type(error).__name__  # noqa: UP031
            answer = {"problem": "%s%s" % (kind, error)}  # noqa: UP031
        try:
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + data)
            sys.stdout.buffer.flush()
        except OSError:  # nobody reads any more
            end(3)


if __name__ == "__main__":
    main()
