"""Everything that is decided before the first step; each decision is printed as it is made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from muster.base.codec import decode
from muster.base.errors import TargetError, UsageError
from muster.base.shown_text import count
from muster.rank.meter import Flops, Meter, Tally, card_name, peak_flops, remembered_micro_batch
from muster.rank.precision import Precision, agree_on_precision
from muster.rank.process_group import Gang
from muster.rank.replica import Replica, make_replica, resolve_strategy
from muster.rank.seeding import (
    STEP,
    DataOrder,
    mix,
    seed_everything,
    set_generators,
    use_deterministic,
)
from muster.rank.state import Say, Start, State, newest_state, seed_model
from muster.rank.task import check_gives, name_of, raise_together
from muster.run.folder import RunFolder
from muster.train.config import BatchPlan, Contract, TrainConfig, agree_on_contract
from muster.train.evaluation import Evaluator
from muster.train.feed import (
    Batch,
    Feed,
    Fetcher,
    check_dataset,
    choose_num_workers,
    open_dataset,
)
from muster.train.items import check_same_items, draws_random_numbers, is_repeatable
from muster.train.progress import Limits, Progress
from muster.train.rehearsal import (
    Gradients,
    find_example,
    find_flops,
    find_gradients,
    find_kept,
    rehearse,
    rehearse_end,
    sparse_refused,
)
from muster.train.step import Work
from muster.train.task import Split, Task

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
            nn.FeatureAlphaDropout)  # fmt: skip


@dataclass(kw_only=True)
class Training:
    """One rank's training, ready for the loop."""

    config: TrainConfig
    gang: Gang
    folder: RunFolder
    say: Say
    work: Work
    feed: Feed
    plan: BatchPlan
    contract: Contract
    limits: Limits
    warmup_steps: int
    evaluators: dict[str, Evaluator]
    state: State
    progress: Progress
    strategy: str
    flops: Flops | None
    kept_bytes: float | None
    num_parameters: int
    meter: Meter = field(default_factory=Meter)
    is_balanced: bool = False
    compute_s: float = 0.0

    @property
    def fraction(self) -> float:
        """The part of the training that is done, from 0 to 1."""
        return self.progress.step / self.limits.total_steps

    def communication(self, tally: Tally) -> float | None:
        """The share of time in communication; None on a GPU, where the host does not see it."""
        return tally.share(tally.communication_s) if self.gang.device.type == "cpu" else None

    def utilisation(self, tally: Tally) -> float | None:
        """MFU, where the card's peak and the model's operations are known."""
        if self.flops is None:
            return None
        num_cards = self.gang.num_ranks * len(self.gang.devices)  # in dp mode one rank has several
        return self.flops.utilisation(tally.samples_per_s, num_cards)


