"""Writes the pages of figures from what the benchmarks have recorded.

python benchmarks/all.py --to benchmarks/results
python docs/generate_measurements.py            # --check says whether anything would change

In README.md, docs/measurements.md and docs/scaling.md a line ``<!-- goals -->`` is followed by the
goals of all records, ``<!-- peers -->`` by some figures of Muster beside those of others, and
``<!-- figures: scale -->`` by the tables of benchmarks/results/scale.json, up to ``<!-- end -->``;
what stands around them is written by hand. docs/measurements-tables.md is made as a whole: what
each benchmark measures, by the first line of its script, and its tables.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS, BENCHMARKS = ROOT / "docs", ROOT / "benchmarks"
RESULTS, TABLES = BENCHMARKS / "results", DOCS / "measurements-tables.md"
PAGES = (ROOT / "README.md", DOCS / "measurements.md", DOCS / "scaling.md")
#: What no benchmark is: it made a fixture, or is imported or run by the others.
OTHERS = {"measuring", "dashboard_peers", "record_digits_grid", "all"}
ESCAPED = r"\|"
NOTHING = "No record yet; what was found before is in [the history](measurements-history.md)."
HEAD = """# The tables of the benchmarks

<!-- made by docs/generate_measurements.py: what is written here by hand is lost -->

