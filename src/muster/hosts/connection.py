"""A connection to a host: one ``ssh`` process, and the far end that it has started there."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from types import TracebackType
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.base.processes import allow_files
from muster.base.settings import child_environment, variable
from muster.base.shown_text import clean_text
from muster.hosts.far_start import HELLO, for_any_shell, start_words
from muster.hosts.names import Host

#: What a user may replace it with: another program, a configuration of its own (ssh -F FILE).
SSH = "MUSTER_SSH"
_CONNECT_S = 10
#: Between tries of a host that is lost.
BACK_OFF_S = (5.0, 10.0, 20.0, 40.0, 60.0)
#: What a far end that was hung up on has to clear up.
_HANG_UP_S = 10.0
#: An answer, which lists all files of a start at most: more is none, and is not to fill the memory.
_MOST_BYTES = 64 << 20
#: Of what ssh, a greeting and lines of --setup complain of, the end is kept.
_COMPLAINT_BYTES = 4096
#: What ssh has open beside the ports that it forwards, with what goes through them.
_FILES_BESIDE = 512
#: From here on what an sshd may open, 1,024 files where nobody has said more, may be too little.
_MANY_PORTS = 500
_OPTIONS = (
    "-4", "-T", "-x", "-a", "-e", "none",  # Ray and the tried links are IPv4
    "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4",
    "-o", "PermitLocalCommand=no", "-o", "RemoteCommand=none",
    # A connection that others share would end with the first of them, or stay behind.
    "-o", "ControlMaster=no", "-o", "ControlPath=none",
)  # fmt: skip
#: None of the user's configuration either; it would take those away that are asked for as well.
_NO_FORWARDS = ("-o", "ClearAllForwardings=yes")
#: Without one of them Ray's nodes would wait for each other in vain.
_SOME_FORWARDS = ("-o", "ExitOnForwardFailure=yes")
_FORWARDS = ("localforward ", "remoteforward ", "dynamicforward ")
_SILENT = "see whether the machine is overloaded, or the link broken."
_FOREIGN = "see what else prints there: a login script, a line of --setup, sitecustomize of Python."


class Circle:
    """Connections that one thread makes and uses, and another may end at any moment. One circle may
    lie within another, which ends it and is not ended by it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: list[Connection | Circle] = []
        self._is_over = False

    def add(self, member: Connection | Circle) -> None:
        with self._lock:
            self._members.append(member)
            if self._is_over:
                member.hang_up()

    def end(self) -> None:
        """Whoever waits for an answer gets a SetupError instead; so does who connects later."""
        with self._lock:
            self._is_over = True
            for one in self._members:
                one.hang_up()

    hang_up = end


@dataclass(frozen=True)
class Way:
    """How Python is found on a host: where it is, and lines of bash before that.

    ``circle``: what ends the connection early. ``forwards``: ports, as ssh is told of them.
    """

    python: str | None = None
    setup: Sequence[str] = ()
    circle: Circle = field(default_factory=Circle)
    forwards: Sequence[str] = ()