def prepare(task: Task, config: TrainConfig, start: Start) -> Training:
    """Make data, model, strategy and optimizer; then load the last intact checkpoint, if any.

    Raises UsageError and TargetError, on every rank, for settings and tasks that make no sense, and
    MusterError where the ranks would not do the same.
    """
    gang, folder, say = start.gang, start.folder, start.say
    name = type(task).__name__
    council = gang.council
    strategy, why = resolve_strategy(config.strategy, gang.num_ranks, len(gang.devices))
    say(f"strategy   {strategy} ({why}) on {gang.where}")
    precision = agree_on_precision(config.precision, gang)
    say(f"precision  {precision}")
    is_dp = strategy == "dp"
    if is_dp and config.compile:
        raise UsageError(
            "--compile and --strategy dp do not go together: the copies that dp makes at every "
            "step would run the original's compiled code.",
            hint="use --strategy ddp.",
        )
    if config.deterministic:
        use_deterministic()

    dataset, num_samples = _training_data(task, name, config.seed)
    council.check_same("the number of training samples", num_samples)
    check_same_items(dataset, num_samples, "train", council)
    checkpoint, extra = newest_state(start)
    num_shares = len(gang.devices) if is_dp else gang.num_ranks
    fits = council.share(remembered_micro_batch(folder.memory_json))
    contract, plan = agree_on_contract(
        config, num_shares, num_samples, extra, say, fits=fits, in_one_process=is_dp
    )
    order = DataOrder(num_samples, config.seed)

    seed_model(config)
    model = _build(task, name)
    is_sharded = strategy == "fsdp"
    if not is_sharded:  # else a part at a time: no GPU need ever hold all of it
        model.to(gang.device)
    if config.sync_batchnorm:
        model = _with_sync_batchnorm(model, gang)
    _say_batchnorm(model, gang, plan, config, say)
    _say_masks(model, gang, plan, extra, say)
    _say_repeatable(dataset, num_samples, say)
    example = find_example(dataset, num_samples, task.collate, gang.rank, gang.device)
    own = Gradients([], []) if is_sharded else find_gradients(task, model, example, precision)
    unused = sorted({name for names in council.gather(own.unused) for name in names})
    raise_together(council, sparse_refused(task, own.sparse, gang.num_ranks))
    if unused and gang.num_ranks > 1:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        say(
            f"note       the loss does not use {shown}; torch looks for such parameters at every "
            "step, which is slower"
        )
    flops = None if is_sharded else _flops(task, model, example, precision, gang, config)
    kept = None
    if config.count_work and not is_sharded:
        more = find_example(dataset, num_samples, task.collate, gang.rank, gang.device, 4)
        if more.size > example.size:
            kept = find_kept(task, model, example, more, precision)
    if config.compile:
        model.compile()  # in place: the names in checkpoints stay, and a wrapper calls it
    has_unused = bool(unused) or task.skips_parameters
    replica = make_replica(strategy, model, gang, precision, has_unused=has_unused)
    optimizer = task.optimizer(replica.bare, contract.lr, config.weight_decay)
    _check_optimizer(task, optimizer, replica)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    work = Work(
        task=task,
        replica=replica,
        optimizer=optimizer,
        precision=precision,
        scaler=precision.scaler(),
        example=example,
    )
    state = State(
        start, replica.bare, optimizer, work.scaler, is_sharded=replica.is_sharded,
        keep=config.keep, readers=replica.readers,
    )  # fmt: skip
    progress = Progress() if checkpoint is None else _resume(state, work, extra, checkpoint, say)
    if gang.num_ranks > 1:
        rehearse(work, council)

    is_random = task.random_items
    if is_random is None:
        is_random = draws_random_numbers(dataset, num_samples)
    fetcher = Fetcher(dataset, task.collate, config.seed, is_random=is_random)
    num_workers = choose_num_workers(config.num_workers, fetcher, order, plan, gang, say)
    feed = Feed(fetcher, order, gang.rank, gang.device, num_workers)
    feed.at(progress.position, plan)
    steps_per_epoch = math.ceil(num_samples / plan.global_batch)
    evaluators = _evaluators(task, config, gang, precision, plan, num_workers)
    limits = Limits(
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        max_steps=config.max_steps,
        patience=config.patience,
        eval_frequency=config.eval_frequency,
    )
    if limits.is_over(progress) is None:
        rehearse_end(work, evaluators, gang, say)
    _set_generators(extra, gang, config.seed)  # last: a task may draw in anything above
    return Training(
        config=config,
        gang=gang,
        folder=folder,
        say=say,
        work=work,
        feed=feed,
        plan=plan,
        contract=contract,
        limits=limits,
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
        evaluators=evaluators,
        state=state,
        progress=progress,
        strategy=strategy,
        flops=flops,
        kept_bytes=kept,
        num_parameters=sum(p.numel() for p in replica.bare.parameters()),
    )


def _flops(
    task: Task,
    model: nn.Module,
    example: Batch,
    precision: Precision,
    gang: Gang,
    config: TrainConfig,
) -> Flops | None:
    peak = peak_flops(card_name(gang.device), precision.name)
    if peak is None and not config.count_work:
        return None
    per_sample = find_flops(task, model, example, precision)
    return None if per_sample is None else Flops(per_sample, peak)


def _training_data(task: Task, name: str, seed: int) -> tuple[Dataset[Any], int]:
    dataset = open_dataset(task, "train", seed)
    if dataset is None:
        raise TargetError(f"{name}.dataset('train') gives None: there is nothing to learn from.")
    return dataset, check_dataset(dataset, "train", name)


def _build(task: Task, name: str) -> nn.Module:
    model = task.model()
    if not isinstance(model, nn.Module):
        raise TargetError(f"{name}.model() gave {type(model).__name__}, not a torch.nn.Module.")
    if not any(p.requires_grad for p in model.parameters()):
        raise TargetError(f"{name}.model() has no parameter that can be trained.")
    return model


def _check_optimizer(task: Task, optimizer: Any, replica: Replica) -> None:
    """TargetError for an optimizer that a step of ours could not call, or a checkpoint not keep."""
    check_gives(task.optimizer, optimizer, Optimizer)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TargetError(
            f"{name_of(task.optimizer)} gave {type(optimizer).__name__}, whose step needs a "
            "closure that computes the loss several times; here it is computed once, on all ranks.",
            hint="use an optimizer whose step() needs no argument.",
        )
    known = set(map(id, replica.parameters))
    for group in optimizer.param_groups:
        for each in group["params"]:
            if id(each) not in known:
                raise TargetError(
                    f"{name_of(task.optimizer)} has a parameter of shape {tuple(each.shape)} that "
                    "is not the model's: its gradients would not be added up over the ranks, and "
                    "no checkpoint would keep it.",
                    hint="make it a parameter of the model, as in self.scale = nn.Parameter(…).",
                )


