"""Ends what is left of a run when its coordinator or launcher is killed with -9.

``main([FD, MARK])`` in a process of its own: it waits for the pipe FD to close, which happens when
that process ends however it ends, then kills every process that carries MARK. Workers and ranks
also ask the kernel to die with their parent; the warden is for what *they* have started.
"""

from __future__ import annotations

import os
import signal

from muster.base.processes import end_marked


def main(argv: list[str]) -> int:
    descriptor, mark = int(argv[0]), argv[1]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    orderly = False
    while True:
        data = os.read(descriptor, 16)
        if not data:
            break
        orderly = True  # one byte says: everything was ended, go without looking
    if orderly:
        return 0
    return 1 if end_marked(mark, limit_s=10.0) else 0
