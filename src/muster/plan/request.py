"""What is asked of a plan: one frozen value, whose fields are the flags of ``muster plan``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from muster.base.errors import UsageError
from muster.devices.cards import Precision
from muster.plan.memory import Optimizer

KindOfWork = Literal["transformer", "convolution", "other"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The training that is predicted: what a step computes, and on which devices.

    First what is trained, then what a step takes where it is not measured, then how the devices are
    joined, fed and paid for.
    """

    devices: str | None = None
    """"H100 SXM x8", "RTX 4090 x1, RTX 3090 x1", 8 (of the card here), cpu:2. Default: all here."""
    global_batch: int | None = None
    """Samples per optimizer step over all devices. Default: the task's."""
    batch_size: int | None = None
    """Most samples at once on a device; more are accumulated."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How the model is spread over the devices."""
    precision: Precision | None = None
    """In which type products are computed. Default: bf16 on GPUs, fp32 on the CPU, or what the
    measured steps used."""
    samples: float | None = None
    """Training samples in an epoch; may be written 1e6."""
    epochs: float | None = None
    """Passes over the samples."""
    steps: int | None = None
    """Optimizer steps, instead of samples and epochs."""
    calibrate: bool = False
    """Measure: run some real steps of TASK on one device here. Its flags come after --."""
    calibrate_steps: int = 30
    """How many steps per measurement; the first fifth is not counted."""
    parameters: float | None = None
    """Parameters of the model; may be written 7e9."""
    flops_per_sample: float | None = None
    """Floating-point operations of forward and backward for one sample; may be written 2e12."""
    sequence_length: int | None = None
    """Tokens per sample, for hf:config.json."""
    utilisation: float | None = None
    """Share of the card's peak that is reached (MFU). Default: by --work, assumed."""
    work: KindOfWork | None = None
    """What the model mostly computes, where steps are not measured: transformer, convolution or
    other. Default: transformer with hf:config.json, else other."""
    peak_tflops: float | None = None
    """Peak of one device, for one that the table of cards does not have."""
    activation_mib: float | None = None
    """MiB that one sample keeps for the backward pass."""
    optimizer: Optimizer = "adamw"
    """The optimizer, whose state takes memory."""
    link: str | None = None
    """What joins devices of a node: pcie4, nvlink4, … Default: what the card usually has."""
    link_bandwidth_gb_s: float | None = None
    """Measured bandwidth of that link in one direction, 10^9 bytes/s."""
    link_latency_us: float | None = None
    """Measured latency of a message over it."""
    devices_per_node: int | None = None
    """Devices of one node; more devices need --network."""
    network: str | None = None
    """What joins nodes: net and the Gbit/s of a node's network cards together: net100, net3200."""
    input_rate: float | None = None
    """Samples/s that storage and loaders deliver to all devices together."""
    step_spread: float | None = None
    """Standard deviation of a device's step time over its mean: synchronous RL waits for the
    longest episode."""
    power_w: float | None = None
    """Power of one device under load. Default: the limit in the table of cards."""
    owned: bool = False
    """The devices are yours: they cost electricity, not rent."""

    def __post_init__(self) -> None:
        """Raise UsageError for values that make no sense, with the flag they came from."""
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not value > 0 or not math.isfinite(value):
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} must be greater than 0, not {value:g}.")
        rate = self.utilisation
        if rate is not None and rate > 1:
            raise UsageError(
                f"--utilisation {rate:g}: a share of the peak is at most 1.",
                hint="write 0.4 for 40 %.",
            )
        if self.network is not None and self.devices_per_node is None:
            raise UsageError(
                f"--network {self.network} joins nodes, and one node is planned.",
                hint="add --devices-per-node 8.",
            )
