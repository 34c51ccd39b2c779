"""The site: each page has its place, each public name its entry, and nothing is fetched."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.build_site import mistakes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def listed(page: Path) -> set[Path]:
    """The pages that the ``toctree`` blocks of a page name."""
    found: set[Path] = set()
    for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.S):
        for line in block.splitlines():
            if line and not line.startswith(":"):
                name = named[1] if (named := re.search(r"<(.+)>$", line)) else line
                matching = set(page.parent.glob(f"{name}.md"))
                assert matching, f"{page.relative_to(ROOT)} lists {name}, which is not there"
                found |= matching
    return found


def test_each_page_has_its_place_on_the_site() -> None:
    placed, waiting = set(), [DOCS / "index.md"]
    while waiting:
        new = listed(waiting.pop()) - placed
        placed |= new
        waiting += new
    pages = set(DOCS.glob("**/*.md")) - {DOCS / "index.md"}
    assert not {"search.md", "genindex.md"} & {page.name for page in DOCS.glob("*.md")}, (
        "Sphinx writes pages of this name itself"
    )
    assert sorted(pages - placed) == [], "docs/index.md has a toctree for each kind"


def test_each_decision_is_in_the_list_of_them() -> None:
    text = (DOCS / "decisions" / "README.md").read_text()
    pages = [page.name for page in (DOCS / "decisions").glob("0*.md")]
    assert pages and [name for name in pages if f"]({name})" not in text] == []


def test_each_script_of_the_gallery_is_short_and_has_a_page_with_its_picture() -> None:
    scripts = {path.name: path for path in (ROOT / "examples/gallery").iterdir() if path.is_file()}
    long = [name for name, path in scripts.items() if len(path.read_text().splitlines()) > 60]
    assert not long, f"of more than sixty lines: {long}"
    pages = {page for page in (DOCS / "gallery").glob("*.md") if page.name != "index.md"}
    shown = set()
    for page in pages:
        text = page.read_text()
        pictures = re.findall(r"!\[.+?\]\((pictures/.+?)\)", text)
        assert pictures and all((page.parent / name).exists() for name in pictures), page
        shown |= set(re.findall(r"literalinclude\} \.\./\.\./examples/gallery/(\S+)", text))
    assert len(pages) == 10
    assert scripts.keys() - shown <= {"make_texts.py"}, "no page shows it"


def test_each_variable_of_ours_is_explained() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    named = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"\bMUSTER_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert len(named) > 10
    assert sorted(name for name in named if f"`{name}`" not in page) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('<a href="other.html#here">a link</a>', ""),
        ('<a href="https://example.org">a link that a reader follows</a>', ""),
        ('<a href="gone.html">a link</a>', "index.html: gone.html is not there"),
        ('<a href="other.html#gone">a link</a>', "other.html#gone has no such anchor"),
        ('<a href="#gone">a link</a>', "index.html: #gone has no such anchor"),
        ('<img src="https://example.org/a.png">', "index.html loads https://example.org/a.png"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css"),
        ('<script src="a.js"></script>', "index.html: a.js is not there"),
        ("no link", "no link leads to other.html"),
    ],
)
def test_mistakes_of_built_pages_are_found(tmp_path: Path, body: str, says: str) -> None:
    (tmp_path / "index.html").write_text(body)
    (tmp_path / "other.html").write_text('<h1 id="here">Other</h1>')
    found = mistakes(tmp_path)
    assert any(says in mistake for mistake in found) if says else "#here" in body or found


@pytest.mark.thorough
def test_the_site_is_built_without_a_warning_and_complete(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, str(DOCS / "build_site.py"), str(site)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    text = (site / "reference" / "python.html").read_text()
    inside = ("executors", "checks", "trackers", "agents", "generation")
    for module in ("muster", *(f"muster.{name}" for name in inside)):
        for name in importlib.import_module(module).__all__:
            assert f'id="{module}.{name}"' in text, f"{module}.{name} has no entry"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet
