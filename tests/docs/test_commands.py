"""Docs that cannot lie: every command shown runs, every link leads somewhere.

A page is a Markdown file at the top or under ``docs``. Its blocks run in the order of the page, in
one temporary folder; files, folder and exported variables carry over from block to block. There are
``examples`` in it, as in a clone.

- A ``bash`` block runs whole, under ``set -euo pipefail``; of a ``console`` block, the lines that
  start with ``$ `` (and what a trailing backslash continues) run, the rest is what one sees.
- A comment directly before a block says what is special about it::

    <!-- file: train.py -->            the block is written to this file (any language)
    <!-- exit: 1 -->                   the block ends with this code instead of 0
    <!-- not run: needs two hosts -->  skipped, for a reason that is not empty
    <!-- dry run: as README.md -->     its muster commands run with --dry-run, for such a reason
    <!-- needs: hydra -->              skipped where this module cannot be imported; `make servers`
                                       puts some into a folder of their own, for such pages alone

Not promised: output shown is not compared with output seen.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK_LIMIT_S = 300.0

#: Languages that run, and those by which a block would look run without being so.
RUNS = ("bash", "console")
MISTAKEN = ("sh", "shell", "zsh", "shell-session")
#: They set up another environment, so CI tests them by itself or not at all.
ELSEWHERE = re.compile(r"^\s*(?:\$ )?(make \w|git clone\b|(?:python3? -m )?pip3? install\b)", re.M)

#: Modules, a folder each, whose packages cannot be installed beside the others.
BESIDE = Path(sys.prefix) / "beside"

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})\s*(?P<language>[\w+-]*)[^`]*$")
_COMMENT = re.compile(r"^\s*<!--\s*(?P<key>[a-z][a-z ]*?)\s*(?::\s*(?P<value>.*?))?\s*-->\s*$")
_KEYS = ("file", "exit", "not run", "dry run", "needs")
#: The flag comes before what may be another program's.
_DRY = 'muster() { local name=$1; shift; command muster "$name" --dry-run "$@"; }\n'


class PageError(Exception):
    """The page itself is wrong, whatever its commands do."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: where it begins, its language, its text and what the comments ask for."""

    line: int
    language: str
    text: str
    file: str | None = None
    exit_code: int = 0
    not_run: str | None = None
    dry_run: str | None = None
    needs: str | None = None


@dataclass(kw_only=True)
class _Asked:
    values: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: str | None, line: int) -> None:
        if key not in _KEYS:
            raise PageError(f"line {line}: unknown comment {key!r} before a block; known: {_KEYS}")
        if not value:
            raise PageError(f"line {line}: <!-- {key}: --> needs a value")
        if key == "exit" and not value.isdigit():
            raise PageError(f"line {line}: <!-- exit: {value} --> is not an exit code")
        if key == "file" and (Path(value).is_absolute() or ".." in Path(value).parts):
            raise PageError(f"line {line}: {value} is not inside the folder of the page")
        self.values[key] = value


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page in order; :class:`PageError` where a comment makes no sense."""
    lines = text.splitlines()
    waiting: list[tuple[str, str | None, int]] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if comment := _COMMENT.match(line):
            waiting.append((comment["key"], comment["value"], at))
            continue
        opening = _FENCE.match(line)
        if opening is None:
            if line.strip():
                if stray := [entry for entry in waiting if entry[0] in _KEYS]:
                    raise PageError(f"line {stray[0][2]}: <!-- {stray[0][0]} --> before no block")
                waiting = []
            continue
        asked, start = _Asked(), at
        for key, value, where in waiting:
            asked.add(key, value, where)
        waiting = []
        closing = re.compile(rf"^ *{opening['marks'][0]}{{{len(opening['marks'])},}}\s*$")
        body = []
        while at < len(lines) and not closing.match(lines[at]):
            body.append(lines[at].removeprefix(opening["indent"]))
            at += 1
        if at == len(lines):
            raise PageError(f"line {start}: the block is never closed")
        at += 1
        yield Block(
            line=start,
            language=opening["language"],
            text="\n".join(body) + "\n",
            file=asked.values.get("file"),
            exit_code=int(asked.values.get("exit", "0")),
            not_run=asked.values.get("not run"),
            dry_run=asked.values.get("dry run"),
            needs=asked.values.get("needs"),
        )


def script(block: Block) -> str:
    """What bash is given for a block that runs."""
    before = _DRY if block.dry_run else ""
    if block.language == "bash":
        return before + block.text
    lines, continues = [], False
    for line in block.text.splitlines():
        if continues or line.startswith("$ "):
            lines.append(line if continues else line.removeprefix("$ "))
            continues = line.endswith("\\")
    if not lines:
        raise PageError(f"line {block.line}: a console block without a line that starts with '$ '")
    return before + "\n".join(lines) + "\n"


def check(block: Block) -> None:
    """A block either runs, is a file, says why it does neither, or shows no commands."""
    if block.not_run or block.file:
        return
    if block.language in MISTAKEN:
        raise PageError(
            f"line {block.line}: ```{block.language} would not run; write bash or console"
        )
    if block.language == "python":
        raise PageError(
            f"line {block.line}: python that no test runs; put <!-- file: NAME.py --> before it "
            "and run it in a bash block, or <!-- not run: REASON -->"
        )
    if block.language in RUNS and (found := ELSEWHERE.search(block.text)):
        raise PageError(
            f"line {block.line}: {found[1]!r} is tested elsewhere; "
            "put <!-- not run: REASON --> before the block"
        )


def run_page(text: str, folder: Path) -> int:
    """Run a page in ``folder`` and return how many blocks ran; an error says what failed."""
    page = list(blocks(text))
    for block in page:
        check(block)
    work, state = folder / "page", folder / "state.sh"
    work.mkdir()
    state.write_text(f"cd {shlex.quote(str(work))}\n")
    (work / "examples").symlink_to(ROOT / "examples")
    needed = {block.needs for block in page if block.needs}
    beside = [str(BESIDE / name) for name in sorted(needed) if _is_beside(name)]
    if beside:
        with state.open("a") as file:
            file.write(f"export PYTHONPATH={shlex.quote(os.pathsep.join(beside))}\n")
    num_run = 0
    for block in page:
        if block.not_run:
            continue
        if block.file:
            (work / block.file).parent.mkdir(parents=True, exist_ok=True)
            (work / block.file).write_text(block.text)
        elif block.language in RUNS:
            exit_code, output = _bash(script(block), state, folder)
            num_run += 1
            assert exit_code == block.exit_code, (
                f"line {block.line}: exit code {exit_code} instead of {block.exit_code} of\n"
                f"{block.text}\n{output[-4000:]}"
            )
    return num_run


def _is_beside(module: str) -> bool:
    return importlib.util.find_spec(module) is None and (BESIDE / module).is_dir()


def _bash(text: str, state: Path, folder: Path) -> tuple[int, str]:
    """Run ``text`` where the block before it stopped; the whole session is killed at the limit."""
    keep = f'trap \'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {shlex.quote(str(state))}\' EXIT'
    program = f"source {shlex.quote(str(state))}\n{keep}\nset -euo pipefail\n{text}"
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(folder),
            start_new_session=True,
            preexec_fn=_on_one_core,
        )
        try:
            exit_code = process.wait(BLOCK_LIMIT_S)
        except subprocess.TimeoutExpired:
            exit_code = 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return exit_code, output.read()


def _on_one_core() -> None:
    """What takes a worker per core takes one then, and imports once what its tasks need."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {cores[worker % len(cores)]})


