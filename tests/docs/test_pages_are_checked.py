"""The checker of the pages, on pages written to be right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_commands import (
    PageError,
    anchors,
    blocks,
    broken_links,
    links,
    run_page,
    script,
    unseen_files,
)

GOOD = """\
# A page

<!-- file: sub/hello.py -->
```python
import sys
print("hello", sys.argv[1])
```

```bash
python sub/hello.py you \\
    > said.txt   # a comment
export NAME=value
mkdir inner && cd inner
```

<!-- exit: 3 -->

```console
$ test "$(cat ../said.txt)" = "hello you" && test "$NAME" = value
what one sees
$ test "$(basename "$PWD")" = inner \\
    && (exit 3)
```

<!-- not run: shows an idea -->
```bash
make test
false
```

1. In a list:

   ```bash
   cd .. && test -f said.txt && ls inner
   ```

```text
$ false
```
"""


def test_a_page_runs_in_order_with_its_files_folder_and_variables(tmp_path: Path) -> None:
    assert run_page(GOOD, tmp_path) == 3
    assert (tmp_path / "page" / "said.txt").read_text() == "hello you\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```bash\nfalse\necho after\n```", "exit code 1 instead of 0"),
        ("```bash\nfalse | cat\n```", "exit code 1 instead of 0"),
        ("```bash\necho $UNKNOWN_NAME\n```", "unbound variable"),
        ("<!-- exit: 1 -->\n```bash\ntrue\n```", "exit code 0 instead of 1"),
        ("```console\n$ true\n$ exit 4\n```", "exit code 4 instead of 0"),
        ("```bash\ncd /\n```\n```bash\ntest $PWD = /tmp\n```", "line 4: exit code 1"),
    ],
)
def test_a_command_that_fails_is_reported(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=says):
        run_page(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- not run: -->\n```bash\nfalse\n```", "needs a value"),
        ("<!-- not run -->\n```bash\nfalse\n```", "needs a value"),
        ("<!-- notrun: because -->\n```bash\nfalse\n```", "unknown comment 'notrun'"),
        ("<!-- exit: one -->\n```bash\nfalse\n```", "not an exit code"),
        ("<!-- file: ../../x.py -->\n```python\n1\n```", "not inside the folder"),
        ("<!-- not run: reason -->\ntext\n\n```bash\nfalse\n```", "before no block"),
        ("```bash\ntrue\n", "never closed"),
        ("```console\nonly output\n```", "without a line"),
        ("```sh\nfalse\n```", "write bash or console"),
        ("```python\nimport nothing\n```", "python that no test runs"),
        ("```bash\necho x\nmake demo\n```", "'make d"),
        ("```bash\ngit clone https://x\n```", "'git clone'"),
        ("```console\n$ pip install x\n```", "'pip install'"),
    ],
)
def test_a_page_that_makes_no_sense_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=says):
        run_page(text, tmp_path)


def test_a_dry_run_starts_nothing_and_finds_mistakes(tmp_path: Path) -> None:
    text = "`f.py`:\n\n<!-- file: f.py -->\n```python\ndef f(x: int): ...\n```\n"
    text += "<!-- dry run: as elsewhere -->\n```bash\nmuster sweep f.py:f --grid x=1,2 {}\n```\n"
    assert run_page(text.format("--devices cpu:1"), tmp_path) == 1
    assert not (tmp_path / "page" / "runs").exists()
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError, match="exit code 2 instead of 0"):
        run_page(text.format("--device cpu:1"), tmp_path / "again")


def test_the_programs_are_those_of_this_environment(tmp_path: Path) -> None:
    # Not this: muster must come from where the tests run, and a block must not read the terminal.
    text = "```bash\nmuster --version\npython -c 'import muster'\ncat > empty\ntest ! -s empty\n```"
    assert run_page(text, tmp_path) == 1


def test_a_block_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_commands.BLOCK_LIMIT_S", 0.5)
    with pytest.raises(AssertionError, match="exit code 124"):
        run_page("```bash\nsleep 60 & sleep 61\n```", tmp_path)


def test_only_the_commands_of_a_console_block_are_taken() -> None:
    (block,) = blocks("```console\n$ a \\\n  b\nout\n$ c\n```")
    assert script(block) == "a \\\n  b\nc\n"


def test_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# The *first* one\n# Twice\n# Twice\n```\n# no\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#the-first-one) ![b](gone.png 'title') [c](https://x/y) [d](#here)\n"
        "`[code](no.md)` [e][ref] <img src='lost.svg'>\n\n[ref]: missing.md\n"
        "```md\n[fenced](no.md)\n```\n[f](other.md#twice-1) [g](other.md#no)\n\n## Here\n"
    )
    assert anchors((tmp_path / "other.md").read_text()) == {"the-first-one", "twice", "twice-1"}
    assert ("other.md", "twice-1") in list(links(page.read_text()))
    assert broken_links(page) == [
        "gone.png: no such file",
        "lost.svg: no such file",
        "missing.md: no such file",
        "other.md#no: no such heading",
    ]


def test_a_file_whose_name_only_a_comment_tells_is_reported() -> None:
    block = "<!-- file: a.py -->\n```python\npass\n```\n"
    assert unseen_files("Text.\n\n" + block) == ["a.py"]
    assert unseen_files("Save this as `a.py`:\n\n" + block) == []
    assert unseen_files("`a.py`:\n\n```text\n`a.py`\n```\nText.\n\n" + block) == ["a.py"]
