"""Checkpoints that are whole or absent: staged in memory, written beside, checked, renamed.

checkpoints/
  step-00000120/      tensors in torch.distributed.checkpoint's format
    __0_0.distcp …    (one file per rank that holds a part)
    .metadata
    extra.json        counters, history and hyper-parameters: everything that is not a tensor
    manifest.json     size and checksum of each file; a folder without one never happened
  latest.json         the last one that was completed
  best.json           the best one so far, with its value

A step waits only until the tensors are copied into host memory that is kept for them; a thread
writes. Guaranteed: a folder called ``step-…`` was complete and synced when it got its name. Not
guaranteed: that it is still intact, so ``newest_intact`` reads it before it is used.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muster.base.atomic_files import disk_error, explain_os_error, sync_folder, write_atomic
from muster.base.codec import read_record, to_json, write_json
from muster.base.errors import SetupError
from muster.rank.checkpoint_files import (
    EXTRA,
    MANIFEST,
    METADATA,
    checksums,
    crc32_of,
    expect_single_process,
    find_steps,
    step_folder,
)
from muster.rank.checkpoint_travel import gather_parts, sees_same

Tensors = Mapping[str, Tensor]
_ASIDE = ".aside-"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state of a training. ``extra``: JSON values. ``best``: the metric, if it is the best."""

    step: int
    tensors: Tensors
    extra: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None


class CheckpointWriter:
    """Writes snapshots in the background, one at a time; every rank has one.

    ``is_sharded``: tensors are spread over the ranks (FSDP) and every rank takes part in every
    write; else rank 0 writes and the others only stand by.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        num_ranks: int,
        is_sharded: bool = False,
        keep: int = 3,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._is_writer = is_sharded or rank == 0
        self._keep = keep
        self._staging = Staging(say)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A group of its own: the writing thread's collectives never meet those of the loop.
        self._group = dist.new_group(backend="gloo") if is_sharded and num_ranks > 1 else None
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".writing-*"):
                shutil.rmtree(stale, ignore_errors=True)

    def prepare(self, tensors: Tensors) -> None:
        """Get the memory for the copies ahead of the first one, in the background."""
        if self._is_writer:
            self._run(lambda: self._staging.reserve(tensors))

    def save(self, snapshot: Snapshot) -> float:
        """Copy ``snapshot`` and write it in the background; returns the seconds this took.

        Waits for the write before it. Raises SetupError when that one failed.
        """
        began = time.perf_counter()
        self.wait()
        if self._is_writer:
            staged = self._staging.copy(snapshot.tensors)
            frozen = Snapshot(
                step=snapshot.step,
                tensors=staged,
                extra=snapshot.extra,
                best=snapshot.best,
            )
            self._run(lambda: self._write(frozen))
        return time.perf_counter() - began

    def wait(self) -> None:
        """Return when nothing is being written; raises what the last write raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            found = error if isinstance(error, OSError) else disk_error(error)
            if found is not None:
                raise explain_os_error(found, "write the checkpoint in", self.folder) from error
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                if self._rank == 0:  # half a checkpoint may be what has filled the disk
                    for half in self.folder.glob(".writing-*"):
                        shutil.rmtree(half, ignore_errors=True)

        self._thread = threading.Thread(target=guarded, name="muster-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        # The order is the guarantee: tensors, then what describes them, then the manifest that
        # vouches for both, then the name. A kill at any point leaves a folder without the name.
        final = step_folder(self.folder, snapshot.step)
        beside = self.folder / f".writing-{snapshot.step:08d}"
        if self._rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
        sees = self._group is None or sees_same(beside, self._group, self._rank)
        expect_single_process()
        save(
            dict(snapshot.tensors),
            # What is written is on the CPU: torch is not to look for it on GPU 0.
            storage_writer=FileSystemWriter(
                beside, sync_files=True, overwrite=True, per_thread_copy_ahead=0
            ),
            process_group=self._group,
            no_dist=self._group is None,
        )
        if self._group is not None:
            gather_parts(beside, self._group, self._rank, sees=sees)
        if self._rank == 0:
            self._commit(snapshot, beside, final)

    def _commit(self, snapshot: Snapshot, beside: Path, final: Path) -> None:
        write_atomic(beside / EXTRA, to_json(snapshot.extra))
        write_atomic(beside / MANIFEST, to_json(checksums(beside)))
        sync_folder(beside)
        aside = self.folder / f"{_ASIDE}{final.name}"
        if final.exists():  # damaged, or the same state again: kept until the new one has its name
            os.replace(final, aside)
        os.replace(beside, final)
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        if snapshot.best is not None:
            record = {"step": snapshot.step, "value": snapshot.best}
            write_json(self.folder / "best.json", record)
        write_json(self.folder / "latest.json", {"step": snapshot.step})
        # Only now that the new one is whole and named may an old one go.
        self._forget_old(snapshot.step)

    def _forget_old(self, newest: int) -> None:
        """Remove all but the last checkpoints up to ``newest``.

        Later ones are damaged, or the training would have resumed from them. They do not count, and
        are replaced when the training gets there.
        """
        best = best_step(self.folder)
        steps = [step for step in find_steps(self.folder) if step <= newest]
        for step in steps[self._keep :]:
            if step != best:
                shutil.rmtree(step_folder(self.folder, step), ignore_errors=True)


def put_back(folder: Path) -> None:
    """Restore the name of a checkpoint whose replacement was killed between two renames."""
    for aside in folder.glob(f"{_ASIDE}*"):
        final = folder / aside.name[len(_ASIDE) :]
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(aside, final)


def agree_on_best(folder: Path, step: int | None, value: float | None) -> None:
    """Make the record of the best checkpoint agree with the training that goes on.

    A kill between a checkpoint's rename and that record leaves it one behind.
    """
    if step is not None and step != best_step(folder) and step_folder(folder, step).exists():
        write_json(folder / "best.json", {"step": step, "value": value})


def best_step(folder: Path) -> int | None:
    """The step of the best checkpoint, where there is one."""
    path = folder / "best.json"
    if not path.exists():
        return None
    try:
        step = read_record(path, "record of the best checkpoint", {"step": int})["step"]
    except SetupError:
        return None
    return int(step)


def intact_best(folder: Path, say: Callable[[str], None]) -> int | None:
    """The step of the best checkpoint; None, with a message, where it cannot be read back."""
    step = best_step(folder)
    if step is None:
        return None
    problem = "missing" if step not in find_steps(folder) else None
    problem = problem or find_damage(step_folder(folder, step))
    if problem is None:
        return step
    say(
        f"the best checkpoint, of step {step}, is damaged ({problem}); "
        "evaluating the last state instead"
    )
    return None


def newest_intact(folder: Path, say: Callable[[str], None]) -> int | None:
    """The last step whose checkpoint reads back as it was written; None without any.

    A damaged one is named in a message and left where it is.
    """
    for step in find_steps(folder):
        problem = find_damage(step_folder(folder, step))
        if problem is None:
            return step
        say(f"checkpoint of step {step} is damaged ({problem}); taking the one before it")
    return None


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        wanted = read_record(checkpoint / MANIFEST, "manifest", {METADATA: list, EXTRA: list})
    except SetupError as error:
        return str(error).splitlines()[0]
    for name, entry in wanted.items():
        if not _is_entry(name, entry):
            return f"{MANIFEST} does not give a size and a checksum for {name!r}"
        (size, checksum), path = entry, checkpoint / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
            if crc32_of(path) != checksum:
                return f"{name} does not have its checksum"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def _is_entry(name: str, entry: object) -> bool:
    """Whether a manifest may say this: a plain file name, and two numbers."""
    is_name = bool(name) and Path(name).name == name and "\0" not in name
    return (
        is_name
        and isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(number, int) for number in entry)
    )


