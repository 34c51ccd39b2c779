"""Writes to the folder of the runs, with fsync, and reads its clock. A dead network disk hangs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from muster.base.atomic_files import file_system_of
from muster.doctor.probes.report import Tell, one_line, progress

_CHUNK = 4 << 20
_MIB = 1 << 20
_NUM_APPENDS = 5


def main(words: list[str], tell: Tell) -> None:
    """FOLDER SECONDS: write until SECONDS are over, 256 MiB at most."""
    folder, budget_s = existing(Path(words[0])), float(words[1])
    value: dict[str, object] = {"path": words[0]}
    progress(f"asking {folder} for its free space")
    space = shutil.disk_usage(folder)
    value |= {
        "free_mib": space.free // _MIB,
        "total_mib": space.total // _MIB,
        "file_system": file_system_of(folder.resolve()),
    }
    tell(value)
    progress(f"writing to {folder}")
    try:
        value |= _write(folder, budget_s, space.free)
    except OSError as error:
        value |= {"is_writable": False, "problem": one_line(error)}
    tell(value)


def existing(folder: Path) -> Path:
    """The nearest folder upwards that exists: a run's folder is made when the run starts."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _write(folder: Path, budget_s: float, free_bytes: int) -> dict[str, object]:
    # Incompressible, so that a file system that compresses does not look faster than it is.
    chunk = os.urandom(_CHUNK)
    most = min(256 << 20, max(_CHUNK, free_bytes // 20))
    # Without a name, so that nothing stays however this ends.
    with tempfile.TemporaryFile(prefix=".muster-doctor-", dir=folder, buffering=0) as file:
        before_s = time.time()
        file.write(b"x")
        os.fsync(file.fileno())
        # Network file systems stamp with the server's clock.
        stamp_s = os.fstat(file.fileno()).st_mtime
        middle_s = (before_s + time.time()) / 2
        began_s, written = time.monotonic(), 0
        while written < most and time.monotonic() - began_s < budget_s:
            written += file.write(chunk)
            # Synced as it goes: 256 MiB in one sync could outlast any budget.
            os.fsync(file.fileno())
        took_s = time.monotonic() - began_s
        appends = []
        for _ in range(_NUM_APPENDS):
            start_s = time.monotonic()
            file.write(b"x" * 100)
            os.fsync(file.fileno())
            appends.append(time.monotonic() - start_s)
    return {
        "is_writable": True,
        "write_mb_s": written / took_s / 1e6,
        "fsync_s": median(appends),
        "clock_skew_s": middle_s - stamp_s,
    }
