"""How a task is trained: one frozen value, whose fields are the flags of ``muster train``; and the
global batch, which stays the same from start to start, and how it is cut over ranks and
micro-batches now. Pure.

No torch here: the command line reads this before anything heavy is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from muster.base.codec import check_types, decode
from muster.base.errors import PlanMismatchError, UsageError, check_names, check_ranges, flag_of
from muster.base.flags import Flag
from muster.base.shown_text import count

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


_DEFAULT_MICRO = 32


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """``micro_batch`` is the most samples one forward of one rank ever gets.

    ``shares``: the part of the global batch that each rank works on, adding up to 1.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    shares: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.shares)

    def per_rank(self, count: int) -> list[int]:
        """How many of ``count`` samples each rank gets; they add up to ``count``."""
        edges = [round(count * sum(self.shares[:rank])) for rank in range(self.num_ranks)]
        return [end - start for start, end in zip(edges, [*edges[1:], count], strict=True)]

    def rounds(self, count: int) -> int:
        """Micro-batches of every rank in an optimizer step over ``count`` samples."""
        if count == self.global_batch:
            return self.accumulation
        return max(1, math.ceil(max(self.per_rank(count)) / self.micro_batch))

    def windows(self, count: int, rank: int) -> list[tuple[int, int]]:
        """The micro-batches of ``rank`` as (start, end) within ``count`` samples.

        Every rank gets the same number of them, so that all reach the same collectives; some may
        be empty at the end of an epoch.
        """
        counts = self.per_rank(count)
        start = sum(counts[:rank])
        rounds = self.rounds(count)
        cuts = [start + counts[rank] * i // rounds for i in range(rounds + 1)]
        return list(pairwise(cuts))

    def halved(self) -> BatchPlan | None:
        """Half the micro-batch and twice the accumulation; None when it is one sample already."""
        if self.micro_batch == 1:
            return None
        return self.with_micro_batch(math.ceil(self.micro_batch / 2))

    def with_micro_batch(self, micro_batch: int) -> BatchPlan:
        largest = max(self.per_rank(self.global_batch))
        return BatchPlan(
            global_batch=self.global_batch,
            micro_batch=micro_batch,
            accumulation=math.ceil(largest / micro_batch),
            shares=self.shares,
        )

    def with_shares(self, speeds: Sequence[float]) -> BatchPlan:
        """Shares in proportion to measured speeds, such as samples per second."""
        total = sum(speeds)
        plan = BatchPlan(
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            shares=tuple(speed / total for speed in speeds),
        )
        return plan.with_micro_batch(self.micro_batch)

    def __str__(self) -> str:
        product = f"{count(self.num_ranks, 'rank')} x {self.micro_batch}"
        product += f" per rank x {self.accumulation} accumulation"
        exact = self.num_ranks * self.micro_batch * self.accumulation == self.global_batch
        return f"{product} {'=' if exact else '>='} global batch {self.global_batch}"


def plan_batches(config: TrainConfig, num_ranks: int) -> BatchPlan:
    """The plan that a config means on ``num_ranks`` ranks.

    Raises UsageError when the numbers given contradict each other.
    """
    whole, micro, rounds = config.global_batch, config.batch_size, config.grad_accum_steps
    if whole is None:
        whole = num_ranks * (micro or _DEFAULT_MICRO) * (rounds or 1)
    elif whole < num_ranks:
        raise UsageError(
            f"--global-batch {whole} is smaller than the number of ranks, {num_ranks}: "
            "some would have nothing to do.",
            hint="use fewer devices or a larger batch.",
        )
    elif micro is not None and rounds is not None and num_ranks * micro * rounds != whole:
        raise UsageError(
            f"{num_ranks} ranks x --batch-size {micro} x --grad-accum-steps {rounds} = "
            f"{num_ranks * micro * rounds}, which is not --global-batch {whole}.",
            hint="leave one of the three out.",
        )
    largest = math.ceil(whole / num_ranks)
    micro = min(largest, micro or math.ceil(largest / (rounds or 1)))
    even = BatchPlan(
        global_batch=whole,
        micro_batch=micro,
        accumulation=math.ceil(largest / micro),
        shares=(1 / num_ranks,) * num_ranks,
    )
    return even


def learning_rate(config: TrainConfig, plan: BatchPlan) -> tuple[float, str]:
    """The learning rate of the global batch, and a sentence on where it comes from.

    Linear scaling: Goyal et al. 2017, arXiv:1706.02677, section 2.1; square root: Krizhevsky
    2014, arXiv:1404.5997, section 5. The factor is the number of single batches (--batch-size, 32
    where it is not given) in the global one, so it does not depend on the number of ranks.
    """
    if config.lr is not None:
        return config.lr, f"{config.lr:g} (of the global batch, not scaled)"
    factor = plan.global_batch / (config.batch_size or _DEFAULT_MICRO)
    if config.lr_scaling == "none" or factor == 1:
        return config.base_lr, f"{config.base_lr:g} (not scaled)"
    scale = factor if config.lr_scaling == "linear" else math.sqrt(factor)
    lr = config.base_lr * scale
    return lr, f"{lr:g} = base {config.base_lr:g} x {scale:g} ({config.lr_scaling} in the batch)"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What must stay the same from start to start of one run, whatever the devices are."""

    global_batch: int
    lr: float
    seed: int
    num_samples: int


def agree_on_contract(
    config: TrainConfig,
    num_shares: int,
    num_samples: int,
    extra: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    fits: int | None,
    in_one_process: bool,
) -> tuple[Contract, BatchPlan]:
    """The global batch and learning rate of this run, and how they are cut here and now.

    ``num_shares``: ranks or, ``in_one_process`` (dp mode), devices, so that the same words mean the
    same batch. ``extra``: the JSON values of the checkpoint to go on from. ``fits``: the
    micro-batch that was found to fit into memory in an earlier start.
    """
    planned = plan_batches(config, num_shares)
    lr, sentence = learning_rate(config, planned)
    contract = Contract(
        global_batch=planned.global_batch, lr=lr, seed=config.seed, num_samples=num_samples
    )
    if extra:
        before = decode(Contract, extra["contract"], ignore_unknown=True)
        contract = _kept(before, contract, config)
    if contract.global_batch > num_samples:
        raise UsageError(
            f"The global batch of {contract.global_batch} is larger than the training data, "
            f"{num_samples} samples.",
            hint="use a smaller --batch-size or --global-batch, or fewer devices.",
        )
    plan = planned
    if contract.global_batch != planned.global_batch:
        micro = min(planned.micro_batch, math.ceil(contract.global_batch / num_shares))
        plan = BatchPlan(
            global_batch=contract.global_batch,
            micro_batch=micro,
            accumulation=1,
            shares=planned.shares,
        ).with_micro_batch(micro)
    if fits is not None and fits < plan.micro_batch:
        plan = plan.with_micro_batch(fits)
        say(f"memory     micro-batches of {fits}, which was found to fit in an earlier start")
    if in_one_process:
        say(f"batch      {plan}, in one process")
        plan = _for_one_process(plan)
    else:
        say(f"batch      {plan}")
    say(
        f"lr         {contract.lr:g} ({sentence})"
        if contract.lr != lr
        else f"lr         {sentence}"
    )
    return contract, plan


def _for_one_process(plan: BatchPlan) -> BatchPlan:
    """The plan of dp mode: one process gets what all the devices would have got."""
    micro = plan.micro_batch * plan.num_ranks
    whole = BatchPlan(
        global_batch=plan.global_batch, micro_batch=micro, accumulation=1, shares=(1.0,)
    )
    return whole.with_micro_batch(micro)


def _kept(before: Contract, now: Contract, config: TrainConfig) -> Contract:
    """The contract that a run began with. Raises PlanMismatchError where ``now`` differs."""
    differences = []
    if before.num_samples != now.num_samples:
        differences.append(f"{before.num_samples} training samples, now {now.num_samples}")
    if before.seed != now.seed:
        differences.append(f"--seed {before.seed}, now {now.seed}")
    if config.global_batch is not None and before.global_batch != now.global_batch:
        differences.append(f"--global-batch {before.global_batch}, now {now.global_batch}")
    if config.lr is not None and before.lr != now.lr:
        differences.append(f"--lr {before.lr:g}, now {now.lr:g}")
    if differences:
        raise PlanMismatchError(
            "This run began with other settings: " + "; ".join(differences) + ".",
            hint="choose another --run-dir for the new settings; this one is untouched.",
        )
    return before
