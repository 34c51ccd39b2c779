"""How the model is spread over the devices. The loop sees one interface for all of them."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from muster.base.errors import SetupError, TargetError, UsageError
from muster.rank.alike import check_alike, check_made, check_same_model
from muster.rank.precision import Precision
from muster.rank.process_group import NOTHING, Gang
from muster.rank.sync import (
    GradientSync,
    modules_with_extra_state,
    share_buffers,
    share_extra_states,
    share_parameters,
)

#: The name of "do not broadcast buffers before every forward" in this torch.
_NO_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if torch.__version__ >= (2, 13)  # type: ignore[operator]
    else {"broadcast_buffers": False}
)

#: Of the gradients on a CPU: torch's own size, but without the small first bucket that it begins
#: with. The cores that add it would have computed: it costs more than its head start saves.
_BUCKET_MIB = 25

#: Where unused parameters are searched for.
_OF_OUTPUT = (
    "the loss has to follow from all that the model gives: torch looks there for what is unused."
)


def may_fuse(parameters: Iterable[Tensor]) -> bool:
    """Whether torch's fused optimizers, one pass over all parameters, are right for these.

    They have no complex numbers. On a CPU they go through memory as it lies and look at no strides:
    a parameter that is a view of some columns would be taken for other numbers (torch 2.13).
    """
    return all(
        each.is_floating_point() and (each.is_cuda or each.is_contiguous()) for each in parameters
    )


class Replica(ABC):
    """A model ready to train on this rank.

    ``bare``: what the task built, with the names checkpoints have; ``wrapped``: what is called.
    ``is_sharded``: a rank has only its part of the parameters. ``can_recover``: a rank that runs
    out of memory in mid-backward can release the others.
    """

    is_sharded = False
    can_recover = True

    def __init__(self, bare: nn.Module, gang: Gang) -> None:
        #: Ranks meet in the forward already, so all must make as many forwards.
        self.meets_in_forward = any(isinstance(m, nn.SyncBatchNorm) for m in bare.modules())
        self.can_recover = self.can_recover and not self.meets_in_forward
        self.bare = bare
        self.wrapped: nn.Module = bare
        self.gang = gang
        self.parameters = list(bare.parameters())
        #: This rank has buffers of other forms than the ranks share, and shares what there was.
        self.has_other_buffers = False
        self._shared = list(bare.buffers())
        self._trained: list[bool] | None = None  # one rank alone need not know
        self._with_extra_state = [module for _, module in modules_with_extra_state(bare)]

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: the bare one, unless this rank has only a part of it."""
        return self.wrapped if self.is_sharded else self.bare

    @property
    def readers(self) -> dist.ProcessGroup | None:
        """The ranks that read a checkpoint together; None where each reads all of it."""
        return dist.group.WORLD if self.is_sharded else None

    @abstractmethod
    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        """A context for the forward *and* the backward of a micro-batch; only the last one
        synchronises.
        """

    def begin_window(self) -> None:  # noqa: B027
        """Prepare for an optimizer step; call it before the first micro-batch."""

    def at_last_gradients(self, call: Callable[[], None]) -> None:  # noqa: B027
        """Have ``call`` called in the next backward, when the last gradients travel to the other
        ranks. It may be left out: nothing but when something begins may depend on it.
        """

    def release_others(self) -> None:  # noqa: B027
        """Join the collectives that the others wait in, after this rank's backward has failed."""

    def check_complete(self, hint: str | None) -> None:  # noqa: B027
        """TargetError where the last backward has not added up all gradients. No ``hint``: none is
        raised, as the step is made again.
        """

    def renew(self) -> None:  # noqa: B027
        """Wrap the model as it is now, and forget the step that was cut short on any rank."""

    def settle(self) -> None:  # noqa: B027
        """Bring parameters and buffers into the form that is evaluated and saved."""

    @property
    def trains_others(self) -> bool:
        """Whether others of this rank's parameters are trained than when the model was wrapped, so
        that the last backward has not given all ranks the gradients of all.
        """
        return self._trained is not None and self._trained != _which_are_trained(self.parameters)

    def take_buffers(self) -> None:
        """Share the buffers that there are now, which are alike on all ranks."""
        self._shared, self.has_other_buffers = list(self.bare.buffers()), False

    def communication_started_s(self) -> float | None:
        """When the last collective of the last backward began, in seconds of ``perf_counter``."""
        return None

    def compute_s(self) -> float | None:
        """Seconds that the last optimizer step took on this rank's GPU until it had its gradients,
        without any wait for other ranks. The call waits for the GPU. None where it is not known.
        """
        return None

    def num_collectives(self) -> int | None:
        """How many collectives backwards have started; None where that is not counted."""
        return None

    def _share_what_is_no_parameter(self) -> None:
        """Every rank takes rank 0's: it may follow from the data that a rank has seen."""
        # Asked for each time: a forward may have put another tensor in the place of one. Where it
        # has made one of another form, the other ranks would not know what comes.
        buffers = list(self.bare.buffers())
        self.has_other_buffers = _forms(buffers) != _forms(self._shared)
        if not self.has_other_buffers:
            self._shared = buffers
        if self._shared:
            share_buffers(self._shared)
        share_extra_states(self._with_extra_state, self.gang)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the global gradient, which every rank holds; returns its norm before."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)


