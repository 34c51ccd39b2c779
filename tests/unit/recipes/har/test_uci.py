"""The reader of the UCI-HAR folder, on a small one written here, whole and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muster import UsageError
from muster_recipes.har.config import HarConfig
from muster_recipes.har.task import HarTask
from muster_recipes.har.uci import read_uci
from muster_recipes.har.windows import CHANNELS

_SUBJECTS = {"train": [1, 1, 3, 3, 5, 5, 7], "test": [2, 4, 2]}


def write_uci(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """In the published layout: one line per window, `%15.7e` numbers, classes from 1."""
    stream, written = np.random.default_rng(0), {}
    for part, subjects in _SUBJECTS.items():
        count = len(subjects)
        signals = stream.normal(size=(count, 9, 128))
        labels = np.arange(count) % 6 + 1
        (folder / part / "Inertial Signals").mkdir(parents=True)
        for number, channel in enumerate(CHANNELS):
            lines = ["".join(f"{value:16.7e}" for value in row) for row in signals[:, number]]
            path = folder / part / "Inertial Signals" / f"{channel}_{part}.txt"
            path.write_text("\n".join(lines) + "\n")
        (folder / part / f"y_{part}.txt").write_text("".join(f"{label}\n" for label in labels))
        (folder / part / f"subject_{part}.txt").write_text("".join(f"{s}\n" for s in subjects))
        written[part] = (signals, labels)
    return written


def test_channels_have_the_order_of_the_published_names() -> None:
    assert CHANNELS == (
        "body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z",
        "total_acc_x", "total_acc_y", "total_acc_z",
    )  # fmt: skip


@pytest.mark.parametrize("inner", [".", "UCI HAR Dataset"])
def test_the_files_come_back(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    written = write_uci(tmp_path / inner)
    for windows, part in zip(read_uci(tmp_path), ("train", "test"), strict=True):
        signals, labels = written[part]
        np.testing.assert_allclose(windows.signals, signals, rtol=1e-6, atol=1e-7)
        assert windows.signals.dtype == np.float32
        assert (windows.labels == labels - 1).all()
        assert windows.subjects.tolist() == _SUBJECTS[part]


def test_the_task_uses_the_folder_and_says_so(tmp_path: Path) -> None:
    write_uci(tmp_path)
    task = HarTask(HarConfig(data_dir=tmp_path))
    assert task.config.data == "uci-har"
    splits = task.splits
    assert sorted(set(splits["test"].subjects.tolist())) == [2, 4]
    known = {*splits["train"].subjects.tolist(), *splits["val"].subjects.tolist()}
    assert known == {1, 3, 5, 7}
    assert len(splits["train"]) + len(splits["val"]) == 7


def drop_line(text: str) -> str:
    return "\n".join(text.splitlines()[:-1]) + "\n"


def drop_number(text: str) -> str:
    return "\n".join(line[:-16] for line in text.splitlines()) + "\n"


def cut(text: str) -> str:
    return text[:-40]


SIGNAL = "train/Inertial Signals/body_gyro_y_train.txt"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (SIGNAL, drop_line, "has 6 lines, but y_train.txt has 7: a line is a window"),
        (SIGNAL, drop_number, "has 127 numbers per line instead of 128"),
        (SIGNAL, cut, "is damaged"),
        (SIGNAL, lambda text: text.replace("e-0", "x-0", 1), "is damaged"),
        (SIGNAL, lambda text: "nan " + text.lstrip().split(maxsplit=1)[1], "line 1: .*not finite"),
        (SIGNAL, lambda text: "", "is empty"),
        ("test/y_test.txt", lambda text: text.replace("2", "7"), "label 7 is not a class"),
        ("test/y_test.txt", lambda text: text.replace("2", "2.5"), "label 2.5 is not a class"),
        ("test/y_test.txt", lambda text: "\x00\xff", "is damaged"),
        ("train/subject_train.txt", drop_line, "subject_train.txt has 6 lines"),
        ("test/subject_test.txt", lambda text: "2\n3\n2\n", "subjects in common .3."),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, name: str, damage: Callable[[str], str], message: str
) -> None:
    write_uci(tmp_path)
    path = tmp_path / name
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match=message):
        read_uci(tmp_path)


@pytest.mark.parametrize("name", [SIGNAL, "test/y_test.txt", "train/subject_train.txt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_uci(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=f"{Path(name).name} does not exist"):
        read_uci(tmp_path)


def test_a_folder_without_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no folders train and test"):
        read_uci(tmp_path)


def test_one_subject_cannot_be_split(tmp_path: Path) -> None:
    write_uci(tmp_path)
    (tmp_path / "train" / "subject_train.txt").write_text("1\n" * 7)
    with pytest.raises(UsageError, match=r"of 1 subject; at least 2 are needed"):
        _ = HarTask(HarConfig(data_dir=tmp_path)).splits
