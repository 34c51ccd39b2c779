"""The process of one tracker: ``python -m muster.api.trackers.process FOLDER RUN_ID NAME``.

Its standard input belongs to whoever started it: a line says that the run is over, and when the
other end is gone without a line, this process has nothing to do here any more.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from muster.api.trackers.feed import DONE, Held, Position, feed
from muster.api.trackers.sources import source_of
from muster.api.trackers.tracker import Place, make_tracker
from muster.run.folder import RunFolder

_LOOK_EVERY_S = 1.0
_NICE = 10


def main(argv: list[str]) -> int:
    folder, run_id, name = RunFolder(Path(argv[0])), argv[1], argv[2]
    is_over = threading.Event()
    threading.Thread(target=_listen, args=(is_over,), daemon=True).start()
    os.nice(_NICE)  # the work of the run comes first
    try:
        with Position(folder.tracker_position(name), run_id) as position:
            place = Place(folder.trackers, folder.tensorboard)
            source = source_of(folder, run_id)

            def wait(took_s: float) -> bool:  # a tenth of the time at most goes into looking
                return is_over.wait(max(_LOOK_EVERY_S, 10 * took_s))

            feed(source, make_tracker(name, place), position, wait)
    except Held as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return DONE


def _listen(is_over: threading.Event) -> None:
    if sys.stdin.readline():
        is_over.set()
        sys.stdin.read()
    # A library may hang, and one that has threads of its own would keep this process.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(70)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