class Connection:
    """Open from construction to ``close``, which ends whatever the far end has started.

    ``facts``: where they are known already, they are not asked for again.
    Raises SetupError, with what ssh said, for a host that cannot be reached.
    """

    def __init__(
        self, host: Host, way: Way | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.host = host
        self._heard = bytearray()
        self._has_begun = False
        self._writing = threading.Lock()  # never held for long: whoever hangs up takes it too
        self._last_call: threading.Timer | None = None
        way = way or Way()
        if way.forwards and not host.is_local:
            _refuse_other_forwards(host)
        code = resources.files("muster.hosts").joinpath("far_end.py").read_bytes()
        python = sys.executable if host.is_local else way.python
        words = start_words(python, way.setup, len(code))
        argv = words if host.is_local else ssh_command(host, for_any_shell(words), way.forwards)
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the driver, which takes all down in order
                env=child_environment({}),
            )  # fmt: skip
        except OSError as error:
            raise SetupError(
                f"{argv[0]} cannot be started: {error.strerror}.",
                hint=f"install an SSH client, or say in {SSH} which one to use.",
            ) from None
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._num_ports = len(way.forwards) // 2
        if self._num_ports and not host.is_local:
            with suppress(OSError):  # it has ended already, and says why
                allow_files(self._num_ports + _FILES_BESIDE, self._process.pid)
        self._complaint = b""
        self._listener = threading.Thread(target=self._take_complaints, daemon=True)
        self._listener.start()
        try:
            way.circle.add(self)
            self._send(code, 3.0 * _CONNECT_S)
            self._wait_for_hello()
            self._has_begun = True
            self.facts: Mapping[str, Any] = facts or self.ask("facts", limit_s=60.0)
        except BaseException:
            if not self._has_begun:  # nothing was started, and what prints there may not look
                self._kill()
            self.close()
            raise

    def ask(self, name: str, *arguments: Any, after: bytes = b"", limit_s: float = 30.0) -> Any:
        """The far end's answer. ``after``: bytes behind the request.

        Raises SetupError where it fails there, or where nothing goes on for ``limit_s`` seconds.
        """
        self._send(json.dumps([name, arguments]).encode() + b"\n" + after, limit_s)
        line = self._line(limit_s)
        try:
            answer = json.loads(line)
            if "problem" not in answer:
                return answer["is"]
            problem = str(answer["problem"])
        except (ValueError, LookupError, TypeError, RecursionError):
            said = clean_text(line[:100].decode(errors="replace"))
            raise SetupError(
                f"{self.host.name} answers with what is no answer: {said}", hint=_FOREIGN
            ) from None
        raise SetupError(f"{self.host.name}: {clean_text(problem)}")

    def fetch(
        self, name: str, place: str, position: int, most: int, limit_s: float = 120.0
    ) -> bytes:
        """The far end's answer where it is bytes of a file, at most so many. Raises what ``ask``
        raises, and SetupError where it would send more: that is not to fill the memory here."""
        size, deadline = (
            self.ask(name, place, position, most, limit_s=limit_s), time.monotonic() + limit_s,
        )  # fmt: skip
        if type(size) is not int or not 0 <= size <= most:
            raise SetupError(f"{self.host.name} sends {size!r:.50} bytes of a file, not {most}.")
        while len(self._heard) < size:
            self._hear(deadline, limit_s)
        data = bytes(self._heard[:size])
        del self._heard[:size]
        return data

    @property
    def is_open(self) -> bool:
        """Whether the far end, and with it what it has started, is there as far as is known."""
        return self._process.poll() is None

    def hang_up(self) -> None:
        """Tell the far end to end, from any thread; ``close`` still has to be called. An ssh that
        has not ended a little later is killed."""
        self._shut()
        if not self._has_begun:  # an ssh that is still connecting does not look
            self._kill()
        elif self._last_call is None:
            self._last_call = threading.Timer(_HANG_UP_S, self._kill)
            self._last_call.daemon = True
            self._last_call.start()

    def close(self, limit_s: float = 30.0) -> None:
        """End the far end and wait until it has cleared up; an ssh that hangs is killed."""
        process = self._process
        self._shut()
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._kill()
            process.wait()
        if self._last_call is not None:
            self._last_call.cancel()
        if process.stdout:
            process.stdout.close()
        self._listener.join(1.0)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _kill(self) -> None:
        """With its ProxyCommand, which holds what is read from here."""
        if self._process.poll() is None:  # else the number may be another's by now
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _take_complaints(self) -> None:
        """Keep the end of what comes on its stderr: a pipe that is full would hold up ssh."""
        stream = self._process.stderr
        assert stream is not None
        with stream, suppress(OSError):
            while piece := os.read(stream.fileno(), 1 << 16):
                self._complaint = (self._complaint + piece)[-_COMPLAINT_BYTES:]

    def _shut(self) -> None:
        """The end of its stdin, which ends the far end."""
        with self._writing, suppress(OSError):
            self._stdin.close()

    def _send(self, data: bytes, limit_s: float) -> None:
        """All of it; SetupError where nothing is taken for so many seconds."""
        left, deadline = memoryview(data), time.monotonic() + limit_s
        while left:
            try:
                with self._writing:
                    count = self._stdin.write(left)  # None: there is no room
                    number = self._stdin.fileno()
            except (OSError, ValueError):  # ValueError: it has been hung up
                raise self._lost() from None
            if count:
                left, deadline = left[count:], time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                raise SetupError(
                    f"{self.host.name} has accepted no data for {limit_s:g} s.",
                    hint=_SILENT,
                )
            else:
                with suppress(OSError):  # closed meanwhile
                    select.select([], [number], [], 0.2)

    def _wait_for_hello(self) -> None:
        """Past what a login script of the host may print, also without an end of line."""
        limit_s = 3.0 * _CONNECT_S
        deadline = time.monotonic() + limit_s
        while self._line(limit_s, deadline) != HELLO:
            pass

    def _line(self, limit_s: float, deadline: float | None = None) -> bytes:
        deadline, seen = deadline or time.monotonic() + limit_s, 0
        while (end := self._heard.find(b"\n", seen)) < 0:
            seen = len(self._heard)
            if seen > _MOST_BYTES:
                raise SetupError(
                    f"{self.host.name} sends a line without an end: {_MOST_BYTES >> 20} MiB of it "
                    "have come.",
                    hint=_FOREIGN,
                )
            self._hear(deadline, limit_s)
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    def _hear(self, deadline: float, limit_s: float) -> None:
        assert self._process.stdout is not None
        number, left = self._process.stdout.fileno(), deadline - time.monotonic()
        if left <= 0 or not select.select([number], [], [], left)[0]:
            raise SetupError(
                f"{self.host.name} has not answered within {limit_s:g} s.",
                hint=_SILENT,
            )
        piece = os.read(number, 1 << 16)
        if not piece:
            raise self._lost()
        self._heard += piece

    def _lost(self) -> SetupError:
        """What ssh says of a connection that ended, with what to do."""
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._kill()
        self._listener.join(5.0)
        whole = clean_text(" ".join(self._complaint.decode(errors="replace").split()))
        return SetupError(
            f"Cannot reach {self.host.name}: {whole[-300:] or 'the connection has ended'}",
            hint=_remedy(self.host.name, whole, self._num_ports),
        )


