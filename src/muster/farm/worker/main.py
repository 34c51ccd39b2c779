"""A worker: ``python -m muster.farm.worker.main SOCKET PARENT_PID [PIPE MEMORY [MODULE]]``.

It lives as long as its coordinator and runs tasks in its main thread, one at a time. Its
standard output and error already go to the slot's log when it starts; where it is begun ahead, with
a module to import meanwhile, they do so once it is told which slot it has.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from muster.base.codec import decode
from muster.base.device_faults import why_unfit
from muster.base.errors import MusterError
from muster.base.processes import IS_LINUX, set_subreaper
from muster.base.reaper import die_with_parent, end_group_with
from muster.base.target import see_working_folder
from muster.farm import canonical, wire
from muster.farm.held_results import Held, share
from muster.farm.task import Finished, Order, TargetSpec
from muster.farm.wire import clean
from muster.farm.worker.inbox import Inbox, InboxLine
from muster.farm.worker.perform import Performer, describe
from muster.run.folder import RunFolder

_LEAVE_S = 3.0
#: Of the garbage collector: so many new objects that it never runs by itself.
_NEVER = 2**31 - 1


def main(argv: list[str]) -> int:
    die_with_parent(int(argv[1]))
    if len(argv) > 2:
        end_group_with(int(argv[2]))
        os.close(int(argv[2]))
    # A segmentation fault leaves the Python stack in the log, from where it is reported.
    faulthandler.enable()
    # A coordinator from before an update gives no memory, and reads only what it knows.
    memory, ahead = argv[3:4], argv[4:]
    held = Held(share(int(memory[0]))) if memory not in ([], ["-"]) else None
    inbox = Inbox(_connect(argv[0]), held)
    inbox.start()
    # What is imported stays: the collector would spend a tenth of the time on it. A target may turn
    # it off or set its threshold on import, and that stays so.
    threshold = gc.get_threshold()[0]
    gc.set_threshold(_NEVER)
    for name in ahead:
        importlib.import_module(name)
    see_working_folder()
    # So far all is ours, and the collector need not look at it again, at the end of the process
    # neither, when that is two thirds of its work. What is the user's is not frozen: what an import
    # leaves behind in a cycle may hold memory, of a GPU too, and goes with the first collection.
    gc.freeze()
    setup = canonical.decode(inbox.take_setup())
    if ahead:
        _print_to(setup["log"])
    if setup["is_piloted"]:
        _leave_signals_to_the_pilot()
    try:
        targets = {int(i): decode(TargetSpec, spec) for i, spec in setup["targets"].items()}
        folder, log, spare = RunFolder(Path(setup["folder"])), Path(setup["log"]), None
        if IS_LINUX and all(spec.kind == "command" for spec in targets.values()):
            # What a command has left is a child of this process, which knows by it whether the
            # command's folders may be used again; a function's children are its own affair.
            set_subreaper(True)
            if set_subreaper(True):  # it holds: a sandbox may refuse it
                spare = folder.spare_of(log.stem)
                with suppress(OSError):  # then the folders are made as those of functions are
                    spare.parent.mkdir(exist_ok=True)
        performer = Performer(
            targets,
            folder,
            setup["device"],
            log=log,
            line=InboxLine(inbox),
            spare=spare,
        )
    except MusterError as error:
        inbox.send(wire.pack([wire.BROKEN, clean(str(error))[:8000]]))
        return _leave()
    except BaseException as error:  # the user's module may raise anything at import
        message = f"Loading the target failed: {clean(describe(error))[:8000]}"
        trace = traceback.format_exc().encode("utf-8", "replace")
        inbox.send(wire.pack([wire.BROKEN, message], trace))
        return _leave()
    if gc.get_threshold()[0] == _NEVER:
        gc.set_threshold(threshold)
    if setup["device"] != "cpu" and (unfit := why_unfit()):
        inbox.send(wire.pack([wire.UNFIT, clean(unfit)]))
        return _leave()
    performer.generators.watch_imports()
    inbox.send(wire.pack([wire.READY]))
    _serve(inbox, performer, wire.pack_finished if held is None else wire.pack_plain)
    inbox.flush()
    return _leave()


def _serve(inbox: Inbox, performer: Performer, pack_finished: Callable[[Finished], bytes]) -> None:
    while (entry := inbox.take()) is not None:
        if isinstance(entry, Order):
            finished = performer.run(entry)
            inbox.send_result(pack_finished(finished))  # the next task may end this process
            if finished.poisoned:
                return  # the coordinator starts a fresh process on this device
        else:
            all_finished = performer.run_together(entry)
            inbox.send(b"".join(map(pack_finished, all_finished)))
            if any(finished.poisoned for finished in all_finished):
                return


def _leave() -> int:
    """End with an exit code at once: no thread of the user's and no broken device may delay it."""
    faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
    return 0


def _print_to(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)


def _leave_signals_to_the_pilot() -> None:
    """Ignore SLURM's warning, which may reach all processes of a job: the pilot passes it on.

    These are handlers, because programs that a task starts would inherit "ignore".
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)


def _connect(text: str) -> socket.socket:
    """POSIX: the number of an inherited descriptor. Windows: a shared socket on standard input."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read(int(text)))
    descriptor = int(text)
    os.set_inheritable(descriptor, False)  # what tasks start has no business with it
    return socket.socket(fileno=descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
