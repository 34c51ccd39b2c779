"""Whether a task trains the same on one rank, on several, and with accumulation, measured on it.

Random layers are silenced first (dropout off, BatchNorm on its running statistics), because they
make the parts of a batch differ for reasons that are meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muster.base.codec import decode, write_json
from muster.base.errors import UsageError
from muster.gang.topology import read_topology
from muster.rank.life import refusals_told
from muster.rank.meter import Meter
from muster.rank.precision import Precision, agree_on_precision, use_tf32
from muster.rank.process_group import Gang, joined
from muster.rank.replica import Replica, SingleReplica, make_replica, resolve_strategy
from muster.rank.seeding import DataOrder, Position
from muster.rank.state import seed_model
from muster.rank.task import raise_together
from muster.run.folder import RunFolder
from muster.train.config import BatchPlan, TrainConfig, plan_batches
from muster.train.feed import Feed, Fetcher, check_dataset, open_dataset
from muster.train.items import draws_random_numbers as draws
from muster.train.rehearsal import find_example, find_gradients, rehearse, sparse_refused
from muster.train.step import Work, accumulate
from muster.train.task import Task, make_task

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Largest difference relative to a parameter's largest gradient that rounding explains.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A result of the comparison. ``is_good`` is None for a remark. ``worst``: the parameter whose
    difference is largest.
    """

    what: str
    is_good: bool | None
    text: str
    worst: str = ""
    difference: float | None = None


def verify_rank(
    *,
    task: str,
    task_config: str | None,
    task_values: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: str,
    **_: Any,
) -> None:
    """One rank of ``muster verify``; rank 0 leaves the findings in the folder."""
    place = RunFolder(Path(folder))
    with refusals_told(place), joined(read_topology()) as gang:
        made = make_task(task, task_config, task_values)
        say = print if gang.is_first else lambda text: None
        findings = verify(made, decode(TrainConfig, config, ignore_unknown=True), gang, say)
        if gang.is_first:
            write_json(place.verify_json, findings)


