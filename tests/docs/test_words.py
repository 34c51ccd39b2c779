"""The words of Muster: few, explained in one place, and none that only its authors know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = ROOT / "docs" / "words.md"

#: What was said once → what is said. Names on disk and in JSON keep theirs, such as `pilots/beat`.
PRIVATE = {
    r"warden": "reaper",
    r"nurser(y|ies)": "fork server",
    r"wish(es)?": "request",
    r"chores?": "periodic work",
    r"mourn(s|ed|ing)?": "report a death",
    r"condemned": "to be killed",
    r"leave[_ ]word": "leave a request",
    r"(the|a|whose|its|of|older|newer|last|next) beats?": "heartbeat",
}
_FORBIDDEN = re.compile(rf"\b({'|'.join(PRIVATE)})\b", re.IGNORECASE)


def test_the_list_of_words_is_short() -> None:
    entries = [line for line in WORDS.read_text().splitlines() if line.startswith("- **")]
    assert 15 <= len(entries) <= 30
    assert all(re.match(r"- \*\*[a-z ]+\*\*: [^*]{20,}\.$", entry) for entry in entries)
    names = [re.findall(r"\*\*(.+?)\*\*", entry)[0] for entry in entries]
    assert len(set(names)) == len(names)


def test_no_page_speaks_in_private_words() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    assert not [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if _FORBIDDEN.search(line)
    ]


def test_no_text_has_both_sides_of_a_merge() -> None:
    """A page had lines of a patch in it, between its tables."""
    left = re.compile(r"(<{3,}|={3,}|>{3,}|\|{3,})( .*)?")
    texts = [*ROOT.glob("*"), *ROOT.glob("docs/**/*"), *ROOT.glob("examples/**/*")]
    assert not [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in texts
        if path.suffix in {".md", ".toml", ".yaml", ".cff", ".py"}
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if left.fullmatch(line) and not line.startswith(">>> ")
    ]


def test_no_message_or_docstring_speaks_in_private_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word!r} in {text.strip().splitlines()[0][:60]!r}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in _sentences(path)
        for word in [found[0] for found in _FORBIDDEN.finditer(text)]
    ]
    assert not found, "\n".join(found)


def _sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Texts with a space in them, without the names of the code that they quote: what is one word
    is a name as well, or a key or a flag.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"``.*?``", "", node.value)
