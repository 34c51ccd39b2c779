"""Reader of the UCI-HAR folder: ``{train,test}/Inertial Signals/*.txt``, ``y_*``, ``subject_*``.

Anguita et al., "Human Activity Recognition Using Smartphones" (2013), UCI Machine Learning
Repository, doi 10.24432/C54S4K. Each line of a signal file is one window of 128 numbers.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from muster import UsageError
from muster_recipes.har.windows import CHANNELS, CLASSES, NUM_STEPS, Windows

_INNER = "UCI HAR Dataset"  # the folder that the published archive unpacks to


def read_uci(folder: Path) -> tuple[Windows, Windows]:
    """The windows of ``train`` and of ``test``; UsageError names what is missing or damaged."""
    root = folder / _INNER if (folder / _INNER).is_dir() else folder
    if not (root / "train").is_dir() or not (root / "test").is_dir():
        raise UsageError(
            f"--data-dir {folder} has no folders train and test.",
            hint='unpack the archive of UCI-HAR and name the folder "UCI HAR Dataset".',
        )
    train, test = _read_part(root, "train"), _read_part(root, "test")
    shared = np.intersect1d(train.subjects, test.subjects).tolist()
    if shared:
        raise UsageError(
            f"{root}: train and test have subjects in common ({', '.join(map(str, shared))}), so "
            "the test would be of people that the training knows.",
            hint="subject_train.txt and subject_test.txt of the published set share none.",
        )
    return train, test


def _read_part(root: Path, part: str) -> Windows:
    path = root / part / f"y_{part}.txt"
    labels = _read_numbers(path, 1)[:, 0]
    known = np.isin(labels, np.arange(1, len(CLASSES) + 1))
    if not known.all():
        wrong = labels[~known][0]
        raise UsageError(f"{path}: label {wrong:g} is not a class from 1 to {len(CLASSES)}.")
    subjects_path = root / part / f"subject_{part}.txt"
    subjects = _read_numbers(subjects_path, 1)[:, 0]
    _check_count(subjects_path, len(subjects), path, len(labels))
    signals = np.empty((len(labels), len(CHANNELS), NUM_STEPS), np.float32)
    for number, channel in enumerate(CHANNELS):
        file = root / part / "Inertial Signals" / f"{channel}_{part}.txt"
        values = _read_numbers(file, NUM_STEPS)
        _check_count(file, len(values), path, len(labels))
        signals[:, number] = values
    return Windows(signals, labels.astype(np.int64) - 1, subjects.astype(np.int64))


def _check_count(file: Path, found: int, labels: Path, expected: int) -> None:
    if found != expected:
        raise UsageError(
            f"{file} has {found} lines, but {labels.name} has {expected}: a line is a window.",
            hint="one of the two was cut short; unpack the archive again.",
        )


def _read_numbers(path: Path, num_columns: int) -> NDArray[np.float64]:
    """All lines of a text file of numbers, [lines, columns]."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty file is refused below
            values = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist.", hint="--data-dir names the unpacked UCI-HAR folder."
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise UsageError(f"{path} is damaged: {error}.") from None
    if not values.size:
        raise UsageError(f"{path} is empty.")
    if values.shape[1] != num_columns:
        raise UsageError(f"{path} has {values.shape[1]} numbers per line instead of {num_columns}.")
    if not np.isfinite(values).all():
        line = int(np.argmin(np.isfinite(values).all(1)))
        raise UsageError(f"{path}, line {line + 1}: a number is not finite.")
    return values
