"""Work that says in files how far it is, and goes on in a phase when it is let go."""

import os
import signal
import time
from pathlib import Path

HERE = Path(os.environ["PHASES"])


def reach(phase):
    (HERE / phase).touch()
    while not (HERE / f"go-{phase}").exists():
        time.sleep(0.02)


def tell_of_request():
    """Say in a file when this rank is asked to end: its launcher says so some time before."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}

    def tell(number, frame):
        before[number](number, frame)
        (HERE / "asked").touch()

    for one in before:
        signal.signal(one, tell)


def finish():
    """The last phase of a training, and not its rehearsal before the first step."""
    if (HERE / "middle").exists():
        reach("finishing")


def f(x: int):
    reach("middle")
    if x < 0 and not (HERE / "mended").exists():
        raise ValueError(x)
    return {"y": x}


def double(record):
    reach("middle")
    return {"y": 2 * record["x"]}


if __name__ == "__main__":
    reach("middle")
