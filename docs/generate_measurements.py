"""Writes the figures of docs/measurements.md from what the benchmarks have recorded.

python benchmarks/all.py --to benchmarks/results
python docs/generate_measurements.py            # --check says whether anything would change

A line ``<!-- figures: metrics -->`` is followed by what benchmarks/results/metrics.json holds, up
to ``<!-- end -->``, and ``<!-- goals -->`` by all goals of all records. What stands around them is
written by hand, and so are the figures of a benchmark that has no record yet.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/measurements.md", ROOT / "benchmarks/results"
ESCAPED = r"\|"
_GOALS = re.compile(r"(<!-- goals -->\n).*?(?=<!-- end -->)", re.DOTALL)
_PART = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(page: str, results: Path) -> str:
    """The page with the figures of all results that it names."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}

    def part(found: re.Match[str]) -> str:
        record = records.get(found[2])
        return found[0] if record is None else f"{found[1]}\n{figures(record)}\n"

    page = _GOALS.sub(lambda found: f"{found[1]}\n{goals(records)}\n", page)
    return _PART.sub(part, page)


def goals(records: Mapping[str, dict[str, Any]]) -> str:
    """
    >>> goal = {"what": "tasks/s", "wanted": "≥ 2", "measured": "1", "is_held": False}
    >>> about = {"date": "2026-11-23"}
    >>> print(goals({"farm": {"goals": [goal], "machine": about}}))
    | benchmark | what | goal | measured |  | on |
    | --- | --- | --- | --- | --- | --- |
    | farm | tasks/s | ≥ 2 | 1 | **missed** | 2026-11-23 |
    <BLANKLINE>
    """
    heads = ["benchmark", "what", "goal", "measured", "", "on"]
    rows = [
        [name, goal["what"], goal["wanted"], goal["measured"],
         "held" if goal["is_held"] else "**missed**", record["machine"]["date"]]
        for name, record in records.items() for goal in record.get("goals", [])
    ]  # fmt: skip
    return "\n".join([*_lines(heads, rows), ""])


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [heads, ["---"] * len(heads), *rows]
    cells = [[cell.replace("|", ESCAPED) for cell in row] for row in every]
    return [f"| {' | '.join(row)} |" for row in cells]


def figures(record: dict[str, Any]) -> str:
    """
    >>> about = {"date": "2026-11-23", "processor": "Xeon", "cores": 2, "kernel": "6.18",
    ...          "versions": {"python": "3.11.7"}}
    >>> rows = {"caption": "", "headers": ["what", "median"], "rows": [["a|b", "1"]]}
    >>> print(figures({"command": "python x.py", "machine": about, "tables": [rows]}))
    `python x.py`, 2026-11-23, 2 cores (Xeon, Linux 6.18; python 3.11.7)
    <BLANKLINE>
    | what | median |
    | --- | --- |
    | a\\|b | 1 |
    <BLANKLINE>
    """
    about = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"`{record['command']}`, {about['date']}, {about['cores']} cores "
        f"({about['processor']}, Linux {about['kernel']}; {versions})",
        "",
    ]
    for one in record["tables"]:
        if one["caption"]:
            lines += [one["caption"], ""]
        lines += [*_lines(one["headers"], one["rows"]), ""]
    return "\n".join(lines)


def main() -> int:
    before = PAGE.read_text()
    after = written(before, RESULTS)
    if "--check" in sys.argv[1:]:
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
