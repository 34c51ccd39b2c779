"""One process of benchmarks/ssvae_ensemble.py: what ensembles would gain on a GPU, by reckoning.

python ssvae_planned.py task.json NUM_RUNS result.json

The kernels of one training step are counted on tensors without data (device "meta", on which the
recipe takes the path of a GPU): for each, the floating-point operations as torch counts them, and
the bytes of what it reads and writes. A kernel lasts as long as the longest of three: its
operations at ``REACHED`` of the card's fp32 peak, its bytes at ``REACHED`` of its bandwidth, and
``LEAST``. The host starts one after another, each in the time of an operator on the host of this
machine, measured with a model so small that its arithmetic is nothing. A step lasts as long as the
longer of the two sides.

``seconds``: of a step, by card and number of runs at once (1: alone). ``kernels``: of a step.
``host``: seconds of the host for each. ``steps``: of a run. ``start``: seconds until a process
could train, measured here, without the GPU's own start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from muster.devices.cards import find_card
from muster_recipes.ssvae import tasks
from muster_recipes.ssvae.config import Hyper
from muster_recipes.ssvae.ensemble import begin
from muster_recipes.ssvae.networks import class_logits, init_parameters
from muster_recipes.ssvae.noise import step_noise
from muster_recipes.ssvae.objective import objective

CARDS = ("RTX 4090", "A100 80GB SXM", "H100 SXM")
#: The share of a data sheet's figures that a kernel reaches: assumed, and generous to both sides.
REACHED = 0.7
#: Seconds of the shortest kernel, from its start to that of the next: assumed.
LEAST = 2e-6


class Kernel(NamedTuple):
    operations: int
    bytes: int


class Kernels(TorchDispatchMode):
    """Records every operator that is not a mere view."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in _NO_KERNELS:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            # An operand that is broadcast is read once.
            size = sum(min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) * t.element_size() for t in tensors)  # fmt: skip  # noqa: E501
            count = flop_registry.get(func.overloadpacket)
            operations = 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            self.found.append(Kernel(operations, size))
        return out


#: What allocates or gives a name, and starts nothing on a GPU.
_NO_KERNELS = {
    torch.ops.aten.detach,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten._unsafe_view,
    torch.ops.aten._reshape_alias,
}


class Steps:
    """Training steps of ``num_runs`` at once, as in `train_ensemble` and `train_supervised`."""

    def __init__(self, task: dict[str, Any], num_runs: int, hyper: Hyper, batch: int, device: str) -> None:  # fmt: skip  # noqa: E501
        self.hyper, self.device, self.batch = hyper, device, batch
        self.is_exact = task["method"] == "ssvae"
        settings = tasks._work_of(task, "cpu").settings
        runs = [tasks._spec_of({**task, "seed": seed}) for seed in range(num_runs)]

        def initial(seeds: Any) -> Any:
            every = init_parameters(hyper, seeds)
            wanted = ("encoder", "classifier", *(("style", "decoder", "pixels") * self.is_exact))
            return {name: value for name, value in every.items() if name.startswith(wanted)}

        self.ensemble = begin(initial, runs, settings, device, torch.float32, None)
        whole = torch.zeros(num_runs, 1000, hyper.num_pixels, device=device)
        self.x = whole
        self.labels = torch.zeros(num_runs, 1000, dtype=torch.int64, device=device)
        self.known = torch.zeros(num_runs, 1000, dtype=torch.bool, device=device)
        self.order = torch.zeros(num_runs, batch, dtype=torch.int64, device=device)
        self.rows = torch.arange(num_runs, device=device).unsqueeze(1)
        self.seeds = torch.zeros(num_runs, dtype=torch.int64, device=device)
        self.alpha = torch.ones(num_runs, device=device)
        self.total = torch.zeros(num_runs, device=device, dtype=torch.float64)

    def step(self) -> None:
        self.forward_and_backward()
        self.ensemble.optimizer.step()
        self.ensemble.optimizer.zero_grad(set_to_none=True)

    def forward_and_backward(self) -> None:
        x, labels = self.x[self.rows, self.order], self.labels.gather(1, self.order)
        if self.is_exact:
            noise = step_noise(self.hyper, self.seeds, 0, self.batch, self.device)
            terms = objective(
                self.ensemble.parameters, x, labels, self.known.gather(1, self.order),
                self.alpha, noise, self.hyper,
            )  # fmt: skip
            losses = -terms.objective.mean(1)
        else:
            logits = class_logits(self.ensemble.parameters, x).logits
            each = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            losses = each.view(len(x), -1).mean(1)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self.total += losses.detach()


def kernels_of(task: dict[str, Any], num_runs: int, hyper: Hyper, batch: int) -> list[Kernel]:
    steps = Steps(task, num_runs, hyper, batch, "meta")
    with Kernels() as kernels:
        steps.forward_and_backward()
    # The fused Adam, which takes no tensors of this device, reads a weight, its gradient and two
    # means, and writes three of them.
    weights = sum(4 * weight.numel() for weight in steps.ensemble.parameters.values())
    return [*kernels.found, Kernel(0, 7 * weights)]


def host_seconds(task: dict[str, Any]) -> float:
    """Seconds of the host for one operator, with tensors of a few numbers on the CPU."""
    hyper = Hyper(num_pixels=2, num_classes=2, num_style=1, num_hidden=2, num_samples=1)
    steps = Steps(task, 1, hyper, 1, "cpu")
    for _ in range(50):
        steps.step()
    with Kernels() as kernels:
        steps.step()
    begun = time.thread_time()
    for _ in range(500):
        steps.step()
    return (time.thread_time() - begun) / 500 / len(kernels.found)


def seconds_of(kernels: list[Kernel], card: str, host: float) -> float:
    """Seconds of a step with these kernels."""
    found = find_card(card)
    assert found is not None
    peak, bandwidth = REACHED * found.fp32_tflops * 1e12, REACHED * found.bandwidth_gb_s * 1e9
    device = sum(max(k.operations / peak, k.bytes / bandwidth, LEAST) for k in kernels)
    return max(device, host * len(kernels))


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    work = tasks._work_of(task, "cpu")
    counts = {n: kernels_of(task, n, work.hyper, task["batch_size"]) for n in (1, int(sys.argv[2]))}
    host = host_seconds(task)
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import muster_recipes.ssvae.tasks"], check=True)
    found = {
        "host": host,
        "start": time.perf_counter() - begun,
        "kernels": {n: len(kernels) for n, kernels in counts.items()},
        "steps": work.settings.num_epochs
        * -(-len(work.splits["train"].labels) // task["batch_size"]),
        "seconds": {
            card: {n: seconds_of(kernels, card, host) for n, kernels in counts.items()}
            for card in CARDS
        },
    }
    Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
