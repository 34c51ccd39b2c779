"""Students per second of the fused CPU sampler of the recipe `ssm`, on one core.

    python benchmarks/ssm_sampler.py [--quick] [--repeats 7] [--dim 150] [--json FILE]

Compared are, in turn within every repeat so that a busy machine slows all alike:

- fused: `muster_recipes.ssm.sampler.sample_blocks` on the CPU;
- straightforward torch: randn [B, d], powers [B, d, K] stacked, summed over d, losses by einsum
  (B is the best of three sizes, chosen before the timing);
- the raw rate of normal draws, divided by d: numpy's with the same bit generator (SFC64, float32,
  ziggurat) and torch.randn (Mersenne Twister, vectorised).

The share of a raw rate may exceed 1: the fused sampler never computes the two normals of a pair.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, table, write_json
from muster_recipes.ssm.sampler import Block, sample_blocks

H = [0.5**m for m in range(1, 5)]
W = [(1.0, 0.0, 0.0, 0.0)]
EPS = 1e-5
GOAL_RATIO = 4.0
GOAL_SHARE = 0.6
STRAIGHT_BATCHES = (256, 4_096, 65_536)
NORMALS = 1 << 16  # a buffer that stays in the cache


def straightforward(dim: int, num_samples: int, batch: int) -> None:
    """The sampler as one would write it first."""
    generator = torch.Generator().manual_seed(1)
    h, w = torch.tensor(H), torch.tensor(W)
    for start in range(0, num_samples, batch):
        count = min(batch, num_samples - start)
        a = torch.randn(count, dim, generator=generator) / math.sqrt(dim)
        errors = torch.stack([a**m for m in range(1, len(H) + 1)], dim=-1).sum(dim=1) - h
        train = torch.einsum("bk,nk->bn", errors, w).square().mean(dim=1)
        gen = errors.square().sum(dim=1)
        gen[train < EPS].sum().item(), gen.sum().item()


def fused(dim: int, num_samples: int) -> None:
    sample_blocks([Block(h=H, w=W, dim=dim, num_samples=num_samples, seed=1, eps=EPS)], "cpu")


def numpy_normals(dim: int, num_samples: int) -> None:
    generator = np.random.Generator(np.random.SFC64(1))
    out = np.empty(NORMALS, dtype=np.float32)
    for _ in range(max(1, dim * num_samples // NORMALS)):
        generator.standard_normal(dtype=np.float32, out=out)


def torch_normals(dim: int, num_samples: int) -> None:
    generator = torch.Generator().manual_seed(1)
    out = torch.empty(NORMALS)
    for _ in range(max(1, dim * num_samples // NORMALS)):
        out.normal_(generator=generator)


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_batch(dim: int, num_samples: int) -> int:
    """The batch that is kindest to the straightforward form."""
    timed = {b: seconds(lambda b=b: straightforward(dim, num_samples, b)) for b in STRAIGHT_BATCHES}
    return min(timed, key=timed.__getitem__)


def measure(dim: int, num_samples: int, repeats: int) -> dict[str, list[float]]:
    """Students per second of every form, one number per repeat."""
    batch = best_batch(dim, max(num_samples // 8, max(STRAIGHT_BATCHES)))
    forms: dict[str, Callable[[int, int], None]] = {
        "fused": fused,
        f"straightforward torch (B={batch})": lambda d, n: straightforward(d, n, batch),
        "raw normals, numpy SFC64": numpy_normals,
        "raw normals, torch.randn": torch_normals,
    }
    rates: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form(dim, max(1, num_samples // 20))  # first calls allocate and choose code paths
    for _ in range(repeats):
        for name, form in forms.items():
            rates[name].append(num_samples / seconds(lambda f=form: f(dim, num_samples)))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a tenth of the students")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    num_samples = (40_000 if options.quick else 400_000) * 150 // options.dim
    rates = measure(options.dim, num_samples, options.repeats)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"d = {options.dim}, {num_samples} students per repeat, {options.repeats} repeats, 1 core"
    )
    rows = [[name, f"{medians[name]:,.0f}", f"[{min(values):,.0f}–{max(values):,.0f}]"]
            for name, values in rates.items()]  # fmt: skip
    table(["", "students/s", "range"], rows)
    one, straight, same, other = medians
    for name, (value, wanted) in {
        "ratio to straightforward torch": (medians[one] / medians[straight], GOAL_RATIO),
        "share of raw normals, numpy SFC64": (medians[one] / medians[same], GOAL_SHARE),
        "share of raw normals, torch.randn": (medians[one] / medians[other], GOAL_SHARE),
    }.items():
        goal(f"students of ssm, {name}", f"≥ {wanted:g}", f"{value:.2f}", value >= wanted)
    write_json(
        options.json,
        {"dim": options.dim, "num_samples": num_samples, "students_per_s": rates},
    )


if __name__ == "__main__":
    main()
