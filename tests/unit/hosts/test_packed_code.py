"""A user's code as a tar file: what is in it, and what is laid out of it."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from muster.base.errors import SetupError
from muster.hosts.code import find_code, pack_code, unpack_code


def test_code_is_what_a_person_has_written(tmp_path: Path) -> None:
    for name in ("train.py", "package/inner.py", "conf/a.json", ".git/objects/x", ".env",
                 "package/__pycache__/inner.pyc", "venv/pyvenv.cfg", "venv/lib/torch.py",
                 "runs/one/run.json", "runs/one/run.lock", "runs/one/logs/worker-0.log",
                 "package/presets/run.json"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert sorted(find_code(tmp_path).files) == [
        "conf/a.json", "package/inner.py", "package/presets/run.json", "train.py",
    ]  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Also by root, who may read all: this one gives an error in place of its contents."""
    (tmp_path / "train.py").symlink_to("/proc/self/mem")
    with pytest.raises(SetupError, match=r"Cannot read .*train\.py"):
        pack_code([tmp_path])


def test_links_to_folders_of_the_code_are_followed_and_none_forever(tmp_path: Path) -> None:
    """They were left out without a word."""
    code, outside = tmp_path / "code", tmp_path / "outside"
    for folder in (code / "a", code / "b", outside):
        folder.mkdir(parents=True)
        (folder / "m.py").touch()
    links = {"lib": "a", "out": outside, "self": ".", "a/b": "../b", "b/a": "../a", "loop": "loop"}
    for name, to in links.items():
        (code / name).symlink_to(to)
    found = find_code(code).files
    assert sorted(found) == ["a/b/m.py", "a/m.py", "b/a/m.py", "b/m.py", "lib/m.py"]


def test_code_arrives_as_it_was_and_the_same_code_is_the_same_file(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (home / "package").mkdir(parents=True)
    (home / "package" / "m.py").write_text("x = 1\n")
    (home / "tool.sh").write_text("#!/bin/sh\n")
    (home / "tool.sh").chmod(0o4777)
    other.mkdir()
    packed = pack_code([home, other])
    (home / "package" / "m.py").touch()
    assert pack_code([home, other]) == packed
    unpack_code(io.BytesIO(packed), tmp_path / "to")
    found = sorted(str(p.relative_to(tmp_path / "to")) for p in (tmp_path / "to").rglob("*"))
    assert found == ["0", "0/package", "0/package/m.py", "0/tool.sh", "1"]
    assert (tmp_path / "to" / "0" / "package" / "m.py").read_text() == "x = 1\n"
    assert stat.S_IMODE((tmp_path / "to" / "0" / "tool.sh").stat().st_mode) == 0o755


def test_too_much_code_is_refused_with_what_is_large(tmp_path: Path) -> None:
    """Each folder had the limit for itself where it went through Ray."""
    for name, size in (("a/data.bin", 3 << 20), ("b/more.bin", 2 << 20), ("b/small.py", 1)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    roots = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(SetupError, match=r"5 MiB, of which data.bin has 3. At most 4 MiB are sent"):
        pack_code(roots, 4 << 20)
    assert pack_code(roots, 6 << 20)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "link"])
def test_only_files_below_a_folder_of_code_are_unpacked(tmp_path: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/tmp"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(member)
    packed.seek(0)
    with pytest.raises(ValueError, match="not a file below"):
        unpack_code(packed, tmp_path / "to")
    assert not (tmp_path / "x").exists() and not (tmp_path / "to" / "link").exists()
