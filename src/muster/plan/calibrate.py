"""Measuring a task: a few real steps with ``muster train`` in child processes, without a gang.

Two batches are measured where the plan has two, the whole global batch and one device's share of
it: their difference separates what a step costs from what a sample costs. Ranks on the CPU share
its memory and caches, so there single ranks also run side by side, as many as are planned.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from muster.base.codec import read_json
from muster.base.errors import EXIT_INTERRUPTED, EXIT_USAGE, SetupError, UsageError
from muster.base.settings import child_environment
from muster.base.shown_text import count
from muster.plan.compare import step_seconds
from muster.plan.compute import ComputeTime, Timing, from_timings
from muster.plan.scaling import Crowding
from muster.plan.units import Bytes, Figure, Flops, Seconds, measured
from muster.run.folder import RunFolder

#: ``muster`` as a child that ends when the plan is killed.
_START = (
    "import sys; from muster.base.reaper import die_with_parent; "
    "die_with_parent(int(sys.argv.pop(1))); "
    "from muster.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
_FEWEST_STEPS = 4
#: Limits of the ranks side by side: how many, for about how many seconds, and how many steps.
_MOST_SIDE_BY_SIDE, _SIDE_BY_SIDE_S, _MOST_STEPS = 8, 2.0, 2000


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Measured steps of one batch size. ``compute_s``, ``loading_s``: medians over the steps."""

    samples: int
    compute_s: float
    loading_s: float
    num_steps: int
    global_batch: int
    parameters: int
    precision: str
    peak_memory_mib: float | None
    flops_per_sample: float | None
    kept_bytes_per_sample: float | None
    num_samples: int | None
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured. ``card``: the driver's name of the device, or ``cpu``; ``epochs``: the
    task's.
    """

    compute: ComputeTime
    loading: Figure[Seconds]
    parameters: Figure[int]
    precision: str
    card: str
    global_batch: Figure[int]
    num_samples: Figure[int] | None
    epochs: Figure[int]
    flops_per_sample: Figure[Flops] | None
    activations: Figure[Bytes] | None
    crowding: Crowding | None = None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How to run steps: ``flags`` go to ``muster train``; ``threads``: of a CPU rank."""

    task: str
    flags: tuple[str, ...]
    num_steps: int
    card: str
    threads: int | None = None


