"""Runs on a host for as long as its connection lives; sent there as text.

It needs Python 3.8 and the standard library until it is to start something. It reads requests as
lines of JSON from stdin and answers each with a line. The end of stdin is the end: everything that
was started is killed and its folder removed, so nothing stays when whoever asked is killed, or
when the connection breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, NoReturn

_FOLDER = [""]
_LISTENERS: list[socket.socket] = []  # kept open to the end
_ENDING = threading.Lock()


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
        asked = "--query-gpu=index,name,memory.total,memory.used,driver_version"
        told = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30,
        )  # fmt: skip
        text = told.stdout.decode(errors="replace")
        if told.returncode:
            problem = " ".join(text.split())[:200]
        for line in [] if problem else text.splitlines():
            words = [word.strip() for word in line.split(",")]
            if len(words) == 5 and words[0].isdigit():
                total, used = (int(w) if w.isdigit() else None for w in words[2:4])
                gpus.append({"index": int(words[0]), "name": words[1], "memory_total_mib": total,
                             "memory_used_mib": used})  # fmt: skip
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
        "disk_free_mib": shutil.disk_usage(tempfile.gettempdir()).free >> 20,
        "temp_dir": tempfile.gettempdir(),
        "time_s": time.time(),
        "system": sys.platform,
        # Client and server of the connection, as this end sees them; nothing on the machine itself.
        "peer": addresses[0] if len(addresses) == 4 else "",
        "address": addresses[2] if len(addresses) == 4 else "",
    }


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


def start(
    argv: list[str], environment: dict[str, str], files: dict[str, str], until: str, limit_s: float
) -> dict[str, Any]:
    """Start a program, and wait until it has printed ``until``. ``{folder}``: a new, closed one."""
    if _FOLDER[0]:
        raise RuntimeError("something was started already")
    _FOLDER[0] = tempfile.mkdtemp(prefix="muster-hosts-", dir="/tmp")  # sockets have short names
    for name, text in files.items():
        path = os.path.join(_FOLDER[0], name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def place(text: str) -> str:
        return text.replace("{folder}", _FOLDER[0])

    if sys.platform == "linux":  # what loses its parent becomes a child of this process
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    log_path = os.path.join(_FOLDER[0], "log")
    with open(log_path, "wb") as log:
        child = subprocess.Popen(
            [place(word) for word in argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, **{k: place(v) for k, v in environment.items()}},
            start_new_session=True, cwd=_FOLDER[0],
        )  # fmt: skip
    deadline = time.monotonic() + limit_s
    while True:
        code = child.poll()
        with open(log_path, "rb") as said:
            text = said.read().decode(errors="replace")
        if until in text and code is None:
            threading.Thread(target=follow, args=(child,), daemon=True).start()
            return {"folder": _FOLDER[0]}
        if code is not None or time.monotonic() > deadline:
            return {"error": " ".join(text.split())[-600:] or "it says nothing", "code": code}
        time.sleep(0.05)


def follow(child: subprocess.Popen[bytes]) -> None:
    """End with the program, so that whoever is connected knows."""
    child.wait()
    end(1)


def end(code: int) -> NoReturn:
    """Kill what was started, remove its folder, and be gone."""
    _ENDING.acquire()
    with contextlib.suppress(Exception):
        if _FOLDER[0]:
            _kill_all()
            shutil.rmtree(_FOLDER[0], ignore_errors=True)
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
        signal.signal(number, lambda *_: threading.Thread(target=end, args=(1,)).start())
    calls: dict[str, Callable[..., Any]] = {
        "echo": lambda: None,
        "facts": facts,
        "listen": listen,
        "reach": reach,
        "swallow": swallow,
    }
    calls["start"] = start
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            end(0)
        name, arguments = json.loads(line)
        try:
            answer = {"is": calls[name](*arguments)}
        except Exception as error:
            answer = {"problem": "%s: %s" % (type(error).__name__, error)}  # noqa: UP031
        try:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        except OSError:  # nobody reads any more
            end(1)


if __name__ == "__main__":
    main()
