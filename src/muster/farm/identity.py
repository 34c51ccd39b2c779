"""Who a task is: a hash of its content, so that resuming never depends on position.

The seed is the parameter ``seed`` and nothing special. The version of the code is not part of
the key: it is recorded beside the run and compared there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from muster.farm.codec import encode_canonical

#: 16 bytes.
TaskKey = bytes

KEY_BYTES = 16
_MASK = 2 ** (8 * KEY_BYTES) - 1
_TEXT_DIGITS = 12
_HASH_DIGITS = 6
#: File systems allow 255 bytes; the rest is left to whatever is put after the name.
_MAX_NAME = 80


def task_key(target: str, params: Mapping[str, object]) -> TaskKey:
    """The key of the task "``target`` with ``params``"; equal content gives equal keys."""
    content = encode_canonical([target, params if type(params) is dict else dict(params)])
    return blake2b(content, digest_size=KEY_BYTES).digest()


def payload_and_key(target: str) -> Callable[[dict[str, object]], tuple[bytes, TaskKey]]:
    """A function from parameters to (stored payload, key), for enqueuing many tasks.

    The payload is the canonical encoding and the key equals ``task_key(target, params)``; one
    encoding serves both.
    """
    prefix = b"[" + encode_canonical(target) + b","
    size = KEY_BYTES

    def make(params: dict[str, object]) -> tuple[bytes, TaskKey]:
        payload = encode_canonical(params)
        return payload, blake2b(prefix + payload + b"]", digest_size=size).digest()

    return make


def key_text(key: TaskKey) -> str:
    """The first 12 hexadecimal digits: for people, log lines and folder names.

    Unique within any run that fits a disk, but not promised: look up by the whole key.
    """
    return key.hex()[:_TEXT_DIGITS]


class PlanHash:
    """The hash of a set of task keys, in any order and in constant memory.

    Keys are added modulo 2**128, which is enough against accidents and not against someone who
    wants two plans to collide. The same key added twice counts twice.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0

    def add(self, key: TaskKey) -> None:
        self._sum += int.from_bytes(key, "big")
        self._count += 1

    def update(self, keys: Iterable[TaskKey]) -> None:
        for key in keys:
            self.add(key)

    @property
    def count(self) -> int:
        return self._count

    def hexdigest(self) -> str:
        """32 hexadecimal digits; more keys may be added afterwards."""
        self._sum &= _MASK
        content = self._count.to_bytes(8, "big") + self._sum.to_bytes(KEY_BYTES, "big")
        return blake2b(content, digest_size=KEY_BYTES).hexdigest()


def plan_hash(keys: Iterable[TaskKey]) -> str:
    """The `PlanHash` of ``keys`` as 32 hexadecimal digits."""
    whole = PlanHash()
    whole.update(keys)
    return whole.hexdigest()


def name_with_hash(name: str, digest: str) -> str:
    """``<name>-<6 digits of digest>``, safe as a file name on every system.

    Anything but ASCII letters, digits, ``.``, ``_`` and ``-`` becomes ``-``; an empty name
    becomes ``run``.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    safe = re.sub(r"-{2,}", "-", safe)[:_MAX_NAME].strip("-.")
    return f"{safe or 'run'}-{digest[:_HASH_DIGITS]}"
