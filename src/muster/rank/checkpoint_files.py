"""Names and checksums of a checkpoint's files, and reading tensors back from them."""

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
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from muster.base.codec import read_json
from muster.base.errors import SetupError

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
    """Fill ``tensors`` in place; sharded ones take their part, whatever the shards were.

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
    """Reads an index, and refuses every name that an index has no business with."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
