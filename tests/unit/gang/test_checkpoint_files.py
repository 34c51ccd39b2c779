"""Checkpoints on the disk: whole or named as damaged, and nothing in them is ever executed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.base.errors import SetupError
from muster.rank.checkpoint import CheckpointWriter, Snapshot, find_damage, newest_intact, put_back
from muster.rank.checkpoint_files import find_steps, read_shapes, read_tensors, step_folder

TENSORS = {"model/w": torch.arange(12.0).view(3, 4), "model/n": torch.tensor(7)}


def write(folder: Path, *steps: int, keep: int = 9) -> None:
    writer = CheckpointWriter(folder, rank=0, num_ranks=1, keep=keep)
    for step in steps:
        tensors = {name: tensor + step for name, tensor in TENSORS.items()}
        writer.save(Snapshot(step=step, tensors=tensors, extra={"step": step}))
        # Changed at once, as the next step does: what is saved is what was given.
        for tensor in tensors.values():
            tensor.zero_()
    writer.wait()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write(folder, 5)
    return step_folder(folder, 5)


def test_what_comes_back_is_what_was_given_at_the_save(good: Path) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    read_tensors(good, found, process_group=None)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor + 5)
    assert find_damage(good) is None


@examples(60)
@given(data=st.data())
def test_one_changed_byte_anywhere_is_found(good: Path, data: Any) -> None:
    names = sorted(path.name for path in good.iterdir())
    path = good / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[at] ^= other
    path.write_bytes(changed)
    try:
        found = find_damage(good)
    finally:
        path.write_bytes(content)
    # A manifest may be written otherwise and say the same; then nothing is wrong.
    assert found is not None or path.name == "manifest.json"


@examples(30)
@given(data=st.data())
def test_a_file_cut_short_or_gone_is_found(good: Path, data: Any) -> None:
    names = sorted(path.name for path in good.iterdir())
    path = good / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    length = data.draw(st.none() | st.integers(0, len(content) - 1))
    path.unlink()
    if length is not None:
        path.write_bytes(content[:length])
    try:
        found = find_damage(good)
    finally:
        path.write_bytes(content)
    # A manifest without its last line break says the same.
    assert found is not None or content[:length] == content.rstrip()


def test_the_newest_intact_one_is_used_and_the_damaged_one_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    part = step_folder(tmp_path, 3) / "__0_0.distcp"
    part.write_bytes(b"")
    said: list[str] = []
    assert newest_intact(tmp_path, said.append) == 2
    assert len(said) == 1 and "step 3 is damaged" in said[0] and "__0_0.distcp" in said[0]


def test_only_the_last_ones_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert find_steps(tmp_path) == [4, 3]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, 4)
    step_folder(tmp_path, 4).rename(tmp_path / ".aside-step-00000004")
    assert find_steps(tmp_path) == []
    put_back(tmp_path)
    assert find_steps(tmp_path) == [4]
    assert newest_intact(tmp_path, lambda _: None) == 4


class _Call:
    """Pickles as a call of what it is given."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def _with_dots(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls ``name``, which may have dots, of ``module``."""
    parts = [module, name, argument]
    texts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in parts]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Call(os.system, "touch was-here")),
        pickle.dumps(_Call(eval, "open('was-here', 'w')")),
        _with_dots("torch.distributed.checkpoint.filesystem", "os.system", "touch was-here"),
        _with_dots("torch.serialization", "os.system", "touch was-here"),
        _with_dots("torch", "Size.__class__", "touch was-here"),
        b"",
        b"not a pickle",
    ],
)
def test_an_index_that_is_none_is_refused_and_never_run(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "checkpoints", 1)
    checkpoint = step_folder(tmp_path / "checkpoints", 1)
    (checkpoint / ".metadata").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SetupError, match="cannot be read"):
        read_shapes(checkpoint)
    assert not (tmp_path / "was-here").exists()
