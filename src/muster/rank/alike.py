"""Whether the ranks still train one and the same model, and words for what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from muster.base.errors import MusterError, TargetError
from muster.rank.process_group import Council


def check_same_model(model: nn.Module, council: Council, when: str) -> None:
    """MusterError on every rank, with names, where the ranks' models differ: in what tensors they
    have, in which of them are trained, or in a bit of a parameter.

    The ranks send one number each, whatever they have: what would be of another size on another
    rank could not be compared.
    """
    if council.num_ranks == 1:
        return
    parts = kinds(model)
    sums = fingerprint(model.parameters())
    if _are_equal("\n".join(parts).encode() + bytes(sums.numpy().data), council):
        return
    check_alike(model, council, when)
    check_identical(dict(model.named_parameters()), council, when)


def check_alike(model: nn.Module, council: Council, when: str) -> None:
    """MusterError on every rank where the models do not have tensors of the same names, shapes and
    types, or do not train the same ones.
    """
    own = kinds(model)
    if council.num_ranks == 1 or _are_equal("\n".join(own).encode(), council):
        return
    told = council.gather(_difference(own, council.share(own), council.rank))
    raise MusterError(
        f"The ranks' models are not alike {when}: {next(filter(None, told))}. Their gradients and "
        "buffers cannot be added up or shared.",
        hint="make the model of nothing but the task's own settings, and what changes it follow "
        "from nothing that differs between ranks, such as their data or random numbers.",
    )


def _difference(own: list[str], of_first: list[str], rank: int) -> str:
    """What this rank's model has that rank 0's has not, or the other way round; "" for nothing."""
    mine, theirs = ({line.partition(" [")[0]: line for line in lines} for lines in (own, of_first))
    for name, line in mine.items():
        if name not in theirs:
            return f"rank {rank} has {line}, and rank 0 has not"
    for name, line in theirs.items():
        if name not in mine:
            return f"rank 0 has {line}, and rank {rank} has not"
    for here, there in zip(own, of_first, strict=True):
        if here != there:
            return f"rank {rank} has {here} where rank 0 has {there}"
    return ""


def kinds(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer: what it is called, its shape and type, and whether it
    is trained.
    """
    lines = [
        f"{name} {list(each.shape)} {_kind(each)}{'' if each.requires_grad else ' (frozen)'}"
        for name, each in model.named_parameters()
    ]
    buffers = model.named_buffers()
    return lines + [f"the buffer {n} {list(each.shape)} {_kind(each)}" for n, each in buffers]


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_made(model: nn.Module) -> None:
    """TargetError for tensors that only the first forward makes, as lazy layers have them."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, each in named if is_lazy(each)]:
        raise TargetError(
            f"{lazy[0]} of the model has no shape before the first forward: no optimizer can take "
            "it, nor can the ranks begin with the same.",
            hint="give its layer the size of the input, instead of a lazy layer.",
        )


def _are_equal(content: bytes, council: Council) -> bool:
    """Whether all ranks have given the same bytes."""
    number = int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True)
    own = torch.tensor([number], dtype=torch.int64)
    # max(x) == -max(-x) on every rank exactly when all x are equal. ~x is -x - 1: no overflow.
    largest, smallest = council.maximum(torch.cat([own, ~own])).tolist()
    return bool(largest == ~smallest)


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """One 64-bit checksum per tensor, over its bits; equal tensors have equal ones."""
    sums = [_bits(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack(sums).cpu()


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        return flat
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def check_identical(parameters: Mapping[str, Tensor], council: Council, when: str) -> None:
    """MusterError on every rank, with names, when parameters are not the same on all ranks."""
    if council.num_ranks == 1:
        return
    own = fingerprint(parameters.values())
    # max(x) == -max(-x) on every rank exactly when all x are equal. ~x is -x - 1: no overflow.
    both = council.maximum(torch.cat([own, ~own]))
    differs = (both[: len(own)] != ~both[len(own) :]).nonzero().flatten().tolist()
    if differs:
        names = [name for index, name in enumerate(parameters) if index in set(differs)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise MusterError(
            f"The ranks' parameters are no longer the same {when}: {shown}. "
            "Each rank is training a model of its own.",
            hint="gradients or updates differ between ranks: the loss must call the model that "
            "it is given (not the module inside), and nothing may change parameters on one "
            "rank only.",
        )
