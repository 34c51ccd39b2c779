"""All benchmarks, one after the other, and one table of their goals: held or missed.

python benchmarks/all.py                          # several hours, of a machine that rests otherwise
python benchmarks/all.py --only metrics startup
python benchmarks/all.py --quick                  # about 15 minutes; no figure means anything

``--to benchmarks/results`` is where docs/generate_measurements.py takes its figures from. One that
fails is named at the end, and the others are run nevertheless.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import table

FOLDER = Path(__file__).parent
#: Libraries; what made a fixture; and this.
_OTHERS = {"measuring", "dashboard_peers", "record_digits_grid", "all"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in _OTHERS)
#: These need a cluster, or another commit to compare with.
_ASKED_FOR = {"cluster_overhead", "house_overhead"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--to", type=Path, help="keep the records of all in this folder")
    given = parser.parse_args()
    names = given.only or [name for name in NAMES if name not in _ASKED_FOR]
    with tempfile.TemporaryDirectory() as place:
        folder = (given.to or Path(place)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        failed = [name for name in names if not is_run(name, folder, is_quick=given.quick)]
        records = {name: json.loads((folder / f"{name}.json").read_text())
                   for name in names if name not in failed}  # fmt: skip
        goals = [
            [name, goal["what"], goal["wanted"], goal["measured"],
             "held" if goal["is_held"] else "NOT held"]
            for name, record in records.items() for goal in record["goals"]
        ]  # fmt: skip
    print()
    table(["benchmark", "what", "goal", "measured", ""], goals)
    without = [name for name, record in records.items() if not record["goals"]]
    if without:
        print(f"without a goal: {', '.join(without)}")
    if given.quick:
        print("With --quick no figure means anything.")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def is_run(name: str, folder: Path, *, is_quick: bool) -> bool:
    """Whether it went well; its record is in the folder then."""
    print(f"\n== {name}", flush=True)
    words = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(folder / f"{name}.json")]
    return subprocess.run([*words, *["--quick"] * is_quick], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
