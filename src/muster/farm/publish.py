"""Files of attempts: private until their result is accepted, then renamed into place."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable

from muster.base.atomic_files import write_atomic
from muster.run.folder import RunFolder

#: Results up to this size live in the ledger itself.
INLINE_BYTES = 4096


def store_value(folder: RunFolder, key: str, value: bytes) -> tuple[bytes | None, str | None]:
    """What goes into the ledger: the value, or None and the hash of the file that now holds it."""
    if len(value) <= INLINE_BYTES:
        return value, None
    path = folder.value(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, value)
    return None, hashlib.sha256(value).hexdigest()


def publish(folder: RunFolder, key: str, token: int) -> None:
    """Make the folder of an accepted attempt the task's artifact, and drop its checkpoint.

    Does nothing for what is not there, so that doing it again is no harm.
    """
    source, target = folder.attempt(key, token), folder.artifact(key)
    if source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        os.replace(source, target)
    folder.checkpoint(key).unlink(missing_ok=True)


def publish_after_crash(
    folder: RunFolder, accepted_token: Callable[[str], tuple[str, int | None]]
) -> int:
    """Finish what a coordinator that died between commit and rename left; returns how many.

    ``accepted_token(key)`` answers with the task's state ("done", "failed", "claimed", "open" or
    "unknown") and the token of its accepted result. Folders of attempts that were cut short are
    removed; those of failed tasks are kept for the user to look at, and those of claimed ones
    belong to workers that go on.
    """
    if not folder.attempts.exists():
        return 0
    published = 0
    for path in folder.attempts.iterdir():
        key, _, token = path.name.rpartition(".")
        state, accepted = accepted_token(key)
        if state == "done" and str(accepted) == token:
            publish(folder, key, int(token))
            published += 1
        elif state in ("done", "open"):
            shutil.rmtree(path, ignore_errors=True)
    return published
