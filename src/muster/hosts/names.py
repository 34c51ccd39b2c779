"""Which hosts: ``a,b:0-3,me@c:cpu:4``, or a file with one on each line. Nothing is asked here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from muster.base.errors import UsageError

#: What ssh is handed as a host. No "-" in front, which it would take for an option, and nothing
#: that a shell or a ProxyCommand of the user's configuration (%h, %r) would read as more.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_GPUS = re.compile(r"\d{1,4}(?:-\d{1,4})?(?:\+\d{1,4}(?:-\d{1,4})?)*")
_CPU = re.compile(r"cpu(?::(\d{1,5}))?")
#: This machine, without SSH.
LOCAL = "localhost"


@dataclass(frozen=True)
class Host:
    """``gpus``: by their numbers there; None is all of them, and on a host without any one worker
    on its CPU. ``cpu_workers``: so many workers on the CPU instead.
    """

    name: str
    gpus: tuple[int, ...] | None = None
    cpu_workers: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, which is reached without SSH."""
        return self.name == LOCAL


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of ``a,b:0-3,c:0+2,d:cpu:4``, or of ``@FILE``: one on each line, # for comments.

    Raises UsageError for a name that ssh might read as an option, and for what is no list.
    """
    words = _of_file(text[1:]) if text.startswith("@") else text.split(",")
    hosts = [_host(word.strip()) for word in words if word.strip()]
    if not hosts:
        raise UsageError(f"--hosts {text} names no host.", hint="write --hosts a,b:0-3.")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"The host {name} is named twice.",
                hint=f"name it once, with all its GPUs: {name}:0-1+3.",
            )
    return tuple(hosts)


def _of_file(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"The list of hosts {path} cannot be read: {reason}.") from None
    return [line.partition("#")[0] for line in lines]


def _host(word: str) -> Host:
    name, colon, devices = word.partition(":")
    if not _NAME.fullmatch(name) or len(name) > 255:
        raise UsageError(
            f"{name!r} is not the name of a host: it may have letters, digits, dots, - and _, and "
            "USER@ before them, and does not begin with -.",
            hint="give a host that needs more (an IPv6 address, a port) a name in ~/.ssh/config.",
        )
    if not colon:
        return Host(name)
    cpu = _CPU.fullmatch(devices)
    if cpu:
        workers = int(cpu[1] or 1)
        if workers:
            return Host(name, cpu_workers=workers)
    elif _GPUS.fullmatch(devices):
        numbers = [number for part in devices.split("+") for number in _range(part)]
        if numbers and len(set(numbers)) == len(numbers):
            return Host(name, gpus=tuple(numbers))
    raise UsageError(
        f"{word}: {devices!r} does not name GPUs of the host.",
        hint=f"write {name}:0-3 or {name}:0+2 by their numbers there, or {name}:cpu:4 for workers "
        "on its CPU.",
    )


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
