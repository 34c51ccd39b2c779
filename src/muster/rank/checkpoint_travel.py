"""Checkpoints of a gang whose nodes have no folder in common: they travel between its ranks.

Rank 0's node keeps them whole: what other ranks write of a sharded one is sent there before it gets
its name, and what is read is sent to the nodes that lack it. Where all ranks see the same files
nothing travels.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from muster.gang.beacon import BEACON
from muster.rank.checkpoint_files import MANIFEST
from muster.rank.process_group import Gang

_PIECE = 16 << 20
_TOKEN = "token"

_Listing = tuple[str, tuple[tuple[str, int], ...]]


def bring(gang: Gang, checkpoint: Path) -> None:
    """Have the whole checkpoint that rank 0 sees on every node. All ranks call it."""
    council = gang.council
    if gang.num_ranks == 1:
        return
    wanted = council.share(_listing(checkpoint) if gang.is_first else None)
    lacks = council.gather(_listing(checkpoint) != wanted)
    if not any(lacks):
        return
    beside = checkpoint.with_name(f".arriving-{checkpoint.name}")
    writes = lacks[gang.rank] and gang.local_rank == 0
    if writes:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    before, BEACON.phase = BEACON.phase, "checkpoint"  # as long as its links take
    for name, size in wanted[1]:
        _broadcast(gang, checkpoint / name, beside / name if writes else None, size)
    BEACON.phase = before
    if writes:
        aside = checkpoint.with_name(f".aside-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.replace(checkpoint, aside)
        os.replace(beside, checkpoint)
        shutil.rmtree(aside, ignore_errors=True)
    council.meet()


def _listing(checkpoint: Path) -> _Listing | None:
    """What tells a whole checkpoint from another of the same step."""
    try:
        manifest = sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
        files = tuple((path.name, path.stat().st_size) for path in sorted(checkpoint.iterdir()))
    except OSError:
        return None
    return manifest, files


def _broadcast(gang: Gang, source: Path, target: Path | None, size: int) -> None:
    source_file: BinaryIO | None = source.open("rb") if gang.is_first else None
    target_file: BinaryIO | None = target.open("wb") if target is not None else None
    try:
        for begin in range(0, size, _PIECE):
            piece = torch.empty(min(_PIECE, size - begin), dtype=torch.uint8)
            if source_file is not None:
                _fill(piece, source_file)
            gang.council.broadcast(piece)
            if target_file is not None:
                target_file.write(piece.numpy().tobytes())
    finally:
        for file in (source_file, target_file):
            if file is not None:
                file.close()


def _fill(piece: torch.Tensor, file: BinaryIO) -> None:
    data = bytearray(file.read(piece.numel()))
    if len(data) != piece.numel():
        raise OSError(f"{file.name} has become shorter while it was sent")
    piece.copy_(torch.frombuffer(data, dtype=torch.uint8))


def sees_same(folder: Path, group: dist.ProcessGroup, rank: int) -> bool:
    """Whether this rank sees in ``folder`` what rank 0 does. All ranks call it once rank 0 has made
    the folder; none returns before."""
    box = [secrets.token_hex(8) if rank == 0 else ""]
    place = folder / _TOKEN
    if rank == 0:
        place.write_text(box[0])
    dist.broadcast_object_list(box, src=0, group=group)
    seen = ""
    with suppress(OSError):
        seen = place.read_text()
    dist.barrier(group=group)
    if rank == 0:
        place.unlink()
    elif seen != box[0]:
        for stale in folder.glob(f"__{rank}_*"):  # of a start that was killed
            stale.unlink()
    return seen == box[0]


def gather_parts(folder: Path, group: dist.ProcessGroup, rank: int, *, sees: bool) -> None:
    """Bring what the ranks have written into their own ``folder`` to rank 0's, and remove it there.
    ``sees``: whether this rank has written into rank 0's anyway."""
    own = [] if sees else sorted(folder.glob(f"__{rank}_*"))
    mine = [(path.name, path.stat().st_size) for path in own]
    parts: list[list[tuple[str, int]]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, mine, group=group)
    arrived: list[tuple[Path, Path]] = []
    for other, files in enumerate(parts):
        for name, size in files if rank in (0, other) else ():
            # Where only the token was hidden, it is the very file that the sender reads.
            path, beside = folder / name, folder / f".{name}.arriving"
            with beside.open("wb") if rank == 0 else path.open("rb") as file:
                _hand_over(file, size, group, other, is_sender=rank == other)
                if rank == 0:
                    os.fsync(file.fileno())
            arrived.append((beside, path))
    for path in own:
        path.unlink()
    dist.barrier(group=group)
    for beside, path in arrived if rank == 0 else ():
        os.replace(beside, path)
    if not sees:
        with suppress(OSError):  # the last rank of a node finds it empty
            folder.rmdir()


def _hand_over(
    file: BinaryIO, size: int, group: dist.ProcessGroup, sender: int, *, is_sender: bool
) -> None:
    for begin in range(0, size, _PIECE):
        piece = torch.empty(min(_PIECE, size - begin), dtype=torch.uint8)
        if is_sender:
            _fill(piece, file)
            dist.send(piece, 0, group=group)
        else:
            dist.recv(piece, sender, group=group)
            file.write(piece.numpy().tobytes())
