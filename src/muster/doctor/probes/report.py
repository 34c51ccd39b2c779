"""How a probe starts and speaks: results on standard output, progress on standard error.

    python -m muster.doctor.probes.report NAME ARGUMENT...

A probe is a function that gets the arguments and `Tell`, which takes the result: one JSON object.
Told several times, the last one counts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from muster.base.codec import plain
from muster.base.reaper import die_with_parent

Tell = Callable[[dict[str, Any]], None]
#: Probe → its module, imported in the child alone.
_PROBES = {
    "driver": "host",
    "disk": "host",
    "torch_facts": "host",
    "network": "host",
    "extensions": "host",
    "matmul": "speed",
    "copies": "speed",
    "all_reduce": "all_reduce",
}


def main(words: list[str]) -> int:
    results = begin()

    def tell(value: dict[str, Any]) -> None:
        os.write(results, (json.dumps(plain(value)) + "\n").encode())

    name, *arguments = words
    module = importlib.import_module(f"muster.doctor.probes.{_PROBES[name]}")
    getattr(module, name)(arguments, tell)
    return 0


def begin() -> int:
    """Prepare a probe, first of all: it ends with the doctor, and no library spoils its output.

    NCCL, for one, writes to standard output when NCCL_DEBUG is set. Returns a descriptor of what
    was standard output before.
    """
    die_with_parent(os.getppid())
    results = os.dup(1)
    os.dup2(2, 1)
    return results


def progress(what: str) -> None:
    sys.stderr.write(f"at: {what}\n")
    sys.stderr.flush()


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error, which is what a table can show."""
    text = str(error).strip().splitlines()
    return (f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)[:limit]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
