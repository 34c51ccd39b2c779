"""Draw docs/architecture.svg from the layers of pyproject.toml and the imports in the source.

    python scripts/draw_architecture.py

A box is a package, with how many modules it has. A row is a layer. A line leads from a package down
to one that it imports; where a package in between imports that one too, the line is left out.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, BOX, GAP, ROW = 1000, (132, 54), 12, 96

#: Package → what it is for, in a few words.
PURPOSES = {
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
    "report": "a run on one page",
    "app": "the calls' engine",
    "web": "pages",
    "map": "records in stages",
}


def packages() -> dict[str, int]:
    """Package → its number of modules."""
    folders = sorted(p.parent for p in (ROOT / "src" / "muster").glob("*/__init__.py"))
    return {folder.name: len(list(folder.rglob("*.py"))) for folder in folders}


def layers() -> list[list[str]]:
    """From the top; only packages that are there."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    rows = next(c["layers"] for c in contracts if c["type"] == "layers")
    there = packages()
    named = [[name.strip(" ()") for name in row.split("|")] for row in rows]
    return [row for names in named if (row := [name for name in names if name in there])]


def imports() -> set[tuple[str, str]]:
    """(package, package that it imports), also inside functions."""
    found = set()
    for package in packages():
        for path in (ROOT / "src" / "muster" / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("muster."):
                    found.add((package, str(node.module).split(".")[1]))
    return {(a, b) for a, b in found if a != b and b in packages()}


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


def described() -> str:
    """What the picture shows, without the numbers: two pictures that agree here are both true."""
    rows = " / ".join(" ".join(row) for row in layers())
    return f"{rows} : {' '.join(f'{a}>{b}' for a, b in direct(imports()))}"


def picture() -> str:
    rows, counts = layers(), packages()
    width, height = BOX
    places = {}
    for number, row in enumerate(rows):
        left = (WIDTH - len(row) * width - (len(row) - 1) * GAP) / 2
        for index, name in enumerate(row):
            places[name] = (left + index * (width + GAP), 10 + number * ROW)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {len(rows) * ROW - 20}" '
        'font-family="sans-serif" text-anchor="middle">',
        "<title>Packages of Muster; imports point down</title>",
        f"<desc>{escape(described())}</desc>",
        f'<rect width="{WIDTH}" height="{len(rows) * ROW - 20}" fill="white"/>',
    ]
    for a, b in direct(imports()):
        (x, y), (u, v) = places[a], places[b]
        x, y, u = x + width / 2, y + height, u + width / 2
        if v < y:
            continue  # beside it, which the layers do not allow
        lines.append(
            f'<path d="M{x:g} {y:g} C{x:g} {y + 40:g} {u:g} {v - 40:g} {u:g} {v:g}" '
            'fill="none" stroke="#8899aa"/>'
        )
    for name, (x, y) in places.items():
        middle = x + width / 2
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="6" '
            'fill="#eef3fa" stroke="#446688"/>',
            f'<text x="{middle:g}" y="{y + 23:g}" font-size="16" font-weight="bold">{name}'
            f' <tspan font-size="11" font-weight="normal">{counts[name]}</tspan></text>',
            f'<text x="{middle:g}" y="{y + 42:g}" font-size="12">{escape(PURPOSES[name])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"written: {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
