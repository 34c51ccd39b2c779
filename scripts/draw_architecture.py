"""Draw docs/architecture.svg, and docs/architecture-api.svg of what lies within ``muster.api``.

They come from the layers of pyproject.toml and the imports in the source.

    python scripts/draw_architecture.py

A box is a package, with how many modules it has, or in ``muster.api`` a single module. A row is a
layer. A line leads from a box down to one that it imports; where a box in between imports that one
too, the line is left out.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH, BOX, GAP, ROW = 1000, (132, 54), 12, 96

#: Picture → what it is a picture of.
PICTURES = {
    ROOT / "docs" / "architecture.svg": "muster",
    ROOT / "docs" / "architecture-api.svg": "muster.api",
}

#: Box → what it is for, in a few words.
PURPOSES = {
    "muster": {
        "cli": "parse, call, show",
        "api": "the public calls",
        "farm": "independent tasks",
        "search": "what to try next",
        "train": "one model",
        "rl": "one agent",
        "pipeline": "records in stages",
        "doctor": "is the machine well",
        "monitor": "what devices do",
        "plan": "what it will take",
        "rank": "inside a rank",
        "supervisor": "above the ranks",
        "gang": "start ranks",
        "slurm": "jobs and scripts",
        "hosts": "machines over SSH",
        "run": "the run folder",
        "devices": "GPUs and leases",
        "base": "files, signals, errors",
        "web": "pages",
    },
    "muster.api": {
        "experiments": "phases, waiting",
        "look": "why, logs, forecasts",
        "report": "a run on one page",
        "slurm": "arrays, gangs there",
        "fit": "muster.fit",
        "map": "muster.map",
        "launch": "muster.sweep",
        "notebook": "a run in a notebook",
        "maps": "from rows to output",
        "gangs": "train, run, hosts",
        "sweeps": "tasks and searches",
        "runs": "muster.Run",
        "start": "what starts share",
        "trackers": "W&B, MLflow, …",
        "recipe": "muster.Recipe",
    },
}


def _folder(of: str) -> Path:
    return ROOT / "src" / of.replace(".", "/")


def boxes(of: str) -> dict[str, int]:
    """Each package of ``of`` with its number of modules; beside it in ``muster.api``, modules."""
    inner = sorted(p.parent for p in _folder(of).glob("*/__init__.py"))
    found = {folder.name: len(list(folder.rglob("*.py"))) for folder in inner}
    alone = {} if of == "muster" else {name: 1 for name in PURPOSES[of] if name not in found}
    return found | alone


def layers(of: str) -> list[list[str]]:
    """From the top; only packages that are there, and modules that have a purpose."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c.get("containers") == [of])
    there = boxes(of)
    named = [[name.strip(" ()") for name in row.replace(":", "|").split("|")] for row in rows]
    return [row for names in named if (row := [name for name in names if name in there])]


def imports(of: str) -> set[tuple[str, str]]:
    """(box, box that it imports), also inside functions."""
    found, there = set(), boxes(of)
    for box in there:
        place = _folder(of) / box
        for path in place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{of}."):
                    found.add((box, str(node.module).removeprefix(f"{of}.").split(".")[0]))
    return {(a, b) for a, b in found if a != b and b in there}


def direct(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that another path implies."""
    below: dict[str, set[str]] = {}
    for a, b in edges:
        below.setdefault(a, set()).add(b)

    def reached(start: str, seen: set[str]) -> set[str]:
        for name in below.get(start, set()) - seen:
            seen.add(name)
            reached(name, seen)
        return seen

    return sorted(
        (a, b) for a, b in edges if not any(b in reached(c, set()) for c in below[a] - {b})
    )


def downward(of: str) -> set[tuple[str, str]]:
    """The imports without the few that pyproject.toml lets point up or aside."""
    height = {name: number for number, row in enumerate(layers(of)) for name in row}
    return {(a, b) for a, b in imports(of) if height[a] < height[b]}


def described(of: str) -> str:
    """What the picture shows, without the numbers: two pictures that agree here are both true."""
    rows = " / ".join(" ".join(row) for row in layers(of))
    return f"{rows} : {' '.join(f'{a}>{b}' for a, b in direct(downward(of)))}"


def picture(of: str) -> str:
    rows, counts = layers(of), boxes(of)
    width, height = BOX
    places = {}
    for number, row in enumerate(rows):
        left = (WIDTH - len(row) * width - (len(row) - 1) * GAP) / 2
        for index, name in enumerate(row):
            places[name] = (left + index * (width + GAP), 10 + number * ROW)
    title = "Packages of Muster" if of == "muster" else f"What lies within {of}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW - 20}" '
        'font-family="sans-serif" text-anchor="middle">',
        f"<title>{title}; imports point down</title>",
        f"<desc>{escape(described(of))}</desc>",
        f'<rect width="{WIDTH}" height="{len(rows) * ROW - 20}" fill="white"/>',
    ]
    for a, b in direct(downward(of)):
        (x, y), (u, v) = places[a], places[b]
        x, y, u = x + width / 2, y + height, u + width / 2
        lines.append(
            f'<path d="M{x:g} {y:g} C{x:g} {y + 40:g} {u:g} {v - 40:g} {u:g} {v:g}" '
            'fill="none" stroke="#8899aa"/>'
        )
    for name, (x, y) in places.items():
        middle, purpose = x + width / 2, escape(PURPOSES[of][name])
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="6" '
            'fill="#eef3fa" stroke="#446688"/>',
            f'<text x="{middle:g}" y="{y + 23:g}" font-size="16" font-weight="bold">{name}'
            f' <tspan font-size="11" font-weight="normal">{counts[name]}</tspan></text>',
            f'<text x="{middle:g}" y="{y + 42:g}" font-size="12">{purpose}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    for file, of in PICTURES.items():
        file.write_text(picture(of), encoding="utf-8")
        print(f"written: {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