def calibrate(
    probe: Probe, global_batch: int | None, num_devices: int, say: Callable[[str], None]
) -> Calibration:
    """Measure the global batch on one device, and one device's share of it.

    Raises what the child complains about: UsageError for a task or flag that is wrong, SetupError
    otherwise.
    """
    say(f"measuring {probe.num_steps} steps of {probe.task} on one device ({probe.card})")
    whole = run_steps(probe, global_batch)
    found = [whole]
    share = -(-whole.global_batch // num_devices)
    if share < whole.samples:
        say(f"measuring {probe.num_steps} steps with {count(share, 'sample')} each")
        found.append(run_steps(probe, share))
    calibration = sum_up(found, probe)
    if probe.card != "cpu" or not 1 < num_devices <= _MOST_SIDE_BY_SIDE:
        return calibration
    say(f"measuring {num_devices} of them side by side")
    crowding = _crowding(probe, found[-1], num_devices)
    return dataclasses.replace(calibration, crowding=crowding)


def _crowding(probe: Probe, alone: Steps, num_devices: int) -> Crowding:
    wanted = int(_SIDE_BY_SIDE_S / max(1e-6, alone.compute_s + alone.loading_s))
    num_steps = min(_MOST_STEPS, max(probe.num_steps, wanted))
    longer = dataclasses.replace(probe, num_steps=num_steps)
    with ThreadPoolExecutor(num_devices) as pool:
        # A quarter of the steps at each end does not count: not all ranks are at work then.
        runs = [
            pool.submit(run_steps, longer, alone.samples, trim=0.25) for _ in range(num_devices)
        ]
        together = median(run.result().compute_s for run in runs)
    source = f"{num_devices} single ranks side by side, {alone.samples} samples each, against one"
    factor = max(1.0, together / alone.compute_s)
    return Crowding(factor=measured(factor, source), num_devices=num_devices)


def sum_up(found: Sequence[Steps], probe: Probe) -> Calibration:
    """Fit a line to the measured steps and collect the rest; ``found`` must not be empty."""
    whole = found[0]
    batches = " and ".join(str(steps.samples) for steps in found)
    threads = "" if probe.threads is None else f", {count(probe.threads, 'thread')}"
    source = f"{whole.num_steps} steps of {batches} samples on {probe.card}{threads}"
    timings = [Timing(steps.samples, Seconds(steps.compute_s)) for steps in found]
    loading = max(steps.loading_s / steps.samples for steps in found)
    return Calibration(
        compute=from_timings(timings, source),
        loading=measured(Seconds(loading), source),
        parameters=measured(whole.parameters, "counted in the model"),
        precision=whole.precision,
        card=probe.card,
        global_batch=measured(whole.global_batch, "the task's own, or as given"),
        num_samples=None
        if whole.num_samples is None
        else measured(whole.num_samples, "the task's training data"),
        epochs=Figure(value=whole.epochs, origin="given", source="the task's own default"),
        flops_per_sample=None
        if whole.flops_per_sample is None
        else measured(Flops(whole.flops_per_sample), "counted by torch in one step"),
        activations=_activations(found),
    )


def _activations(found: Sequence[Steps]) -> Figure[Bytes] | None:
    """The memory of one more sample, in bytes.

    On a GPU it is the slope of peak memory over two batches, else what autograd was seen to keep.
    """
    small, large = found[-1], found[0]
    kept = large.kept_bytes_per_sample
    if large.peak_memory_mib is None and kept is not None:
        return measured(Bytes(kept), f"what autograd keeps for a sample, in {large.precision}")
    if small.peak_memory_mib is None or large.peak_memory_mib is None:
        return None
    if large.samples <= small.samples:
        return None
    slope = (large.peak_memory_mib - small.peak_memory_mib) / (large.samples - small.samples)
    source = f"peak memory with {large.samples} samples less that with {small.samples}"
    return measured(Bytes(max(0.0, slope) * 2**20), source)


def run_steps(probe: Probe, batch: int | None, *, trim: float = 0.0) -> Steps:
    """Run some steps of ``batch`` samples (None: the task's own) in a child process.

    ``trim``: the share of the steps at either end that is not counted.
    """
    with TemporaryDirectory(prefix="muster-plan-") as name:
        folder = RunFolder(Path(name) / "run")
        where = ["--devices", "cpu:1"] if probe.card == "cpu" else ["--max-gpus", "1"]
        size = [] if batch is None else ["--global-batch", str(batch)]
        command = [
            *(sys.executable, "-c", _START, str(os.getpid())),
            *("train", probe.task, *probe.flags, *where, *size),
            *("--max-steps", str(probe.num_steps), "--eval-frequency", "0", "--log-every", "1"),
            *("--checkpoint-interval", "1000000steps", "--no-tensorboard", "--count-work"),
            *("--run-dir", str(folder.path)),
        ]
        threads = {} if probe.threads is None else {"OMP_NUM_THREADS": str(probe.threads)}
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # a user's program may print anything
            check=False,
            env=child_environment(threads),
        )
        if done.returncode != 0:
            raise _refusal(probe.task, done.returncode, done.stderr)
        return read_steps(folder, done.stdout, trim=trim)


def read_steps(folder: RunFolder, printed: str, *, trim: float = 0.0) -> Steps:
    """Read what a training in ``folder`` measured; ``printed`` is its output.

    The first fifth of the steps, or more with ``trim``, is left out: it compiles and allocates.
    """
    results = read_json(folder.training_results, "results of the measured steps")
    seconds = step_seconds(folder)
    first = max(1, int(len(seconds) * max(0.2, trim)))
    counted = seconds[first : len(seconds) - int(len(seconds) * trim)]
    if len(counted) < _FEWEST_STEPS:
        raise SetupError(
            f"Only {len(seconds)} steps could be measured, which is too few.",
            hint="give a smaller --global-batch, or more --calibrate-steps.",
        )
    config = read_json(folder.run_json, "run.json")["spec"]["config"]
    told = re.search(r"parameters, ([\d,]+) samples, ", printed)
    shares = results["measured"]
    typical_s = median(counted) / results["accumulation"]
    loading_s = typical_s * (shares["data_wait_share"] or 0.0)
    waiting_s = typical_s * (shares["communication_share"] or 0.0)
    memory = (shares["peak_memory_mib"] or [None])[0]
    return Steps(
        samples=results["micro_batch"],
        compute_s=typical_s - loading_s - waiting_s,
        loading_s=loading_s,
        num_steps=len(counted),
        global_batch=results["global_batch"],
        parameters=results["parameters"],
        precision=str(results["precision"]).partition(" ")[0],
        peak_memory_mib=memory,
        flops_per_sample=shares.get("flops_per_sample"),
        kept_bytes_per_sample=shares.get("kept_bytes_per_sample"),
        num_samples=int(told[1].replace(",", "")) if told else None,
        epochs=int(config["epochs"]),
    )


def _refusal(task: str, exit_code: int, errors: str) -> BaseException:
    if exit_code == EXIT_INTERRUPTED:
        return KeyboardInterrupt()
    lines = [line for line in errors.strip().splitlines() if line.strip()][-12:]
    text = "\n".join(line.removeprefix("muster: ") for line in lines)
    kind = UsageError if exit_code == EXIT_USAGE else SetupError
    return kind(f"The steps of {task} that were to be measured failed:\n{text}")
