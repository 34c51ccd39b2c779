import asyncio
import os
import time
from dataclasses import dataclass

from muster import Reject


def note(text):
    handle = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{text}\n".encode())
    os.close(handle)


def square(record):
    return {**record, "y": record["x"] ** 2}


def fussy(record):
    note(f"seen {record['x']} {os.getpid()}")
    if record["x"] % 100 == 7:
        raise ValueError(f"cannot do {record['x']}")
    if record["x"] % 100 == 8:
        raise Reject("eight")
    return {"x": record["x"]}


def all_fail(record):
    raise ValueError("always")


def some(record):
    """Drops odd numbers, doubles those below ten."""
    if record["x"] % 2:
        return None
    return [record, {**record, "again": True}] if record["x"] < 10 else record


def deadly(record):
    note(f"seen {record['x']} {os.getpid()}")
    if record["x"] in (13, 14, 57):
        os.kill(os.getpid(), 11)
    return record


def hanging(record):
    note(f"seen {record['x']} {os.getpid()}")
    if record["x"] == 21:
        time.sleep(600)
    return record


def unhurried(record):
    note(f"seen {record['x']} {os.getpid()}")
    time.sleep(0.01)
    return {"x": record["x"], "y": record["x"] ** 2}


def shared(record):
    """As `unhurried`, and slowly for as long as no other worker is there."""
    note(f"seen {record['x']} {os.getpid()}")
    with open(os.environ["NOTES"]) as notes:
        pids = {line.split()[2] for line in notes if line.startswith("seen")}
    time.sleep(0.01 if len(pids) > 1 else 0.1)
    return {"x": record["x"], "y": record["x"] ** 2}


@dataclass
class Scale:
    """Multiplies."""

    factor: int = 10
    """By this."""

    def setup(self, device):
        note(f"setup {device} {os.getpid()}")

    def process(self, batch):
        note(f"batch {len(batch)}")
        return [{"x": r["x"], "y": r["x"] * self.factor} for r in batch]


tries = {}


def flaky(record):
    tries[record["x"]] = tries.get(record["x"], 0) + 1
    if record["x"] % 10 == 0 and tries[record["x"]] < 3:
        raise OSError("busy")
    return record


class Hungry:
    """Holds at most eight records."""

    batch_size = 64

    def process(self, batch):
        note(f"batch {len(batch)}")
        if len(batch) > 8 or any(r["x"] == 500 for r in batch):
            raise MemoryError("CUDA out of memory (not really)")
        return batch


class Leaking:
    """Never lets go of anything."""

    kept = []

    def process(self, batch):
        note(f"pid {os.getpid()}")
        self.kept.append(bytearray(os.urandom(1 << 20) * 8))
        return batch


class Closing:
    def process(self, batch):
        return batch

    def close(self):
        note(f"closed {os.getpid()}")


class Stuck:
    concurrency = 4

    async def process_one(self, record):
        note(f"seen {record['x']} {os.getpid()}")
        await asyncio.sleep(600 if record["x"] == 11 else 0.01)
        return record


class Waiting:
    concurrency = 20

    async def process_one(self, record):
        note(f"seen {record['x']} {os.getpid()}")
        await asyncio.sleep(0.02 + record["x"] % 7 * 0.005)
        if record["x"] % 50 == 3:
            raise Reject("three")
        return {"x": record["x"], "y": record["x"] ** 2}


STEPS = [square, Scale, some]


def later(record):
    note(f"later {record['x']} {os.getpid()}")
    time.sleep(0.01)
    return {**record, "z": record["y"] + 1}


SLOWLY = [unhurried, later]