def verify(
    task: Task, config: TrainConfig, gang: Gang, say: Callable[[str], None]
) -> list[Finding]:
    """Compare gradients of the same global batch; every rank returns the same findings."""
    name = type(task).__name__
    strategy, _ = resolve_strategy(config.strategy, gang.num_ranks, len(gang.devices))
    if strategy == "dp":
        raise UsageError("verify compares ranks, and --strategy dp has one.", hint="leave it out.")
    precision = agree_on_precision(config.precision, gang)
    exact = dataclasses.replace(precision, dtype=None)
    use_tf32(False)
    dataset: Any = open_dataset(task, "train", config.seed)
    num_samples = check_dataset(dataset, "train", name)
    plan = plan_batches(config, gang.num_ranks)
    plan = dataclasses.replace(plan, global_batch=min(plan.global_batch, num_samples))
    fetcher = Fetcher(dataset, task.collate, config.seed, is_random=draws(dataset, num_samples))
    example = find_example(dataset, num_samples, task.collate, gang.rank, gang.device)

    def fresh() -> nn.Module:
        seed_model(config)
        return silenced(task.model().to(gang.device))

    def gradients(replica: Replica, cut: BatchPlan, rank: int) -> dict[str, Tensor]:
        work = Work(
            task=task,
            replica=replica,
            optimizer=torch.optim.SGD(replica.parameters, lr=0.0),
            precision=exact,
            scaler=None,
            example=example,
        )
        if replica.gang.num_ranks > 1:
            rehearse(work, gang.council)
        feed = Feed(fetcher, DataOrder(num_samples, config.seed), rank, gang.device)
        feed.at(Position(0, 0), cut)
        sums = accumulate(work, feed, feed.window(), Meter())
        if sums.shortage is not None:
            raise sums.shortage
        weight = gang.council.add((sums.weight,)).wait()[0]
        weight = weight if replica.gang.num_ranks > 1 else sums.weight
        return {
            n: _whole(p.grad) * (cut.global_batch / weight)
            for n, p in replica.bare.named_parameters()
            if p.grad is not None
        }

    alone = dataclasses.replace(gang, num_ranks=1, rank=0)
    whole = BatchPlan(
        global_batch=plan.global_batch, micro_batch=plan.global_batch, accumulation=1, shares=(1.0,)
    )
    reference = gradients(SingleReplica(fresh(), alone), whole, 0)
    parts = whole.with_micro_batch(-(-plan.global_batch // 4))
    findings = [
        _compare(
            f"1 rank, {parts.accumulation} micro-batches",
            reference,
            gradients(SingleReplica(fresh(), alone), parts, 0),
        )
    ]
    model = fresh()
    own = find_gradients(task, model, example, exact)
    unused = sorted({n for names in gang.council.gather(own.unused) for n in names})
    raise_together(gang.council, sparse_refused(task, own.sparse, gang.num_ranks))
    if gang.num_ranks > 1:
        has_unused = bool(unused) or task.skips_parameters
        replica = make_replica(strategy, model, gang, exact, has_unused=has_unused)
        even = plan.with_micro_batch(max(plan.per_rank(plan.global_batch)))
        label = f"{gang.num_ranks} ranks ({strategy})"
        findings.append(_compare(label, reference, gradients(replica, even, gang.rank)))
        half = even.with_micro_batch(-(-even.micro_batch // 2))
        found = gradients(replica, half, gang.rank)
        findings.append(_compare(f"{label}, {half.accumulation} micro-batches", reference, found))
    findings += _remarks(task, fresh(), example.data, precision, unused)
    say(f"compared on {plan.global_batch} samples; dropout off, BatchNorm on running statistics")
    return findings


def silenced(model: nn.Module) -> nn.Module:
    """``model`` without what makes parts of a batch differ: dropout off, BatchNorm frozen."""
    for module in model.modules():
        if isinstance(module, _RANDOM):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
        elif isinstance(module, _NORMS):
            module.eval()
            module.train = lambda mode=True, m=module: m  # type: ignore[method-assign]
    return model


def _whole(gradient: Tensor) -> Tensor:
    full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full.detach().clone()


def _compare(what: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Finding:
    worst, largest, tolerance = "", 0.0, 0.0
    overall = max((float(g.abs().max()) for g in wanted.values()), default=0.0)
    for name, gradient in wanted.items():
        tolerance = max(tolerance, _TOLERANCES.get(gradient.dtype, 1e-4))
        if name not in found:
            return Finding(what=what, is_good=False, text=f"{name} has no gradient", worst=name)
        # A parameter whose gradient is all but zero is compared on the scale of the others.
        scale = max(float(gradient.abs().max()), 1e-6 * overall, 1e-30)
        difference = float((found[name] - gradient).abs().max()) / scale
        if not difference <= largest:
            worst, largest = name, difference
    text = f"largest relative difference {largest:.1e}" + (f" in {worst}" if worst else "")
    return Finding(
        what=what, is_good=largest <= tolerance, text=text, worst=worst, difference=largest
    )


def _remarks(
    task: Task, model: nn.Module, data: Any, precision: Precision, unused: list[str]
) -> list[Finding]:
    types = _types_in_force(task, model, data, precision)
    wanted = precision.dtype
    is_good = wanted is None or wanted in types
    listing = ", ".join(f"{count} in {str(t).removeprefix('torch.')}" for t, count in types.items())
    remarks = [
        Finding(what="precision", is_good=is_good, text=f"{precision}; products: {listing}"),
        Finding(
            what="unused parameters",
            is_good=None if unused else True,
            text=", ".join(unused) if unused else "none",
        ),
    ]
    norms = [name for name, module in model.named_modules() if isinstance(module, _NORMS)]
    if norms:
        which = f"{len(norms)} BatchNorm layers, such as {norms[0]}"
        which = which if len(norms) > 1 else f"a BatchNorm layer, {norms[0]}"
        text = f"{which}: results depend on the micro-batch"
        remarks.append(Finding(what="batch-dependent layers", is_good=None, text=text))
    return remarks


def _types_in_force(
    task: Task, model: nn.Module, data: Any, precision: Precision
) -> dict[torch.dtype, int]:
    """How many of the model's matrix products return each type, measured and not as asked for."""
    types: dict[torch.dtype, int] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            types[output.dtype] = types.get(output.dtype, 0) + 1

    products = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, products):
                stack.callback(module.register_forward_hook(note).remove)
        with torch.no_grad(), precision.autocast():
            task.loss(model, data)
    return types
