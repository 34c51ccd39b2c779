"""What stays the same from start to start of one run, and how it is cut over the ranks now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.base.codec import decode
from muster.base.errors import PlanMismatchError, UsageError
from muster.rank.life import Say
from muster.rank.meter import remembered_micro_batch
from muster.rank.process_group import Gang
from muster.run.folder import RunFolder
from muster.train.batches import BatchPlan, learning_rate, plan_batches
from muster.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What must stay the same from start to start of one run, whatever the devices are."""

    global_batch: int
    lr: float
    seed: int
    num_samples: int


def agree_on_contract(
    config: TrainConfig,
    gang: Gang,
    strategy: str,
    num_samples: int,
    extra: Mapping[str, Any],
    folder: RunFolder,
    say: Say,
) -> tuple[Contract, BatchPlan]:
    """The global batch and learning rate of this run, and how they are cut here and now."""
    # In dp mode "per rank" means per device, so the same words mean the same batch.
    num_shares = len(gang.devices) if strategy == "dp" else gang.num_ranks
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
    fits = remembered_micro_batch(folder.memory_json)
    if fits is not None and fits < plan.micro_batch:
        plan = plan.with_micro_batch(fits)
        say(f"memory     micro-batches of {fits}, which was found to fit in an earlier start")
    if strategy == "dp":
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
