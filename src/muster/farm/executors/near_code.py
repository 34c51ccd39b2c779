"""The code of a run's targets, for workers that do not see the driver's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from muster.farm.executors.ray_pilot import CODE, digest_of
from muster.farm.executors.shipping import pack_code
from muster.farm.model import TargetSpec

#: All code of a run together.
LIMIT_BYTES = 100 << 20


class CodeToSend:
    """``roots``: folders with code, the working folder first. Read when first asked for."""

    def __init__(self, targets: Iterable[TargetSpec], home: Path) -> None:
        self._targets = tuple(targets)
        self._home = home

    @cached_property
    def roots(self) -> tuple[str, ...]:
        found = [str(self._home)]
        folders = [target.base_folder for target in self._targets if target.base_folder]
        folders += [str(path.parent) for path in self._files]
        for folder in folders:
            if not any(Path(folder).is_relative_to(known) for known in found):
                found.append(folder)
        return tuple(found)

    @cached_property
    def digests(self) -> dict[str, str]:
        return {str(path): digest_of(path) for path in self._files}

    @property
    def is_needed(self) -> bool:
        """Whether a target lies in these folders; one in an installed package does not."""
        return bool(self._files) or any(target.kind == "command" for target in self._targets)

    def pack(self) -> bytes:
        """SetupError when it is too much."""
        return b"".join(
            pack_code(Path(root), f"{CODE}/{number}", LIMIT_BYTES)
            for number, root in enumerate(self.roots)
        )

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        """Where the targets are defined."""
        found = (_file_of(target) for target in self._targets if target.kind == "function")
        return tuple(dict.fromkeys(path for path in found if path is not None))


def _file_of(target: TargetSpec) -> Path | None:
    base = Path(target.base_folder)
    if target.location.endswith(".py"):
        return Path(os.path.abspath(base / target.location))
    inner = base.joinpath(*target.location.split("."))
    for path in (inner.with_suffix(".py"), inner / "__init__.py"):
        if path.is_file():
            return path
    return None