#: Where a tensor may begin: as wide as the widest of what is copied at once.
_ALIGNMENT = 64
_FOR_ALL_CONTEXTS = 1


class Staging:
    """One slab of host memory for all tensors of a save; the next save of the same uses it again.

    It is pinned where tensors are on a GPU. torch's own pinned buffers are rounded up to powers of
    two, each of them; a slab that is registered takes what it holds.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._cpu_meshes: dict[DeviceMesh, DeviceMesh] = {}
        self._say = say
        self._can_pin = True

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate and touch the memory, so that the first copy costs no more than the others."""
        wanted = {name: _local(tensor) for name, tensor in tensors.items()}
        if _shapes(wanted) == _shapes(self._buffers):
            return
        self._buffers = {}  # frees the old slab before there is a new one
        sizes = [tensor.numel() * tensor.element_size() for tensor in wanted.values()]
        rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        *begins, total = itertools.accumulate(rounded, initial=0)
        gpu = next((tensor.device for tensor in wanted.values() if tensor.is_cuda), None)
        slab = self._slab(total, gpu)
        for (name, tensor), begin, size in zip(wanted.items(), begins, sizes, strict=True):
            # By numpy, so that each has a storage of its size, which is written without a copy.
            part = torch.from_numpy(slab[begin : begin + size])
            self._buffers[name] = part.view(tensor.dtype).view(tensor.shape)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The tensors on the CPU as they are now; sharded ones stay sharded."""
        self.reserve(tensors)
        on_gpu = False
        result: dict[str, Any] = {}
        for name, tensor in tensors.items():
            local, buffer = _local(tensor), self._buffers[name]
            buffer.copy_(local, non_blocking=True)
            on_gpu = on_gpu or local.is_cuda
            result[name] = self._like(tensor, buffer)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return result

    def _slab(self, num_bytes: int, gpu: torch.device | None) -> numpy.ndarray[Any, Any]:
        """Zeros on the host; of pageable memory, which is slower, where no more can be pinned."""
        slab = numpy.empty(num_bytes, dtype=numpy.uint8)
        slab.fill(0)
        if gpu is None or not self._can_pin or num_bytes == 0:
            return slab
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place = slab.ctypes.data
        with torch.cuda.device(gpu):  # a thread begins on GPU 0, and would open a context there
            code = cudart.cudaHostRegister(place, num_bytes, _FOR_ALL_CONTEXTS)
            if int(code) == 0:
                weakref.finalize(slab, cudart.cudaHostUnregister, place).atexit = False
                return slab
            with suppress(RuntimeError):
                torch.zeros(1, device=gpu)  # else the next launch is blamed for the error
        self._can_pin = False
        why = f"CUDA error: {cudart.cudaGetErrorString(code)}"
        self._say(f"note       checkpoints are copied to pageable memory, slower: {why}")
        return slab

    def _like(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        """``buffer`` as what ``tensor`` is: the same shard of the same whole, on the CPU."""
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer,
            self.cpu_mesh(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.size(),
            stride=tensor.stride(),
        )

    def cpu_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """A mesh of the same ranks on the CPU. It is made once: the ranks must make it together."""
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._cpu_meshes:
            self._cpu_meshes[mesh] = DeviceMesh("cpu", mesh.mesh.tolist())
        return self._cpu_meshes[mesh]


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local().detach()
        return local
    return tensor.detach()


def _shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
