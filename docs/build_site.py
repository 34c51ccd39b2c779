"""Builds the site and walks through it: ``python docs/build_site.py build/docs`` (``make docs``).

What Sphinx warns of is an error. Then each page is read as a browser would: links and anchors have
to lead somewhere, nothing may be fetched from elsewhere, and the first page leads to all others.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

DOCS = Path(__file__).parent
#: What Sphinx makes and nobody has to find by a link.
BESIDE = {"search.html", "genindex.html", "py-modindex.html"}
#: What a page loads by itself, unlike a link, which a reader follows.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


def build(target: Path) -> int:
    """Make the pages anew and return Sphinx's exit code; pages, and what it has read, lie apart."""
    from sphinx.cmd.build import main

    for page in target.rglob("*.html"):
        page.unlink()  # those of pages that have gone stay otherwise
    state = target.with_name(f"{target.name}.state")
    options = ["-q", "-W", "--keep-going", "--fresh-env", "--doctree-dir", str(state)]
    return main([*options, "-b", "html", str(DOCS), str(target)])


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if (name := LOADED.get(tag)) and name in found:
            self.loaded.append(found[name])


def mistakes(site: Path) -> list[str]:
    """What is wrong with the built pages, a sentence each."""
    pages = {
        path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")
    }
    wrong: list[str] = []
    ways: dict[str, set[str]] = {name: set() for name in pages}
    for name, page in sorted(pages.items()):
        wrong += [f"{name} loads {url}" for url in page.loaded if is_elsewhere(url)]
        for url in [*page.links, *page.loaded]:
            if is_elsewhere(url) or url.startswith(("mailto:", "data:")):
                continue
            parts = urlsplit(url)
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            if not target.exists():
                wrong.append(f"{name}: {url} is not there")
                continue
            other = target.resolve().relative_to(site.resolve()).as_posix()
            ways[name].add(other)
            if parts.fragment and unquote(parts.fragment) not in pages[other].anchors:
                wrong.append(f"{name}: {url} has no such anchor")
    unreached = set(pages) - reached(ways, "index.html") - BESIDE
    return wrong + [f"no link leads to {name}" for name in sorted(unreached)]


def is_elsewhere(url: str) -> bool:
    return url.startswith("//") or urlsplit(url).scheme in ("http", "https")


def reached(ways: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        new = ways.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def main(target: Path) -> int:
    if code := build(target):
        return code
    wrong = mistakes(target)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    if not wrong:
        sys.stdout.write(f"{target / 'index.html'}: {len(list(target.rglob('*.html')))} pages\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
