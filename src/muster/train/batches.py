"""How the global batch, which stays the same, is cut over ranks and micro-batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from muster.base.errors import UsageError
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
