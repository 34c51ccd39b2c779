"""Make src/muster_recipes/digits/digits.npz from scikit-learn, or check the one there.

pip install scikit-learn
python scripts/make_digits.py --check
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

PLACE = Path(__file__).parents[1] / "src" / "muster_recipes" / "digits" / "digits.npz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args()
    from sklearn.datasets import load_digits

    digits = load_digits()
    arrays = {"images": digits.images.astype(np.uint8), "labels": digits.target.astype(np.uint8)}
    if not args.check:
        np.savez_compressed(PLACE, **arrays)
        return 0
    with np.load(PLACE, allow_pickle=False) as kept:
        same = all(np.array_equal(kept[name], array) for name, array in arrays.items())
        same = same and sorted(kept.files) == sorted(arrays)
    sys.stdout.write("the same\n" if same else "NOT the same\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
