"""A checkpoint's files: their names and checksums, the tensors in them, and reading them back.

Tensors go by the names of the bare model: ``model/<parameter>``, ``optimizer/<parameter>/<entry>``,
``scaler/<entry>``. Names do not depend on the strategy, the wrapper or the number of ranks.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from muster.base.codec import read_json
from muster.base.errors import SetupError
from muster.rank.sync import is_extra_state, modules_with_extra_state

EXTRA, MANIFEST = "extra.json", "manifest.json"
METADATA = ".metadata"
_PREFIX = "step-"
_BLOCK = 1 << 22
#: All that a checkpoint's ``.metadata`` may name. It is a pickle, and a pickle may call anything
#: it can name; so these are listed one by one, and ``a.b`` within a module is refused.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def find_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint in ``folder``, the newest first."""
    names = (path.name for path in folder.glob(f"{_PREFIX}*") if path.is_dir())
    numbers = [int(name[len(_PREFIX) :]) for name in names if name[len(_PREFIX) :].isdigit()]
    return sorted(numbers, reverse=True)


def checksums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file in ``folder``, by name."""
    return {
        path.name: [path.stat().st_size, crc32_of(path)]
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def crc32_of(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def read_extra(checkpoint: Path) -> Mapping[str, Any]:
    extra: Mapping[str, Any] = read_json(checkpoint / EXTRA, "state of a checkpoint")
    return extra


def read_shapes(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor in a checkpoint.

    Raises SetupError when its index is not what torch.distributed.checkpoint writes.
    """
    try:
        metadata = _MetadataReader(io.BytesIO((checkpoint / METADATA).read_bytes())).load()
    except (OSError, pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
        raise SetupError(f"The index of {checkpoint} cannot be read: {error}.") from None
    assert isinstance(metadata, Metadata)
    return {
        name: (item.size, item.properties.dtype)
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def read_tensors(
    checkpoint: Path, tensors: Mapping[str, Tensor], *, process_group: dist.ProcessGroup | None
) -> None:
    """Fill ``tensors`` in place; sharded ones take their part, however they were sharded before.

    ``process_group``: None when every rank reads everything by itself.
    """
    expect_single_process()
    read_shapes(checkpoint)  # refuses an index that is not one, before anything unpickles it
    load(
        dict(tensors),
        storage_reader=FileSystemReader(checkpoint),
        process_group=process_group,
        no_dist=process_group is None,
    )


def expect_single_process() -> None:
    """Quiet torch's warning that a file is written by one process, which is meant here."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch")


class _MetadataReader(pickle.Unpickler):
    """Reads an index, and refuses every name that an index does not need."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


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


def model_scalars(model: nn.Module) -> dict[str, Any]:
    """What modules keep that is no tensor, by its name: the values of their ``get_extra_state``."""
    values = {name: each.get_extra_state() for name, each in modules_with_extra_state(model)}
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of the optimizer's state, by parameter and entry."""
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
    """The optimizer's state that is not a tensor, by parameter and entry."""
    names = _names(model)
    found = {
        names[parameter]: {
            entry: value for entry, value in entries.items() if not isinstance(value, Tensor)
        }
        for parameter, entries in optimizer.state.items()
    }
    return {name: entries for name, entries in found.items() if entries}


def load_state(
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
    targets = _with_stored_extra_states(targets, shapes)
    parameters = dict(model.named_parameters())
    if optimizer is not None:
        for name, (shape, dtype) in shapes.items():
            if name.startswith(_OPTIMIZER):
                owner = parameters[name[len(_OPTIMIZER) :].rpartition("/")[0]]
                targets[name] = _room(owner, shape, dtype)
    with torch.no_grad():
        plain = {name: tensor.detach() for name, tensor in targets.items()}
        read_tensors(checkpoint, plain, process_group=group)
    _set_extra_states(checkpoint, model, plain)
    if optimizer is not None:
        _give_back(model, optimizer, plain, scalars)


def _with_stored_extra_states(
    targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """``targets`` with room for extra states as they are stored: they may change their size."""
    found = {name: target for name, target in targets.items() if not is_extra_state(name)}
    for name, (shape, dtype) in shapes.items():
        if name.startswith(_MODEL) and is_extra_state(name):
            place = targets[name].device if name in targets else None
            found[name] = torch.zeros(shape, dtype=dtype, device=place)
    return found


def _set_extra_states(checkpoint: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    keeping = modules_with_extra_state(model)
    scalars = read_extra(checkpoint).get("model_scalars", {}) if keeping else {}
    for name, module in keeping:
        if (tensor := tensors.get(_MODEL + name)) is not None:
            module.set_extra_state(tensor)
        elif name in scalars:
            module.set_extra_state(scalars[name])


def _room(owner: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if shape == torch.Size([]):  # a count of steps, which torch takes to where it belongs
        return torch.zeros(shape, dtype=dtype)
    if shape == owner.shape:  # and laid out as it is: fused optimizers go through memory as it lies
        return torch.zeros_like(owner.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype, device=owner.device)


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
    # torch gives entries the type of their parameter; wide ones and whole numbers would be rounded.
    for parameter, entries in optimizer.state.items():
        for entry, value in entries.items():
            exact = state[names[parameter]][entry]
            if isinstance(value, Tensor) and value.dtype != exact.dtype:
                entries[entry] = exact.to(value.device)


def _names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _check_model(
    checkpoint: Path,
    wanted: Mapping[str, torch.Size],
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    wanted = {name: shape for name, shape in wanted.items() if not is_extra_state(name)}
    stored = {
        name: shape
        for name, (shape, _) in shapes.items()
        if name.startswith(_MODEL) and not is_extra_state(name)
    }
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
