"""``python -m muster.farm.look TARGET``: import a target and print what it takes, as JSON.

Run in a process of its own, so that the coordinator stays free of what the target imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from muster.base.errors import MusterError, TargetError
from muster.farm.parameters import Signature, signature_of
from muster.farm.target import TargetRef, load, static_signature

_LIMIT_S = 300.0


def look(ref: TargetRef) -> Signature:
    """What the target takes: from its source where that tells, else by importing it elsewhere."""
    signature = static_signature(ref)
    if signature is not None:
        return signature
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-m", "muster.farm.look", str(write_end), ref.kind, str(ref)]
    child = subprocess.Popen(argv, pass_fds=(write_end,), stdin=subprocess.DEVNULL)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answers:
        data = answers.read()
    try:
        child.wait(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if not data:
        raise TargetError(f"Importing {ref} ended its process with code {child.returncode}.")
    answer = json.loads(data)
    if "error" in answer:
        raise TargetError(answer["error"])
    return Signature.from_record(answer)


def main(argv: list[str]) -> int:
    location, _, attribute = argv[2].rpartition(":")
    kind = "file" if argv[1] == "file" else "module"
    try:
        record = signature_of(load(TargetRef(kind, location, attribute))).to_record()  # type: ignore[arg-type]
    except MusterError as error:
        record = {"error": str(error)}
    with os.fdopen(int(argv[0]), "w") as answers:
        json.dump(record, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
