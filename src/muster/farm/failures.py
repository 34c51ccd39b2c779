"""Naming failures: when two are the same one, and what a worker's death means. Pure."""

from __future__ import annotations

import hashlib
import re
import signal as signals

from muster.farm.events import WorkerDied
from muster.farm.lifecycle import REASONS
from muster.farm.model import Finished, Outcome

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
#: How the words that name an error end; ranks and loggers may put something in front of them.
_ERRORS = ("Error", "Exception", "Interrupt", "Exit")
_DEVICE_OOM = re.compile(
    r"\bOutOfMemoryError\b|CUDA out of memory|CUDA error: out of memory|HIP out of memory"
    r"|RESOURCE_EXHAUSTED: Out of memory"
)
_NUMBER = re.compile(r"\d+(\.\d+)?")


def fingerprint(finished: Finished) -> str:
    """Equal for failures with the same cause: the frames and the error's type, not its values.

    Addresses are dropped everywhere and numbers in the message, so ``loss is 0.31`` and
    ``loss is 0.29`` at the same line are one group.
    """
    frames = [line for line in finished.trace.splitlines() if line.startswith("  ")]
    message = _NUMBER.sub("#", _ADDRESS.sub("0x", finished.message))
    text = "\n".join([finished.outcome.value, *(_ADDRESS.sub("0x", f) for f in frames), message])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def ends_in_device_oom(output: str) -> bool:
    """Whether the last error that a program printed is that its device has no memory left."""
    errors = [
        line
        for line in output.splitlines()
        if _DEVICE_OOM.search(line)
        or any(word.rstrip(":").endswith(_ERRORS) for word in line.split(maxsplit=5)[:5])
    ]
    return bool(errors) and _DEVICE_OOM.search(errors[-1]) is not None


def signal_name(number: int) -> str:
    """``SIGSEGV (11)``; unknown numbers stay numbers."""
    try:
        return f"{signals.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def death_as_finished(event: WorkerDied, killing: Outcome | None, seconds: float) -> Finished:
    """The attempt that was running when its worker died; the caller fills in whose it was."""
    if killing is not None:
        outcome = killing
    elif event.outcome is not None:
        outcome = event.outcome
    elif event.host_oom:
        outcome = Outcome.HOST_OOM
    else:
        outcome = Outcome.CRASH
    return Finished(
        task_id=0,
        token=0,
        outcome=outcome,
        started_s=0.0,
        seconds=seconds,
        log_start=event.log_start,
        log_end=event.log_end,
        peak_mib=None,
        message=event.reason if killing is None else f"it {REASONS[killing]}",
        trace=event.trace,
        signal=event.signal,
    )
