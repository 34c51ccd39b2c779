"""Writes the figures of docs/measurements.md from what the benchmarks have recorded.

python benchmarks/metrics.py --json benchmarks/results/metrics.json
python docs/generate_measurements.py            # --check says whether anything would change

A line ``<!-- figures: metrics -->`` is followed by what benchmarks/results/metrics.json holds, up
to ``<!-- end -->``; what stands around it is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/measurements.md", ROOT / "benchmarks/results"
ESCAPED = r"\|"
_PART = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(page: str, results: Path) -> str:
    """The page with the figures of all results that it names."""

    def part(found: re.Match[str]) -> str:
        record = json.loads((results / f"{found[2]}.json").read_text())
        return f"{found[1]}\n{figures(record)}\n"

    return _PART.sub(part, page)


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
        heads = one["headers"]
        for row in (heads, ["---"] * len(heads), *one["rows"]):
            lines.append(f"| {' | '.join(cell.replace('|', ESCAPED) for cell in row)} |")
        lines.append("")
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
