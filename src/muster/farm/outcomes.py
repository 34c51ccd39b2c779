"""What the end of an attempt means, by the error or the signal, and what it is called. A worker
imports it as well.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Collection

from muster.base.device_faults import looks_like_lost_device, looks_like_out_of_device_memory
from muster.farm.task import Outcome

#: A sentence for each outcome, used on screen and in the exported table.
REASONS: dict[Outcome, str] = {
    Outcome.OK: "finished",
    Outcome.EXCEPTION: "raised an exception",
    Outcome.BAD_RESULT: "gave something that cannot be recorded",
    Outcome.DEVICE_OOM: "ran out of GPU memory",
    Outcome.DEVICE_FAULT: "met a GPU that could not be used",
    Outcome.BROKEN_CONTEXT: "broke the GPU context of its process",
    Outcome.HOST_OOM: "was killed because the host ran out of memory",
    Outcome.MEMORY_LIMIT: "took more memory than --memory allows and was killed",
    Outcome.CRASH: "ended its process",
    Outcome.TIMEOUT: "took longer than --timeout and was killed",
    Outcome.PREEMPTED: "was preempted by the cluster",
    Outcome.JOB_TIMEOUT: "was cut short by the time limit of its worker's job",
    Outcome.LOST: "was interrupted with its worker's job or its run",
    Outcome.STOPPED: "was stopped early on purpose",
}
#: How the words that name an error end; ranks and loggers may put something in front of them.
_ERRORS = ("Error", "Exception", "Interrupt", "Exit")


def outcome_of_error(type_names: Collection[str], text: str, *, on_gpu: bool = True) -> Outcome:
    """What an error in a task means; ``on_gpu``: the task's slot is a GPU, which may be at fault.

    >>> outcome_of_error(["RuntimeError"], "No CUDA GPUs are available").value
    'device_fault'
    """
    if looks_like_out_of_device_memory(type_names, text):
        return Outcome.DEVICE_OOM
    if on_gpu and looks_like_lost_device(text):
        return Outcome.DEVICE_FAULT
    return Outcome.EXCEPTION


def outcome_of_output(output: str, *, on_gpu: bool = True) -> Outcome:
    """What the failure of a program means, judged by the last error that it printed."""
    for line in reversed(output.splitlines()):
        words = [word.rstrip(":") for word in line.split(maxsplit=5)[:5]]
        names = [word.rpartition(".")[2] for word in words if word.endswith(_ERRORS)]
        outcome = outcome_of_error(names, line, on_gpu=on_gpu)
        if names or outcome is not Outcome.EXCEPTION:
            return outcome
    return Outcome.EXCEPTION


def signal_name(number: int) -> str:
    """``SIGSEGV (11)``; unknown numbers stay numbers."""
    try:
        return f"{signals.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
