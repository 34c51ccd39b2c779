"""Readers of published formats, on files written here byte by byte, whole and damaged."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.recipes.digits.published_files import (
    PARTS,
    idx_images,
    write_cifar,
    write_mnist,
)

from muster import UsageError
from muster_recipes.digits.files import read_cifar10, read_mnist


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_files_come_back(tmp_path: Path, packed: bool) -> None:
    written = write_mnist(tmp_path, packed=packed)
    for (pixels, labels), part in zip(read_mnist(tmp_path), ("train", "t10k"), strict=True):
        assert pixels.shape == (PARTS[part], 1, 28, 28)
        assert (pixels[:, 0] == written[part][0]).all()
        assert (labels == written[part][1]).all()


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar_files_come_back(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    written = write_cifar(tmp_path / inner)
    (pixels, labels), (test_pixels, test_labels) = read_cifar10(tmp_path)
    assert (pixels == np.concatenate([batch[0] for batch in written[:5]])).all()
    assert (labels == np.concatenate([batch[1] for batch in written[:5]])).all()
    assert (test_pixels == written[5][0]).all()
    assert (test_labels == written[5][1]).all()


def cut(data: bytes) -> bytes:
    return data[:-7]


def longer(data: bytes) -> bytes:
    return data + b"\0"


def empty(data: bytes) -> bytes:
    return b""


def web_page(data: bytes) -> bytes:
    return b"<html>not here</html>"


def headless(data: bytes) -> bytes:
    return data[:6]


def signed(data: bytes) -> bytes:
    return b"\0\0\x09" + data[3:]


def one_less(data: bytes) -> bytes:
    return data[:4] + struct.pack(">I", 29) + data[8:-1]


def wrong_class(data: bytes) -> bytes:
    return data[:8] + b"\x0a" + data[9:]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-images-idx3-ubyte", cut, "has 23529 bytes, but its header announces 23536"),
        ("train-images-idx3-ubyte", longer, "has 23537 bytes, but its header announces 23536"),
        ("train-images-idx3-ubyte", empty, "begins with nothing instead of 00 00 08 03"),
        ("train-images-idx3-ubyte", web_page, "begins with 3c 68 74 6d instead"),
        ("train-images-idx3-ubyte", headless, "ends after 6 bytes, within its header"),
        ("train-images-idx3-ubyte", signed, "begins with 00 00 09 03 instead"),
        ("train-labels-idx1-ubyte", one_less, "has 30 images, but .* has 29 labels"),
        ("t10k-labels-idx1-ubyte", wrong_class, "label 0 is 10, but there are classes 0 to 9"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_idx_file_is_named(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str, packed: bool
) -> None:
    write_mnist(tmp_path, packed=False)
    path = tmp_path / name
    data = damage(path.read_bytes())
    if packed:
        path.unlink()
        path = path.with_name(f"{name}.gz")
        data = gzip.compress(data)
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        read_mnist(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("damage", [cut, web_page, headless])
def test_a_damaged_gz_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"t10k-images-idx3-ubyte\.gz cannot be unpacked"):
        read_mnist(tmp_path)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=True)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte does not exist") as caught:
        read_mnist(tmp_path)
    assert "nothing is downloaded" in str(caught.value)


def test_parts_of_different_sets_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    pixels = np.zeros((20, 16, 16))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_images(pixels))
    with pytest.raises(UsageError, match="28x28 and the test images 16x16"):
        read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "has 36869 bytes, which is not a number of records of 3073 bytes"),
        (empty, "has 0 bytes"),
        (lambda data: b"\x0b" + data[1:], "label 0 is 11"),
    ],
)
def test_a_damaged_cifar_batch_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_cifar(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=message) as caught:
        read_cifar10(tmp_path)
    assert "data_batch_3.bin" in str(caught.value)


@pytest.mark.parametrize("name", ["data_batch_1", "cifar-10-batches-py/data_batch_1"])
def test_pickled_cifar_is_refused_not_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UsageError, match="pickled: loading it would run code"):
        read_cifar10(tmp_path)