What each benchmark printed when it was last run, with its command, date, commit and machine.
[Measurements](measurements.md) has the goals and what the figures mean.
"""
#: What is compared, by which benchmark, Muster's figures and those of its peers. In braces stand
#: the labels of a row, joined by "&", and a column of the benchmark's tables.
PEERS = (
    (
        "kill -9 of random processes, 5,000 tasks", "chaos",
        "{muster | kills} kills, {muster | lost} lost",
        "GNU parallel: {GNU parallel --resume | kills} kills, {GNU parallel --resume | lost} lost; "
        "ProcessPoolExecutor {ProcessPoolExecutor | ended}; Ray {Ray tasks | ended}",
    ),
    (
        "empty functions a second, with start and table (without)", "farm_overhead",
        "{muster, function | whole/s} ({muster, function | steady/s}), each on disk",
        "Pool {multiprocessing.Pool | whole/s} ({multiprocessing.Pool | steady/s}), "
        "Ray {Ray tasks | whole/s} ({Ray tasks | steady/s}), nothing kept; "
        "Optuna's journal {Optuna, journal file | whole/s}",
    ),
    (
        "a search of 27 trials", "search",
        "{muster | seconds} s", "Optuna {optuna | seconds} s, Ray Tune {ray | seconds} s",
    ),
    (
        "two ranks, samples a second, of a hand-written loop", "ddp_throughput",
        "× {muster | of raw}",
        "Accelerate × {Accelerate | of raw}, HF Trainer × {HF Trainer | of raw}, "
        "Lightning × {Lightning Trainer | of raw}",
    ),
    (
        "a training killed in mid-epoch: samples never seen; the same weights", "resume",
        "{muster | never seen}; {muster | weights bit-identical}",
        "Accelerate {Accelerate | never seen}; {Accelerate | weights bit-identical}. "
        "Lightning {Lightning Trainer | never seen}; {Lightning Trainer | weights bit-identical}",
    ),
    (
        "a rank that is frozen: ended after", "faults",
        "{SIGSTOP of rank 1 & muster run | ended after}",
        "torchrun: {SIGSTOP of rank 1 & torchrun | ended after}",
    ),
    (
        "200,000 rows through a map, a second", "map_overhead",
        "{muster map | records/s}",
        "a plain loop {plain loop | records/s}, datatrove {datatrove | records/s}, "
        "`datasets` {datasets.map | records/s}, Ray Data {Ray Data | records/s}",
    ),
    (
        "tasks of 1 s on SLURM, a second", "cluster_overhead",
        "{1 s & muster's pilots | tasks/s}",
        "a job for each {1 s & one job per task | tasks/s}, "
        "submitit {1 s & submitit map_array | tasks/s}",
    ),
    (
        "recurrent PPO on an options market, steps a second, of sb3-contrib's", "rl_throughput",
        "× {muster, 1,024 | × sb3-contrib}", "sb3-contrib × 1",
    ),
)  # fmt: skip
#: Of benchmarks/all.py.
_TABLES = {"RUNS", "ASKED_FOR"}
_GOALS = re.compile(r"(<!-- goals -->\n).*?(?=<!-- end -->)", re.DOTALL)
_PEERS = re.compile(r"(<!-- peers -->\n).*?(?=<!-- end -->)", re.DOTALL)
_CELL = re.compile(r"\{([^{}|]+) \| ([^{}]+)\}")
_PART = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_DECISION = re.compile(r"decision (\d{4})")


def recorded(results: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}


def written(page: str, records: Mapping[str, dict[str, Any]]) -> str:
    """The page with the figures of all records that it names."""

    def part(found: re.Match[str]) -> str:
        record = records.get(found[2])
        return f"{found[1]}\n{NOTHING if record is None else figures(record)}\n"

    page = _GOALS.sub(lambda found: f"{found[1]}\n{goals(records)}\n", page)
    page = _PEERS.sub(lambda found: f"{found[1]}\n{beside_peers(records)}\n", page)
    return _PART.sub(part, page)


def goals(records: Mapping[str, dict[str, Any]]) -> str:
    """
    >>> goal = {"what": "tasks/s", "wanted": "≥ 2", "measured": "1", "is_held": False, "bound": "3"}
    >>> about = {"date": "2026-11-23"}
    >>> print(goals({"farm": {"goals": [goal], "machine": about}}))
    0 of 1 goals are held.
    <BLANKLINE>
    | benchmark | what | goal | measured |  | bound | on |
    | --- | --- | --- | --- | --- | --- | --- |
    | [farm](measurements-tables.md#farm) | tasks/s | ≥ 2 | 1 | **missed** | 3 | 2026-11-23 |
    <BLANKLINE>
    """
    heads = ["benchmark", "what", "goal", "measured", "", "bound", "on"]
    said = {True: "held", False: "**missed**", None: "not judged"}
    rows = [
        [f"[{name}](measurements-tables.md#{name})", goal["what"], goal["wanted"],
         goal["measured"], said[goal["is_held"]], linked(goal.get("bound", "")),
         record["machine"]["date"]]
        for name, record in records.items() for goal in record.get("goals", [])
    ]  # fmt: skip
    held = sum(row[4] == "held" for row in rows)
    return "\n".join([f"{held} of {len(rows)} goals are held.", "", *_lines(heads, rows), ""])


def beside_peers(records: Mapping[str, dict[str, Any]]) -> str:
    """The table of the README; what has no record is left out."""
    rows = [
        [f"[{what}](docs/measurements-tables.md#{name})",
         *(_CELL.sub(lambda found, name=name: _median(cell(records[name], *found.groups())), text)
           for text in texts)]
        for what, name, *texts in PEERS if name in records
    ]  # fmt: skip
    return "\n".join(_lines(["", "Muster", "peers"], rows)) + "\n"


def _median(text: str) -> str:
    """Without the spread that stands behind it."""
    return text.partition(" [")[0]


def cell(record: Mapping[str, Any], labels: str, column: str) -> str:
    """What a benchmark's tables have in the first row with all of the ``labels`` (joined by "&").
    Raises KeyError where none has them.

    >>> one = {"headers": ["task", "of", "s"], "rows": [["a", "x", "1"], ["a", "y", "2"]]}
    >>> cell({"tables": [one]}, "a & y", "s")
    '2'
    """
    wanted = set(labels.split(" & "))
    for one in record["tables"]:
        for row in one["rows"]:
            if column in one["headers"] and wanted <= {*row}:
                found: str = row[one["headers"].index(column)]
                return found
    raise KeyError(f"no table of {record.get('command')} has {column!r} of {labels!r}")


def linked(bound: str) -> str:
    """With a link to the decision that it names."""

    def link(found: re.Match[str]) -> str:
        [page] = DOCS.glob(f"decisions/{found[1]}-*.md")
        return f"[{found[0]}](decisions/{page.name})"

    return _DECISION.sub(link, bound)


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
    commit = f", commit {record['commit']}" if record.get("commit") else ""
    lines = [
        f"`{record['command']}`, {about['date']}{commit}, {about['cores']} cores "
        f"({about['processor']}, Linux {about['kernel']}; {versions})",
        "",
    ]
    for one in record["tables"]:
        if one["caption"]:
            lines += [one["caption"], ""]
        lines += [*_lines(one["headers"], one["rows"]), ""]
    return "\n".join(lines)


def tables(records: Mapping[str, dict[str, Any]], about: Mapping[str, str]) -> str:
    """The page of all tables; ``about``: what each benchmark measures.

    >>> print(tables({}, {"x": "What x costs."})[len(HEAD):])
    <BLANKLINE>
    ## x
    <BLANKLINE>
    What x costs.
    <BLANKLINE>
    No record yet; what was found before is in [the history](measurements-history.md).
    <BLANKLINE>
    """
    parts = [HEAD]
    for name in sorted({*records, *about}):
        record = records.get(name)
        text = about.get(name) or about[name.partition("-")[0]]
        parts += [f"## {name}\n", f"{text}\n"]
        parts.append(f"{NOTHING}\n" if record is None else figures(record))
    return "\n".join(parts)


def described(folder: Path) -> dict[str, str]:
    """Benchmark → the first line of its script; also for each further form that all.py has."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem not in OTHERS:
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[path.stem] = text.partition("\n")[0].replace("``", "`")
    forms = {name: found[name.partition("-")[0]] for name in forms_in(folder / "all.py")}
    return found | forms


def forms_in(program: Path) -> list[str]:
    """The names in the tables of what is run, which is read and not imported."""
    tables = [
        node.value for node in ast.parse(program.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        and any(isinstance(one, ast.Name) and one.id in _TABLES for one in node.targets)
    ]  # fmt: skip
    return [ast.literal_eval(key) for table in tables for key in table.keys if key]


def pages() -> dict[Path, str]:
    """Each page of figures as it should be."""
    records = recorded(RESULTS)
    made = {page: written(page.read_text(), records) for page in PAGES}
    return {**made, TABLES: tables(records, described(BENCHMARKS))}


def main() -> int:
    stale = {page: text for page, text in pages().items() if text != _text_of(page)}
    if "--check" in sys.argv[1:]:
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text)
    return 0


def _text_of(page: Path) -> str | None:
    return page.read_text() if page.exists() else None


if __name__ == "__main__":
    sys.exit(main())
