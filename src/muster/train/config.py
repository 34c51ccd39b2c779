"""How a task is trained: one frozen value. Its fields are the flags of ``muster train``.

No torch here: the command line reads this before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from muster.base.codec import check_types
from muster.base.errors import UsageError, check_names, check_ranges, flag_of
from muster.base.flags import Flag

Strategy = Literal["auto", "single", "dp", "ddp", "fsdp"]
Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
Scaling = Literal["none", "linear", "sqrt"]
ScheduleName = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a training.

    ranks x ``batch_size`` x ``grad_accum_steps`` = ``global_batch``: two of the three (or one, or
    none) are given and the rest follows; see ``train.batches``.
    """

    strategy: Strategy = "auto"
    """single on one device, ddp on several; fsdp shards the model; dp only to compare."""
    batch_size: int | None = None
    """Samples per rank in one forward and backward."""
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; stays the same whatever the devices are."""
    grad_accum_steps: int | None = None
    """Forwards and backwards per optimizer step, with one all-reduce."""
    lr: float | None = None
    """Learning rate of the global batch as it is; never scaled."""
    base_lr: float = 1e-3
    """Learning rate of one rank's batch, which --lr-scaling scales when --lr is not given."""
    lr_scaling: Scaling = "none"
    """How --base-lr grows with the number of ranks x accumulation: none, linear or sqrt."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of AdamW."""
    epochs: Annotated[int, Flag(aliases=("num-epochs",))] = 10
    """Passes over the training data; the same as --num-epochs."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up."""
    min_lr: float = 1e-6
    """Where cosine and linear schedules end."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises from near 0, counted in optimizer steps."""
    max_grad_norm: float | None = None
    """Clip the norm of the global gradient to this."""
    precision: Precision = "auto"
    """auto: bf16 where the GPU has it, else fp16 on a GPU, fp32 on a CPU."""
    eval_frequency: int = 1
    """Evaluate every so many epochs; 0 only at the end."""
    patience: int | None = None
    """Stop when the monitored metric has not improved in this many evaluations."""
    compile: bool = False
    """torch.compile the model."""
    num_workers: int | Literal["auto"] = 0
    """Loader processes per rank; auto times a few settings on the first batches."""
    seed: int = 0
    """Order of the data and the random streams of ranks."""
    model_seed: int | None = None
    """Initial weights; --seed when not given."""
    balance: Literal["even", "auto"] = "even"
    """Share of the global batch per rank; auto: in proportion to measured speed."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over all ranks (GPUs only)."""
    deterministic: bool = False
    """Only deterministic kernels; needed on GPUs for bit-identical resumes."""
    keep: int = 3
    """How many checkpoints are kept, beside the best."""
    log_every: int = 1
    """Write a line of metrics.jsonl every so many optimizer steps."""
    count_work: bool = False
    """Count, once, what a sample computes and keeps for the backward, for `muster plan`."""
    tensorboard: bool = True
    """Write TensorBoard files when the tensorboard package is installed."""

    def __post_init__(self) -> None:
        """Raise UsageError for values that make no sense, before anything is started."""
        check_types(self)
        check_ranges(self, positive=_POSITIVE, not_negative=_NOT_NEGATIVE)
        if isinstance(self.num_workers, int) and self.num_workers < 0:
            raise UsageError(f"--num-workers must be 0 or more, or auto, not {self.num_workers}.")
        if self.warmup_epochs > self.epochs:
            raise UsageError(
                f"--warmup-epochs {self.warmup_epochs:g} is longer than --epochs {self.epochs}."
            )

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is learnt.

        The others (devices, strategy, loaders, how long, how often something is written) may change
        from start to start of one run.
        """
        names = _DECISIVE if self.global_batch else (*_DECISIVE, *_OF_THE_BATCH)
        return {name: getattr(self, name) for name in names}

    @staticmethod
    def of(defaults: Mapping[str, Any], **given: Any) -> TrainConfig:
        """A task's own ``defaults`` with what is ``given`` on top.

        A rate of the task's own, which is never scaled, gives way to one that follows the batch.
        """
        check_names(TrainConfig, (*defaults, *given))
        if _follows_batch(given):
            defaults = {**defaults, "lr": None}
        return TrainConfig(**{**_fitted(defaults, given), **given})


def _follows_batch(given: Mapping[str, Any]) -> bool:
    """Whether flags are given of a rate that is scaled. Raises UsageError where --lr is as well."""
    names = [name for name in ("base_lr", "lr_scaling") if name in given]
    if names and given.get("lr") is not None:
        listed = " and ".join(f"--{flag_of(name)} {given[name]}" for name in names)
        raise UsageError(
            f"--lr {given['lr']} is never scaled: {listed} would have no effect.",
            hint="give --lr for the rate of the global batch, or the others for a rate that "
            "follows it.",
        )
    return bool(names)


def _fitted(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """``defaults`` for a training so short that their warm-up would not fit: it keeps its share.

    The user has not asked for that warm-up, and could not know why it is refused.
    """
    epochs, warmup = given.get("epochs"), defaults.get("warmup_epochs", 0.0)
    if "warmup_epochs" in given or not isinstance(epochs, int) or not 0 < epochs < warmup:
        return defaults
    planned = defaults.get("epochs", TrainConfig.epochs)
    return {**defaults, "warmup_epochs": warmup * epochs / max(planned, epochs)}


_DECISIVE = (
    "global_batch", "lr", "base_lr", "lr_scaling", "weight_decay", "schedule", "min_lr",
    "warmup_epochs", "max_grad_norm", "seed", "model_seed", "sync_batchnorm", "precision",
)  # fmt: skip
#: These decide as well, where the global batch follows from them and the number of devices.
_OF_THE_BATCH = ("batch_size", "grad_accum_steps")
_POSITIVE = ("batch_size", "global_batch", "grad_accum_steps", "lr", "base_lr", "epochs",
             "max_steps", "max_grad_norm", "patience", "keep", "log_every")  # fmt: skip
_NOT_NEGATIVE = ("weight_decay", "min_lr", "warmup_epochs", "eval_frequency")
