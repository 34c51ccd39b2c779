"""The state of an agent's training in a checkpoint, and back; also on another number of ranks.

Weights, optimizer and statistics are the same on all ranks. What belongs to single environments
(their state, the memory, the returns under way) is written by the rank that has them, as rows:

``rank<r>/env/<name>``, ``rank<r>/memory/<name>``, ``rank<r>/running/<name>``, ``rank<r>/starts``

Rows are numbered over all ranks, and everything random is a function of that number. So a
training goes on exactly where as many environments are wanted as before, whatever the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from muster.base.errors import SetupError
from muster.rank.checkpoint_files import read_shapes, read_tensors
from muster.rl.environment import Place

Rows = dict[str, Tensor]


def with_rank(rows: Mapping[str, Tensor], rank: int) -> Rows:
    """Names of one rank's rows in a checkpoint."""
    return {f"rank{rank}/{name}": value for name, value in rows.items()}


def read_rows(checkpoint: Path, counts: list[int], place: Place) -> Rows:
    """The rows of ``place`` out of those that ranks with ``counts`` environments have written.

    The caller sees to it that the number of environments over all ranks is the same. Raises
    SetupError where a rank's rows are not whole.
    """
    shapes = read_shapes(checkpoint)
    room = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
        if name.startswith("rank")
    }
    read_tensors(checkpoint, room, process_group=None)
    names = sorted(name.partition("/")[2] for name in room if name.startswith("rank0/"))
    rows = {}
    for name in names:
        pieces = []
        for rank, count in enumerate(counts):
            piece = room.get(f"rank{rank}/{name}")
            if piece is None or len(piece) != count:
                raise SetupError(
                    f"The checkpoint {checkpoint.name} has no whole {name} of rank {rank}.",
                    hint="it was written by another version; use another --run-dir.",
                )
            pieces.append(piece)
        whole = _joined(pieces)
        rows[name] = whole[place.first_env : place.first_env + place.num_envs]
    return rows


def group(rows: Mapping[str, Tensor], prefix: str) -> Rows:
    """The rows called ``prefix/…``, without it."""
    start = f"{prefix}/"
    return {name[len(start) :]: v for name, v in rows.items() if name.startswith(start)}


def _joined(pieces: list[Tensor]) -> Tensor:
    """Rows of all ranks; further dimensions are padded with zeros to the largest."""
    sizes = [max(piece.shape[d] for piece in pieces) for d in range(1, pieces[0].dim())]
    padded = []
    for piece in pieces:
        room = piece.new_zeros((len(piece), *sizes))
        room[tuple(slice(0, size) for size in piece.shape)] = piece
        padded.append(room)
    return torch.cat(padded)
