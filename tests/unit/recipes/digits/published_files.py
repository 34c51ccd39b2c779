"""The published files of MNIST and CIFAR-10 in small, byte by byte from their descriptions."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

PARTS = {"train": 30, "t10k": 20}


def idx_images(pixels: np.ndarray) -> bytes:
    return struct.pack(">IIII", 0x803, *pixels.shape) + pixels.astype(np.uint8).tobytes()


def idx_labels(labels: np.ndarray) -> bytes:
    return struct.pack(">II", 0x801, len(labels)) + labels.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, packed: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    stream, written = np.random.default_rng(0), {}
    for part, count in PARTS.items():
        pixels = stream.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count) % 10
        written[part] = (pixels, labels)
        for name, data in (
            (f"{part}-images-idx3-ubyte", idx_images(pixels)),
            (f"{part}-labels-idx1-ubyte", idx_labels(labels)),
        ):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
    return written


def write_cifar(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    stream, written = np.random.default_rng(0), []
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        labels = stream.integers(0, 10, 12, dtype=np.uint8)
        pixels = stream.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
        records = [
            bytes([label]) + image.tobytes() for label, image in zip(labels, pixels, strict=True)
        ]
        (folder / name).write_bytes(b"".join(records))
        written.append((pixels, labels))
    return written
