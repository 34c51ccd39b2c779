"""Texts become vectors: their letter triples, hashed, seen through a random projection.

Stands for an encoder; `muster map embed --model NAME` takes one of Hugging Face.
"""

import zlib

import numpy as np

PROJECTION = np.random.default_rng(0).standard_normal((4096, 32)) / 32**0.5


def vectors(texts):
    counts = np.zeros((len(texts), 4096))
    for row, text in enumerate(texts):
        for at in range(len(text) - 2):
            counts[row, zlib.crc32(text[at : at + 3].lower().encode()) % 4096] += 1
    found = np.log1p(counts) @ PROJECTION
    return found / np.linalg.norm(found, axis=1, keepdims=True)
