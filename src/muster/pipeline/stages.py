"""What a stage of ``muster map`` is, and what it may say of a record.

A stage is one of
- a function of one record (a dict) that returns the new record, None to drop it, or a list of
  records to put several in its place;
- a class with ``process(batch)``: a list of records in, a list as long out, in the same order,
  whose entries are what a function may return, or a ``Reject``;
- a class with ``async def process_one(record)``, for stages that wait: up to ``concurrency``
  records are in it at once, and they leave it in the order in which they are done.

Classes may have ``setup(device)``, called once per worker before the first record, ``close()``, and
``columns()``, asked after the set-up, with types of output columns: ``{"vector": "float32[384]"}``.
A class that is a dataclass gets its fields as flags of the command line.
A stage that raises ``Reject`` (or returns one for an entry) sends that record to errors.jsonl with
the reason; any other exception of ``process`` is tried again on halves of the batch until the
record that causes it is alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Record = Mapping[str, Any]
#: What a stage makes of one record: another, none, or several.
Made = dict[str, Any] | None | list[dict[str, Any]]


class Reject(Exception):
    """This record cannot be processed; trying again would not help."""


class BatchStage(Protocol):
    def process(self, batch: list[dict[str, Any]]) -> Sequence[Made | Reject]: ...


class WaitingStage(Protocol):
    """``concurrency``: how many records may be in ``process_one`` at once."""

    concurrency: int

    async def process_one(self, record: dict[str, Any]) -> Made: ...