def _which_are_trained(parameters: Iterable[Tensor]) -> list[bool]:
    return [each.requires_grad for each in parameters]


def _forms(tensors: Iterable[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]


class SingleReplica(Replica):
    """One device, nothing to synchronise."""

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        return NOTHING


class DataParallelReplica(Replica):
    """One process that copies the model to every GPU at every step; to compare, not to use."""

    def __init__(self, bare: nn.Module, gang: Gang, precision: Precision) -> None:
        super().__init__(bare, gang)
        if gang.device.type == "cuda":
            ids = [device.index for device in gang.devices]
            inner = _Autocasting(bare, precision)
            self.wrapped = DataParallel(inner, device_ids=ids, output_device=ids[0])

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        return NOTHING


class _Autocasting(nn.Module):
    """Sets the precision in each call: autocast is per thread, and DataParallel starts threads."""

    def __init__(self, inner: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.inner = inner
        self._precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.autocast():
            return self.inner(*args, **kwargs)


class DistributedReplica(Replica):
    """DistributedDataParallel: every rank has the whole model, gradients are added."""

    def __init__(self, bare: nn.Module, gang: Gang, *, has_unused: bool) -> None:
        super().__init__(bare, gang)
        self._has_unused = has_unused
        self._sync = GradientSync()
        share_parameters(bare)
        self.renew()
        gang.council.at_end(self._let_go_of_reducer)

    def _let_go_of_reducer(self) -> None:
        """While others hold the process group: torch's reducer, if it is the last to let go of it,
        waits for gloo's threads with the interpreter's lock held, for which they may wait after a
        backward that has failed with buckets on their way.
        """
        if isinstance(self.wrapped, DistributedDataParallel):
            for name in ("logger", "reducer"):
                vars(self.wrapped).pop(name, None)

    def renew(self) -> None:
        self._trained = _which_are_trained(self.parameters)
        self._sync.num_searched = sum(self._trained) if self._has_unused else 0
        # The old wrapper must go before its hooks fire once more: it lies in a cycle.
        self.wrapped = self.bare
        gc.collect()
        # Buffers are shared by begin_window, once per step: shared in every forward, as DDP would,
        # a rank with one micro-batch fewer would leave the others waiting in that broadcast.
        is_cuda = self.gang.device.type == "cuda"
        wrapped = DistributedDataParallel(
            self.bare,
            device_ids=[self.gang.device.index] if is_cuda else None,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if is_cuda else _BUCKET_MIB,
            find_unused_parameters=self._has_unused,
            **_NO_BUFFERS,
        )
        wrapped.register_comm_hook(None, self._sync.hook)
        self.wrapped = wrapped

    def begin_window(self) -> None:
        self._sync.begin_window(self.gang.device)
        self.settle()

    def compute_s(self) -> float | None:
        return self._sync.compute_s()

    def settle(self) -> None:
        self._share_what_is_no_parameter()

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        if is_last:
            return self._sync
        assert isinstance(self.wrapped, DistributedDataParallel)
        context: AbstractContextManager[Any] = self.wrapped.no_sync()
        return context

    def at_last_gradients(self, call: Callable[[], None]) -> None:
        # On a GPU the backward has only been asked for then, and what is said may not be known yet.
        if self.gang.device.type == "cpu":
            self._sync.at_last = call

    def release_others(self) -> None:
        self._sync.finish_empty()

    def check_complete(self, hint: str | None) -> None:
        if self._sync.is_complete:
            return
        self.release_others()  # they would wait for the watchdog
        if hint is None:
            return
        named = self.bare.named_parameters()
        unused = [name for name, each in named if each.requires_grad and each.grad is None]
        # Where gradients are accumulated, earlier micro-batches may have given one to each.
        which = ", ".join(unused[:3]) or "a parameter in its last micro-batch"
        raise TargetError(
            f"The loss of a step did not use {which}"
            f"{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}: the gradients of all "
            "ranks cannot be added up.",
            hint=_OF_OUTPUT if self._has_unused else hint,
        )

    def communication_started_s(self) -> float | None:
        return self._sync.last_start_s

    def num_collectives(self) -> int | None:
        return self._sync.num_calls


class ShardedReplica(Replica):
    """FSDP2: parameters, gradients and optimizer state are sharded over the ranks.

    With bf16 a layer's parameters and inputs are cast to it before they are gathered, half as many
    bytes as under autocast alone; gradients are added, and parameters updated, in fp32. A model
    with BatchNorm is left to autocast: its statistics are fp32, and its weights must be, too.
    """

    is_sharded = True
    can_recover = False

    def __init__(self, bare: nn.Module, gang: Gang, precision: Precision) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise SetupError(
                f"--strategy fsdp needs torch 2.9 or later; this is {torch.__version__}.",
                hint="use --strategy ddp.",
            )
        if next(bare.parameters()).device == gang.device:
            share_parameters(bare)
        else:  # on the CPU, where NCCL cannot go; built from one seed they are the same
            check_same_model(bare, gang.council, "when they are built")
        mesh = init_device_mesh(gang.device.type, (gang.num_ranks,))
        has_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in bare.modules())
        is_bf16 = precision.name == "bf16" and not has_norm
        policy = MixedPrecisionPolicy(
            param_dtype=precision.dtype if is_bf16 else None,
            reduce_dtype=torch.float32 if is_bf16 else None,
        )
        for child in _blocks(bare):
            fully_shard(child, mesh=mesh, mp_policy=policy)
        sharded = fully_shard(bare, mesh=mesh, mp_policy=policy)
        assert isinstance(sharded, FSDPModule)
        # The loss is divided by the global count already: gradients are added, not averaged.
        self._sharded = [module for module in bare.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        super().__init__(bare, gang)
        self._trained = _which_are_trained(self.parameters)

    def begin_window(self) -> None:
        self._share_what_is_no_parameter()

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        return self._only_last(is_last)

    @contextmanager
    def _only_last(self, is_last: bool) -> Iterator[None]:
        self.bare.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        yield

    def settle(self) -> None:
        self.begin_window()
        for module in self._sharded:
            module.reshard()

    def renew(self) -> None:
        raise TargetError(
            "The model trains others of its parameters than when it was sharded.",
            hint="use --strategy ddp, which may change them from step to step.",
        )

    def clip(self, max_norm: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model (its layers), which are gathered one at a time."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            # A list has no forward, before which its parts could be gathered.
            parts = [c for c in module if not isinstance(c, nn.ModuleList | nn.ModuleDict)]
            found += [child for child in parts if any(True for _ in child.parameters())]
    return found[::-1]  # what is inside another part is sharded before it


def resolve_strategy(wanted: str, num_ranks: int, num_devices: int) -> tuple[str, str]:
    """The strategy that is meant, and why; UsageError for what the devices cannot do."""
    if wanted == "auto":
        if num_ranks > 1:
            return "ddp", f"auto: {num_ranks} ranks"
        return "single", "auto: one device"
    if wanted == "single" and num_ranks > 1:
        raise UsageError(
            f"--strategy single uses one device, and {num_ranks} ranks were started.",
            hint="use --strategy ddp, or ask for one device.",
        )
    if wanted == "dp" and num_ranks > 1:
        raise UsageError(
            f"--strategy dp drives all devices from one process, and {num_ranks} ranks were "
            "started.",
            hint="start it without a launcher around it, or use --strategy ddp.",
        )
    if wanted in ("ddp", "fsdp") and num_ranks == 1:
        return "single", f"{wanted} on one rank has nothing to synchronise"
    if wanted == "dp":
        return "dp", f"{num_devices} devices in one process: to compare; ddp is faster"
    return wanted, "as given"


def make_replica(
    name: str, model: nn.Module, gang: Gang, precision: Precision, *, has_unused: bool
) -> Replica:
    """``model`` as ``name`` spreads it. For fsdp it may be on the CPU still: no GPU need ever
    hold all of it.

    Raises MusterError, on every rank, where the ranks have not made the same model.
    """
    check_made(model)
    check_alike(model, gang.council, "when they are made")
    makers: dict[str, Callable[[], Replica]] = {
        "single": lambda: SingleReplica(model, gang),
        "dp": lambda: DataParallelReplica(model, gang, precision),
        "ddp": lambda: DistributedReplica(model, gang, has_unused=has_unused),
        "fsdp": lambda: ShardedReplica(model, gang, precision),
    }
    return makers[name]()