def _with_sync_batchnorm(model: nn.Module, gang: Gang) -> nn.Module:
    if gang.device.type != "cuda":
        raise UsageError(
            "--sync-batchnorm works on GPUs only: torch has no such layer for the CPU.",
            hint="leave it out, or use a normalisation that does not depend on the batch.",
        )
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(model)
    return converted


def _say_batchnorm(
    model: nn.Module, gang: Gang, plan: BatchPlan, config: TrainConfig, say: Say
) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if not any(isinstance(module, kinds) for module in model.modules()):
        return
    if gang.num_ranks > 1 and not config.sync_batchnorm:
        say("batchnorm  statistics of each rank's own micro-batch; running ones are rank 0's")
    if plan.micro_batch < 16:
        say(
            f"warning    BatchNorm over micro-batches of {plan.micro_batch} samples is noisy; "
            "16 or more, or another normalisation, is better"
        )


def _say_masks(
    model: nn.Module, gang: Gang, plan: BatchPlan, extra: Mapping[str, Any], say: Say
) -> None:
    """Say what dropout makes depend on ranks, and on micro-batches where a resume changes them."""
    if not any(map(_drops, model.modules())):
        return
    if extra:
        before = int(extra["num_ranks"]), int(extra["plan"]["micro_batch"])
        if before != (gang.num_ranks, plan.micro_batch):
            say(
                "note       dropout draws a mask per rank and micro-batch: from here on losses "
                f"differ from those of {count(before[0], 'rank')} x {before[1]}, as it was before, "
                "by more than rounding"
            )
            return
    if gang.num_ranks > 1:
        say(
            f"note       dropout draws a mask per rank: losses differ from those of another number "
            f"of ranks than {gang.num_ranks} by more than rounding"
        )


def _say_repeatable(dataset: Dataset[Any], num_samples: int, say: Say) -> None:
    if not is_repeatable(dataset, num_samples):
        say(
            "warning    items of the training data change at every fetch, by a generator of the "
            "data set's own: what is learnt depends on ranks and loaders, and a resumed run draws "
            "other items. Draw from torch's, numpy's or random's global generator, which is seeded "
            "for every item"
        )


def _drops(module: nn.Module) -> bool:
    """Whether a layer draws masks: dropout, or one that has it inside (LSTM, attention)."""
    chance = getattr(module, "p", None) if isinstance(module, _DROPOUT) else None
    inside = getattr(module, "dropout", None)
    return any(isinstance(each, float) and each > 0 for each in (chance, inside))


def _resume(
    state: State, work: Work, extra: Mapping[str, Any], checkpoint: Path, say: Say
) -> Progress:
    state.restore(checkpoint, extra)
    for group, values in zip(work.optimizer.param_groups, extra["param_groups"], strict=True):
        group["initial_lr"] = values["initial_lr"]
    progress = decode(Progress, extra["progress"], ignore_unknown=True)
    say(
        f"resume     from step {progress.step} (epoch {progress.epoch + 1}, "
        f"{progress.offset:,} samples into it)"
    )
    return progress


def _set_generators(extra: Mapping[str, Any], gang: Gang, seed: int) -> None:
    """Python's and numpy's generators as this rank's checkpoint has them, or streams of its own."""
    kept = extra.get("generators", [])
    if len(kept) == gang.num_ranks:
        set_generators(kept[gang.rank])
    else:
        seed_everything(mix(seed, STEP, gang.rank))


def _evaluators(
    task: Task,
    config: TrainConfig,
    gang: Gang,
    precision: Precision,
    plan: BatchPlan,
    num_workers: int,
) -> dict[str, Evaluator]:
    found: dict[str, Evaluator] = {}
    splits: tuple[Split, ...] = ("val", "test")
    for split in splits:
        dataset = open_dataset(task, split, config.seed)
        if dataset is None:
            continue
        num_samples = check_dataset(dataset, split, type(task).__name__)
        gang.council.check_same(f"the number of {split} samples", num_samples)
        check_same_items(dataset, num_samples, split, gang.council)
        found[split] = Evaluator(
            task,
            dataset,
            num_samples,
            gang,
            precision,
            batch_size=max(plan.micro_batch, 1) * 2,
            num_workers=num_workers,
        )
    return found
