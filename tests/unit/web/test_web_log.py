"""Logs that lead out of their run: what a ledger says about a file is not believed."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from muster.run.folder import RunFolder
from muster.web.content.kinds import _stall
from muster.web.content.task import _read
from muster.web.folder import opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "run"
    (root / "logs").mkdir(parents=True)
    (root / "logs/whole").write_text("printed")
    (root / "logs/link").symlink_to(tmp_path / "secret")
    (root / "logs/folder").symlink_to(tmp_path)
    os.mkfifo(root / "logs/pipe")
    return root


@pytest.mark.parametrize(
    "name",
    [
        "logs/link",
        "logs/folder/secret",
        "logs/../../secret",
        "logs/pipe",
        "logs/\0",
        "logs",
        "x" * 300,
    ],
)
def test_a_log_is_a_file_of_its_run(root: Path, name: str) -> None:
    assert _read(root, [("logs/whole", 0, 7), (name, 0, 6)], 0, 13) == b"printed\n\n\n\n\n\n"
    with pytest.raises(OSError):
        opened(root, name)
    assert _read(root, [(f"logs/{root.parent}/secret", 0, 6)], 0, 6) == b"\n" * 6


def test_stacks_are_files_of_their_run(root: Path) -> None:
    (root / "logs/rank-0.stack").symlink_to(root.parent / "secret")
    os.mkfifo(root / "logs/rank-1.stack")
    (root / "logs/rank-2.stack").write_text("in f")
    (root / "events.jsonl").write_text('{"event": "end", "stall": "rank 2 waits"}\n')
    found = _stall(RunFolder(root))
    assert found is not None and found["stacks"] == "rank-2\nin f"


def test_what_is_put_in_its_place_at_that_moment_is_not_read(root: Path) -> None:
    """A folder that is a link at every other moment: what is judged is what is read."""
    (root / "inner").mkdir()
    (root / "inner/secret").write_text("known to all")
    link, kept = root / "link", root / "kept"
    link.symlink_to(root.parent)
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            for one in (link, kept):
                os.rename(root / "inner", root / "aside")
                os.rename(one, root / "inner")
                os.rename(root / "aside", kept if one is link else link)

    thread = threading.Thread(target=swap)
    thread.start()
    found = set()
    try:
        for _ in range(3000):
            with suppress(OSError), opened(root, "inner/secret") as file:
                found.add(file.read())
    finally:
        is_over.set()
        thread.join()
    assert found == {b"known to all"}
