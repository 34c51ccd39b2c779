"""A copy of a run folder is another folder, however it was made."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.run.folder import RunFolder
from muster.run.record import own_id


def _hard_links(old: Path, new: Path) -> None:
    shutil.copytree(old, new, copy_function=os.link)


def _archive(old: Path, new: Path) -> None:
    """Unpacked over a folder that is there."""
    shutil.copytree(old, new)
    own_id(RunFolder(new))
    with tarfile.open(new.with_suffix(".tar"), "w") as archive:
        archive.add(old, arcname=new.name)
    with tarfile.open(new.with_suffix(".tar")) as archive:
        archive.extractall(new.parent, filter="data")


def _damaged(old: Path, new: Path) -> None:
    shutil.copytree(old, new)
    RunFolder(new).identity_json.write_text("{torn")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.pilots.mkdir()
    folder.pilot_assignment.write_text("{}")
    return folder


def test_it_is_drawn_once_and_kept(folder: RunFolder) -> None:
    first = own_id(folder)
    assert own_id(folder) == first
    assert not first.is_new_copy
    assert folder.pilot_assignment.exists()


def test_a_folder_that_is_renamed_stays_the_same(folder: RunFolder) -> None:
    first = own_id(folder)
    moved = RunFolder(folder.path.rename(folder.path.with_name("moved")))
    assert own_id(moved) == first


@pytest.mark.parametrize("copy", [shutil.copytree, _hard_links, _archive, _damaged])
def test_a_copy_is_another_and_the_original_stays(
    folder: RunFolder, copy: Callable[[Path, Path], object]
) -> None:
    first = own_id(folder)
    copied = RunFolder(folder.path.with_name("copy"))
    copy(folder.path, copied.path)

    found = own_id(copied)

    assert found.is_new_copy and found.text != first.text
    assert not copied.pilot_assignment.exists()
    assert own_id(copied) == found._replace(is_new_copy=False)
    assert own_id(folder) == first
