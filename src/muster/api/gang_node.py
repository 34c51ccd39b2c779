"""A host's part of a gang over SSH: ``python -m muster.api.gang_node PART``, below a far end.

It runs its ranks as a node that somebody has started by hand would, and prints what it hears as
lines of JSON, which the driver reads.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from muster.api.gangs.gang import run_gang
from muster.api.gangs.work import Entry, GangAudience, GangWork, Script
from muster.api.start.options import GangOptions
from muster.base.codec import as_read_back, decode, read_record
from muster.base.errors import EXIT_INTERRUPTED, MusterError
from muster.run.folder import RunFolder

_LOCK = threading.Lock()
#: Of one line, in characters; the log file of its rank has the rest.
_MOST = 1 << 16


def main(argv: list[str]) -> int:
    part = read_record(Path(argv[0]), "part of a gang", {"program": dict, "options": dict})
    program = part["program"]
    work = GangWork(
        folder=RunFolder(Path(part["folder"])),
        program=decode(Entry, program) if "target" in program else decode(Script, program),
        kind=part["kind"], code=part["code"], about=part["about"],
    )  # fmt: skip
    audience = GangAudience(
        hear=lambda rank, text: _tell("line", rank=rank, text=text),
        say=lambda text: _tell("say", text=text),
        warn=lambda text: _tell("warn", text=text),
    )
    try:
        ending = run_gang(work, decode(GangOptions, part["options"]), audience)
    except MusterError as error:
        _tell("error", text=str(error), exit_code=error.exit_code)
    except KeyboardInterrupt:
        _tell("error", text="it was asked to end before it had begun", exit_code=EXIT_INTERRUPTED)
    else:
        _tell("ending", **as_read_back(ending))
    return 0


def _tell(event: str, **values: Any) -> None:
    text = values.get("text", "")
    if len(text) > _MOST:
        values["text"] = f"{text[:_MOST]} … ({len(text) - _MOST} more characters are left out here)"
    with _LOCK:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
