"""A connection to a host: one ``ssh`` process, and the far end that it has started there."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import time
from importlib import resources
from types import TracebackType
from typing import Any

from muster.base.errors import SetupError, UsageError
from muster.base.settings import child_environment, variable
from muster.base.shown_text import clean_text
from muster.hosts.names import Host

#: What a user may replace it with: another program, a configuration of its own (ssh -F FILE).
SSH = "MUSTER_SSH"
_CONNECT_S = 10
_OPTIONS = (
    "-4", "-T", "-x", "-a", "-e", "none",  # Ray and the tried links are IPv4
    "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4",
    "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no", "-o", "RemoteCommand=none",
    # A connection that others share would end with the first of them, or stay behind.
    "-o", "ControlMaster=no", "-o", "ControlPath=none",
)  # fmt: skip
_HELLO = b"muster-far-end"
#: The first that has Muster, else the first that there is: it says at least what is missing.
_FIND_PYTHON = """\
for each in {candidates}; do
  command -v "$each" >/dev/null 2>&1 || continue
  first="${{first:-$each}}"
  "$each" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("muster") is None)' \
</dev/null 2>/dev/null && {{ first="$each"; break; }}
done
[ -n "$first" ] || {{ echo "there is no python3" >&2; exit 127; }}
exec "$first" -uc '{program}'
"""


class Connection:
    """Open from construction to ``close``, which ends whatever the far end has started.

    Raises SetupError, with what ssh said, for a host that cannot be reached.
    """

    def __init__(self, host: Host, python: str | None = None) -> None:
        self.host = host
        self._heard = b""
        code = resources.files("muster.hosts").joinpath("far_end.py").read_bytes()
        words = ("sh", "-c", _script(None if host.is_local else python, len(code)))
        argv = list(words) if host.is_local else ssh_command(host, shlex.join(words))
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the driver, which takes all down in order
                env=child_environment({}),
            )  # fmt: skip
        except OSError as error:
            raise SetupError(
                f"{argv[0]} cannot be started: {error.strerror}.",
                hint=f"install an SSH client, or say in {SSH} which one to use.",
            ) from None
        try:
            self._send(code)
            self._wait_for_hello()
            self.facts: dict[str, Any] = self.ask("facts", limit_s=60.0)
        except BaseException:
            self.close()
            raise

    def ask(self, name: str, *arguments: Any, after: bytes = b"", limit_s: float = 30.0) -> Any:
        """The far end's answer. ``after``: bytes behind the request.

        Raises SetupError where it fails there, or none comes within ``limit_s`` seconds.
        """
        self._send(json.dumps([name, arguments]).encode() + b"\n" + after)
        answer = json.loads(self._line(limit_s))
        if "problem" in answer:
            raise SetupError(f"{self.host.name}: {clean_text(answer['problem'])}")
        return answer["is"]

    @property
    def is_open(self) -> bool:
        """Whether the far end, and with it what it has started, is there as far as is known."""
        return self._process.poll() is None

    def close(self, limit_s: float = 30.0) -> None:
        """End the far end and wait until it has cleared up; an ssh that hangs is killed."""
        process = self._process
        try:
            if process.stdin:
                process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None

    def _wait_for_hello(self) -> None:
        """Past what a login script of the host may print."""
        deadline = time.monotonic() + 3 * _CONNECT_S
        while self._line(max(0.0, deadline - time.monotonic())) != _HELLO:
            pass

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        number, deadline = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([number], [], [], left)[0]:
                raise SetupError(
                    f"{self.host.name} does not answer within {limit_s:g} s.",
                    hint="see whether the machine is overloaded, or the link broken.",
                )
            piece = os.read(number, 1 << 16)
            if not piece:
                raise self._lost()
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _lost(self) -> SetupError:
        """What ssh says of a connection that ended, with what to do."""
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
        said = self._process.stderr.read().decode(errors="replace") if self._process.stderr else ""
        text = clean_text(" ".join(said.split()))[-300:]
        return SetupError(
            f"Cannot reach {self.host.name}: {text or 'the connection has ended'}",
            hint=_remedy(self.host.name, text),
        )


def ssh_command(host: Host, remote: str) -> list[str]:
    """The ssh that runs a line on the host: it asks nobody anything and forwards nothing."""
    try:
        program = shlex.split(variable(SSH) or "ssh")
    except ValueError as error:
        raise UsageError(f"{SSH} cannot be read: {error}.") from None
    return [*program, *_OPTIONS, "--", host.name, f"exec {remote}"]


def _script(python: str | None, size: int) -> str:
    program = (
        'import sys; sys.stdout.buffer.write(b"muster-far-end\\n"); sys.stdout.flush(); '
        f'exec(compile(sys.stdin.buffer.read({size}), "far_end", "exec"))'
    )
    candidates = [python] if python else [sys.executable, "python3", "python"]
    return _FIND_PYTHON.format(candidates=shlex.join(candidates), program=program)


def _remedy(name: str, said: str) -> str:
    if "Host key verification failed" in said or "IDENTIFICATION HAS CHANGED" in said:
        return f"log in once by hand and compare the key: ssh {name}"
    if "Permission denied" in said:
        return f"nobody is asked for a password; let it in with a key: ssh-copy-id {name}"
    if "Could not resolve" in said:
        return "use the machine's full name, or give it one in ~/.ssh/config."
    if "no python3" in said:
        return "install Python 3.11 there with Muster, or say where it is: --hosts-python PATH."
    return f"see what this says: ssh -v {name} true"
