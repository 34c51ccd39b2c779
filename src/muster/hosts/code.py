"""A user's code as one tar file: found below its folders, packed, and laid out where it is sent.

In the file each folder is named by its number, so that "0" is the working folder everywhere.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from muster.base.errors import SetupError

#: All code of a run together.
LIMIT_BYTES = 100 << 20
#: What lies in environments and run folders, which are no code.
_MARKS = ({"pyvenv.cfg"}, {"conda-meta"}, {"run.json", "run.lock"})


class Bundle(NamedTuple):
    """A folder of code: the files to send, by their place, and how many bytes each has."""

    files: dict[str, Path]
    sizes: dict[str, int]


def find_code(folder: Path) -> Bundle:
    """All files below ``folder`` but hidden ones, compiled ones, environments and run folders.

    A link to another folder in it is followed; one that leads out may be to any amount of data.
    """
    files: dict[str, Path] = {}
    sizes: dict[str, int] = {}
    whole = folder.resolve()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if parent != str(folder) and any(mark <= {*names, *folders} for mark in _MARKS):
            folders.clear()
            continue
        here = whole / Path(parent).relative_to(folder)
        folders[:] = [
            name for name in folders
            if not name.startswith(".") and name != "__pycache__" and _is_walked(here / name, whole)
        ]  # fmt: skip
        for name in names:
            path = Path(parent) / name
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            with suppress(OSError):  # removed meanwhile, or a link to nothing
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    place = path.relative_to(folder).as_posix()
                    files[place], sizes[place] = path, about.st_size
    return Bundle(files, sizes)


def _is_walked(path: Path, whole: Path) -> bool:
    """Not behind a link that was followed, nor up to where it lies: that would never end."""
    if not path.is_symlink():
        return True
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop
        return False
    is_first = path.parent.resolve() == path.parent
    return is_first and real.is_relative_to(whole) and not path.is_relative_to(real)


def pack_code(roots: Sequence[Path], limit_bytes: int = LIMIT_BYTES) -> bytes:
    """A tar file of the code in these folders, the same for the same code.

    Raises SetupError where it is more than ``limit_bytes``, or a file of it cannot be read.
    """
    bundles = [find_code(root) for root in roots]
    _check_size(bundles, roots, limit_bytes)
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for number, bundle in enumerate(bundles):
            folder = tarfile.TarInfo(str(number))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
            for place, path in sorted(bundle.files.items()):
                about = tarfile.TarInfo(f"{number}/{place}")  # without its time
                try:
                    data = path.read_bytes()
                    about.size, about.mode = len(data), stat.S_IMODE(path.stat().st_mode) & 0o755
                except FileNotFoundError:  # removed meanwhile
                    continue
                except OSError as error:
                    raise SetupError(
                        f"Cannot read {path}, which is sent to the hosts with the code: "
                        f"{error.strerror}.",
                        hint="make it readable, or keep it outside of the folder of the code.",
                    ) from None
                tar.addfile(about, io.BytesIO(data))
    return whole.getvalue()


def _check_size(bundles: Sequence[Bundle], roots: Sequence[Path], limit_bytes: int) -> None:
    total = sum(size for bundle in bundles for size in bundle.sizes.values())
    if total <= limit_bytes:
        return
    size, largest = max((size, place) for one in bundles for place, size in one.sizes.items())
    raise SetupError(
        f"The code in {' and '.join(map(str, roots))} is too large to be sent to the hosts that "
        f"run it: {total >> 20} MiB, of which {largest} has {size >> 20}. At most "
        f"{limit_bytes >> 20} MiB are sent.",
        hint="start from a folder that holds the code alone, and name data by paths that the "
        "hosts have.",
    )


def unpack_code(packed: IO[bytes], folder: Path) -> None:
    """Lay the code out below ``folder``. Raises ValueError for what is not a file or folder there.

    Not by ``extractall``, which is safe from Python 3.11.4 on.
    """
    with tarfile.open(fileobj=packed) as tar:
        for member in tar:
            if not (member.isfile() or member.isdir()) or not is_below(member.name):
                raise ValueError(f"{member.name!r} is not a file below a folder of code")
            path = folder / member.name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with path.open("wb") as file:
                shutil.copyfileobj(source, file)
            path.chmod(member.mode & 0o755 | 0o600)


def is_below(place: str) -> bool:
    """Whether a relative place cannot lead out of the folder that it is joined to."""
    return not Path(place).is_absolute() and ".." not in Path(place).parts


def moved_path(path: str, roots: Sequence[Path | str], code: Path) -> str:
    """Where a path below one of the roots is in the code that was laid out in ``code``."""
    for number, root in enumerate(roots):
        if os.path.isabs(path) and Path(path).is_relative_to(root):
            return str(code / str(number) / Path(path).relative_to(root))
    return path
