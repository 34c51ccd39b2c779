"""``dies_at.py NUMBER muster-arguments``: as ``muster``, killed at the NUMBERth time that it ships
the ledger home: after the commit on the local disk, before any byte of it is in the run folder.

A negative number: killed right after that, when the bytes are there and nobody has acted on them.
"""

from __future__ import annotations

import os
import signal
import sys

from muster.cli.main import main

number = int(sys.argv[1])
seen = 0


def die() -> None:
    global number
    number = 0  # the kill is an event as well
    os.kill(os.getpid(), signal.SIGKILL)


def hook(event: str, arguments: tuple[object, ...]) -> None:
    global seen
    if event == "open" and str(arguments[0]).endswith("ledger.segment"):
        # The file is opened for every shipment; also by those who only read it.
        flags = arguments[2]
        if isinstance(flags, int) and flags & os.O_APPEND:
            seen += 1
            if seen == number:
                die()
    elif number < 0 and seen == -number:
        die()


sys.addaudithook(hook)
sys.exit(main(sys.argv[2:]))
