"""Readers of the embedded digits and of the published files of MNIST, Fashion-MNIST and CIFAR-10.

Nothing is unpickled, and torch stays out.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from muster import UsageError

#: uint8 pixels [n, channels, height, width] and labels [n].
Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_IDX_UINT8 = 0x08
_IDX_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_TEST = ("test_batch.bin",)
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
#: Of MNIST, Fashion-MNIST and CIFAR-10 as of the embedded digits.
NUM_CLASSES = 10
#: Of each class: the test images of the embedded digits, which have no test set of their own, and
#: the validation images of every set.
TEST_SHARE, VAL_SHARE = 0.2, 0.1
_AGAIN = "the download was cut short or the file was changed: fetch it again."


def read_digits() -> Arrays:
    """The 1,797 8x8 digits of scikit-learn's ``load_digits``, with values 0 to 16.

    They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
    C. Kaynak (1998), UCI Machine Learning Repository, doi 10.24432/C50P49, licence CC BY 4.0;
    taken from scikit-learn (BSD 3-Clause) by scripts/make_digits.py, which also compares.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        return file["images"][:, None], file["labels"]


def read_mnist(folder: Path) -> tuple[Arrays, Arrays]:
    """Train and test from the four IDX files, each with or without ``.gz``."""
    train, test = (_read_idx_pair(folder, *names) for names in _IDX_NAMES.values())
    if train[0].shape[2:] != test[0].shape[2:]:
        raise UsageError(
            f"{folder}: the training images are {_size(train[0])} and the test images "
            f"{_size(test[0])}; the files are of different data sets."
        )
    return train, test


def read_cifar10(folder: Path) -> tuple[Arrays, Arrays]:
    """Train and test from the binary version, in ``folder`` or its ``cifar-10-batches-bin``."""
    inner = folder / "cifar-10-batches-bin"
    root = inner if inner.is_dir() else folder
    if not (root / _CIFAR_TRAIN[0]).exists() and (
        (folder / "data_batch_1").exists() or (folder / "cifar-10-batches-py").is_dir()
    ):
        raise UsageError(
            f"{folder} holds the Python version of CIFAR-10, which is pickled: loading it would "
            "run code from the files.",
            hint="use the binary version, cifar-10-binary.tar.gz.",
        )
    train = [_read_cifar_batch(root / name) for name in _CIFAR_TRAIN]
    pixels = np.concatenate([batch[0] for batch in train])
    labels = np.concatenate([batch[1] for batch in train])
    return (pixels, labels), _read_cifar_batch(root / _CIFAR_TEST[0])


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes with ``num_dims`` dimensions.

    The format: two zero bytes, type, number of dimensions, each size as a big-endian 32-bit
    number, then the values.
    """
    path, data = _read_bytes(path)
    start = 4 + 4 * num_dims
    magic = bytes([0, 0, _IDX_UINT8, num_dims])
    if data[:4] != magic:
        raise UsageError(
            f"{path} begins with {data[:4].hex(' ') or 'nothing'} instead of {magic.hex(' ')}: it "
            "is not an IDX file of unsigned bytes with "
            f"{num_dims} dimension{'s' * (num_dims > 1)}.",
            hint="a file saved under the wrong name, or a web page in its place?",
        )
    if len(data) < start:
        raise UsageError(f"{path} ends after {len(data)} bytes, within its header.", hint=_AGAIN)
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], ">u4"))
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise UsageError(
            f"{path} has {len(data)} bytes, but its header announces {expected}.",
            hint=_AGAIN,
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


def _read_idx_pair(folder: Path, images: str, labels: str) -> Arrays:
    pixels, classes = read_idx(folder / images, 3), read_idx(folder / labels, 1)
    if len(pixels) != len(classes):
        raise UsageError(
            f"{folder / images} has {len(pixels)} images, but {labels} has {len(classes)} labels."
        )
    _check_classes(folder / labels, classes)
    if pixels.shape[1] < 8 or pixels.shape[2] < 8:
        raise UsageError(f"{folder / images}: images of {_size(pixels)} are smaller than 8x8.")
    return pixels[:, None], classes


def _read_cifar_batch(path: Path) -> Arrays:
    path, data = _read_bytes(path)
    if len(data) % _CIFAR_RECORD or not data:
        raise UsageError(
            f"{path} has {len(data)} bytes, which is not a number of records of {_CIFAR_RECORD} "
            "bytes (a label and 3x32x32 pixels).",
            hint="the download was cut short or this is not the binary version.",
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR_RECORD)
    _check_classes(path, records[:, 0])
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE).copy(), records[:, 0].copy()


def _check_classes(path: Path, labels: NDArray[np.uint8]) -> None:
    if not len(labels):
        raise UsageError(f"{path} holds no samples.")
    if labels.max() >= NUM_CLASSES:
        where = int(labels.argmax())
        raise UsageError(
            f"{path}: label {where} is {labels[where]}, but there are classes 0 to "
            f"{NUM_CLASSES - 1} only."
        )


def _read_bytes(path: Path) -> tuple[Path, bytes]:
    """The path that exists, with or without ``.gz``, and what it holds, unpacked."""
    packed = path.with_name(f"{path.name}.gz")
    found = path if path.exists() else packed
    try:
        data = found.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist, packed (.gz) or not.",
            hint="--data-dir names the folder that holds the published files; nothing is "
            "downloaded.",
        ) from None
    except OSError as error:
        raise UsageError(f"Cannot read {found}: {error.strerror}.") from None
    if found == packed:
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(
                f"{found} cannot be unpacked: {error}.",
                hint=_AGAIN,
            ) from None
    return found, data


def _size(pixels: NDArray[np.uint8]) -> str:
    return f"{pixels.shape[-2]}x{pixels.shape[-1]}"
