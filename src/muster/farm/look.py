"""``python -m muster.farm.look TARGET``: import a target and print what it takes, as JSON.

Run in a process of its own, so that the coordinator stays free of what the target imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from muster.base.errors import MusterError, TargetError
from muster.base.target import TargetRef, load
from muster.farm.parameters import Signature, signature_of
from muster.farm.static_look import static_signature

_LIMIT_S = 300.0


def look(ref: TargetRef) -> Signature:
    """What the target takes: from its source where that tells, else by importing it elsewhere."""
    signature = static_signature(ref)
    if signature is not None:
        return signature
    with tempfile.TemporaryDirectory(prefix="muster-look-") as folder:
        # A file and not standard output, which belongs to what the module prints on import.
        answer_file = Path(folder) / "answer.json"
        argv = [sys.executable, "-m", "muster.farm.look", str(answer_file), ref.kind, str(ref)]
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise TargetError(f"Importing {ref} took longer than {_LIMIT_S:.0f} s.") from None
        if not answer_file.exists():
            raise TargetError(f"Importing {ref} ended its process with code {done.returncode}.")
        answer = json.loads(answer_file.read_bytes())
    if "error" in answer:
        raise TargetError(answer["error"])
    return Signature.from_record(answer)


def main(argv: list[str]) -> int:
    location, _, attribute = argv[2].rpartition(":")
    ref = TargetRef("file" if argv[1] == "file" else "module", location, attribute)
    try:
        record = signature_of(load(ref)).to_record()
    except MusterError as error:
        record = {"error": str(error)}
    Path(argv[0]).write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
