"""One process of benchmarks/ssvae_ensemble.py: how much of a core's arithmetic is reached.

python ssvae_flops.py task.json NUM_RUNS result.json

``rate``: operations of matrix products a second while one ensemble of so many runs trains, counted
by torch in one epoch and timed over others; ``most``: the rate of a large product, measured between
the epochs. What is not a product (sigmoids, logarithms, random numbers) is not counted.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from muster_recipes.ssvae import tasks
from muster_recipes.ssvae.ensemble import Ensemble, train_ensemble, train_supervised

EPOCHS, SIZE = 3, 1024


def most() -> float:
    """Operations a second of a product of square matrices."""
    one = torch.randn(SIZE, SIZE)
    begin = time.perf_counter()
    for _ in range(4):
        one @ one
    return 4 * 2 * SIZE**3 / (time.perf_counter() - begin)


def added_product(
    _: torch.Size, one: torch.Size, two: torch.Size, out_shape: object = None, **_scales: object
) -> int:
    """Operations of a product that is added in place, which torch does not count."""
    return 2 * one[0] * one[1] * two[1]


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    work = tasks._work_of({**task, "num_epochs": EPOCHS}, "cpu")
    runs = [tasks._spec_of({**task, "seed": seed}) for seed in range(int(sys.argv[2]))]
    train = {"ssvae": train_ensemble, "supervised": train_supervised}[task["method"]]
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})
    seconds, rates = [], []
    began = time.perf_counter()

    def on_epoch(ensemble: Ensemble) -> None:
        nonlocal began
        if ensemble.epoch == 1:
            counter.__exit__(None, None, None)
        else:
            seconds.append(time.perf_counter() - began)
        rates.append(most())
        began = time.perf_counter()

    counter.__enter__()
    train(work.splits["train"], runs, work.hyper, work.settings, "cpu", on_epoch)
    found = {
        "rate": counter.get_total_flops() / statistics.median(seconds),
        "most": statistics.median(rates),
    }
    Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