def ssh_command(host: Host, remote: str, forwards: Sequence[str] = ()) -> list[str]:
    """The ssh that runs a line on the host: it asks nobody anything, and forwards nothing but the
    ports that it is told."""
    ports = (*_SOME_FORWARDS, *forwards) if forwards else _NO_FORWARDS
    return [*_program(), *_OPTIONS, *ports, "--", host.name, remote]


def _program() -> list[str]:
    try:
        return shlex.split(variable(SSH) or "ssh")
    except ValueError as error:
        raise UsageError(f"{SSH} cannot be read: {error}.") from None


def _refuse_other_forwards(host: Host) -> None:
    """Those of the user's own would be made a second time, which fails where they are in use."""
    argv = [*_program(), *_OPTIONS, "-G", "--", host.name]
    try:
        told = subprocess.run(argv, capture_output=True, text=True, timeout=_CONNECT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{shlex.join(argv)} cannot be run: {error}.") from None
    if told.returncode:
        why = clean_text(" ".join(told.stderr.split()))[-300:]
        raise SetupError(f"ssh does not say how it reaches {host.name}: {why}")
    if found := [line for line in told.stdout.splitlines() if line.startswith(_FORWARDS)]:
        raise SetupError(
            f"Your configuration of ssh forwards ports for {host.name} ({clean_text(found[0])}), "
            "and Ray's are not to be mixed with them.",
            hint=f"give {host.name} a second name in ~/.ssh/config without LocalForward, "
            "RemoteForward and DynamicForward, and use that.",
        )


def _remedy(name: str, said: str, num_ports: int) -> str:
    if "IDENTIFICATION HAS CHANGED" in said:
        return (
            "if that machine was set up anew, and is the one that you mean, forget its old key as "
            f"ssh says (ssh-keygen -R), and compare the new one: ssh {name}"
        )
    if "Host key verification failed" in said:
        return f"log in once by hand and compare the key: ssh {name}"
    if "Permission denied" in said:
        return f"nobody is asked for a password; let it in with a key: ssh-copy-id {name}"
    if "Could not resolve" in said:
        return "use the machine's full name, or give it one in ~/.ssh/config."
    if "--setup has failed" in said:
        return "correct the line; it is read by bash, as after a login."
    if "forwarding failed" in said or "local forwarding" in said:
        most = (
            f"\n{num_ports:,} ports were to be forwarded, and its sshd may open too few files for "
            "that (LimitNOFILE of its service): allow more, or use fewer hosts or workers."
        )
        return (
            f"if {name} is the same machine as this one or as another host of the run, name each "
            f"machine once, and this one localhost; else allow it in sshd_config on {name} "
            "(AllowTcpForwarding yes, AllowStreamLocalForwarding yes)."
        ) + most * (num_ports > _MANY_PORTS)
    if "no python3" in said or "Python is too old" in said:
        return "install Python 3.11 there with Muster, or say where it is: --hosts-python PATH."
    return f"see what this says: ssh -v {name} true"
