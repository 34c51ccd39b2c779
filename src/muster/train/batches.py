"""The global batch, which stays the same from start to start, and how it is cut over ranks and
micro-batches now. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from muster.base.codec import decode
from muster.base.errors import PlanMismatchError, UsageError
from muster.train.config import TrainConfig

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
        product = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} x {self.micro_batch}"
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