def _environment(folder: Path) -> dict[str, str]:
    """This environment, with our programs first and nothing of muster's shared with the host."""
    programs = Path(sys.executable).parent  # of the virtual environment: not resolved
    assert (programs / "muster").exists(), f"{programs} has no muster: pip install -e ."
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "MUSTER_LEASE_DIR": str(folder / "leases"),
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "100",
    }


def links(text: str) -> Iterator[tuple[str, str]]:
    """The relative links of a page as (path, anchor); fenced and inline code is no link."""
    prose, marks = [], ""
    for line in text.splitlines():
        opening = _FENCE.match(line)
        if marks:
            if re.match(rf"^ *{marks[0]}{{{len(marks)},}}\s*$", line):
                marks = ""
        elif opening:
            marks = opening["marks"]
        else:
            prose.append(re.sub(r"(`+).+?\1", "", line))
    pattern = (
        r"\]\(\s*<?([^)\s>]+)[^)]*\)"  # [text](target "title")
        r"|^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)"  # [text]: target
        r"""|(?:src|href)=["']([^"']+)["']"""
    )
    for found in re.finditer(pattern, "\n".join(prose), re.M):
        target = next(group for group in found.groups() if group)
        if not re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.I):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    slugs: set[str] = set()
    marks = ""
    for line in text.splitlines():
        if (opening := _FENCE.match(line)) and not marks:
            marks = opening["marks"]
        elif marks and line.strip().startswith(marks):
            marks = ""
        elif not marks and (heading := re.match(r"#{1,6}\s+(.+?)\s*#*$", line)):
            words = re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-")
            slug, count = words, 0
            while slug in slugs:
                count += 1
                slug = f"{words}-{count}"
            slugs.add(slug)
    return slugs


def broken_links(page: Path) -> list[str]:
    """The relative links of ``page`` that lead nowhere, each with what is missing."""
    broken = []
    for path, anchor in links(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(f"{path}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            broken.append(f"{path}#{anchor}: no such heading")
    return broken


def unseen_files(text: str) -> list[str]:
    """The files of a page whose name no line directly before their block shows to a reader."""
    unseen, shown, is_inside = [], "", False
    for line in text.splitlines():
        if (comment := _COMMENT.match(line)) and not is_inside:
            if comment["key"] == "file" and f"`{comment['value']}`" not in shown:
                unseen.append(comment["value"])
        elif _FENCE.match(line):
            is_inside = not is_inside
        elif line.strip() and not is_inside:
            shown = line
    return unseen


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


#: The page that everybody reads first is tried in `make test` too.
FIRST = ROOT / "README.md"


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[] if p == FIRST else [pytest.mark.thorough]) for p in PAGES],
    ids=_name,
)
def test_every_command_runs(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    try:
        needed = {block.needs for block in blocks(text) if block.needs}
        absent = [
            name
            for name in sorted(needed)
            if importlib.util.find_spec(name) is None and not _is_beside(name)
        ]
        if absent:
            pytest.skip(f"not installed: {', '.join(absent)} (make servers)")
        run_page(text, tmp_path)
    except PageError as error:
        pytest.fail(f"{_name(page)}, {error}")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_reader_sees_the_name_of_every_file(page: Path) -> None:
    assert unseen_files(page.read_text()) == []
