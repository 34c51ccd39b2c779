"""The state of a training as named tensors and JSON, under the names of the bare model.

Names do not depend on the strategy, the wrapper or the number of ranks:
``model/<parameter>``, ``optimizer/<parameter>/<entry>``, ``scaler/<entry>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muster.base.errors import SetupError
from muster.rank.checkpoint_files import read_shapes, read_tensors

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the bare model; shared ones under their first name only."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[_MODEL + name] = value
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything the optimizer remembers, by the parameter it is about."""
    names = _names(model)
    return {
        f"{_OPTIMIZER}{names[parameter]}/{entry}": value
        for parameter, entries in optimizer.state.items()
        for entry, value in entries.items()
        if isinstance(value, Tensor)
    }


def optimizer_scalars(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """What the optimizer remembers that is not a tensor."""
    names = _names(model)
    found = {
        names[parameter]: {
            entry: value for entry, value in entries.items() if not isinstance(value, Tensor)
        }
        for parameter, entries in optimizer.state.items()
    }
    return {name: entries for name, entries in found.items() if entries}


def load(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scalars: Mapping[str, Mapping[str, Any]],
    group: dist.ProcessGroup | None,
) -> None:
    """Bring ``model`` (bare) and ``optimizer`` to the state in ``checkpoint``.

    Raises SetupError, naming the difference, when the checkpoint is of another model.
    """
    shapes = read_shapes(checkpoint)
    targets = model_tensors(model)
    _check_model(checkpoint, {n: t.shape for n, t in targets.items()}, shapes)
    parameters = dict(model.named_parameters())
    if optimizer is not None:
        for name, (shape, dtype) in shapes.items():
            if name.startswith(_OPTIMIZER):
                owner = parameters[name[len(_OPTIMIZER) :].rpartition("/")[0]]
                targets[name] = _room(owner, shape, dtype)
    with torch.no_grad():
        plain = {name: tensor.detach() for name, tensor in targets.items()}
        read_tensors(checkpoint, plain, process_group=group)
    if optimizer is not None:
        _give_back(model, optimizer, plain, scalars)


def _room(owner: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if isinstance(owner, DTensor) and shape == owner.shape:
        return torch.zeros_like(owner.detach(), dtype=dtype)
    device = "cpu" if shape == torch.Size([]) else owner.device
    return torch.zeros(shape, dtype=dtype, device=device)


def _give_back(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    state: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in scalars.items()}
    for name, value in tensors.items():
        if name.startswith(_OPTIMIZER):
            owner, _, entry = name[len(_OPTIMIZER) :].rpartition("/")
            state.setdefault(owner, {})[entry] = value
    names = _names(model)
    record = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    record["state"] = {
        index: state[names[parameter]]
        for index, parameter in enumerate(order)
        if names[parameter] in state
    }
    optimizer.load_state_dict(record)


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _check_model(
    checkpoint: Path,
    wanted: Mapping[str, torch.Size],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    stored = {name: shape for name, (shape, _) in shapes.items() if name.startswith(_MODEL)}
    lines = [f"{name[len(_MODEL) :]} is missing" for name in wanted if name not in stored]
    lines += [f"{name[len(_MODEL) :]} is not in the model" for name in stored if name not in wanted]
    lines += [
        f"{name[len(_MODEL) :]} is {tuple(stored[name])} there and {tuple(shape)} in the model"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if lines:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        raise SetupError(
            f"The checkpoint {checkpoint.name} is of another model: {'; '.join(lines[:4])}{more}.",
            hint="use another --run-dir for the changed model; this one is untouched.",
        )
