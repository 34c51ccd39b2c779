"""The smallest thing that runs a list of stages over records, for tests of recipes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

from muster.pipeline.stages import Reject

Made = dict[str, Any] | Reject | None


async def _drive(
    stages: Sequence[Any], records: Sequence[dict[str, Any]], at_once: int
) -> list[Made]:
    opened: list[Any] = []
    try:
        for stage in stages:
            opened.append(stage)
            await _finished(stage.setup("cpu") if hasattr(stage, "setup") else None)
        room = asyncio.Semaphore(at_once)

        async def one(record: Made) -> Made:
            async with room:
                for stage in stages:
                    if not isinstance(record, dict):
                        return record
                    try:
                        if hasattr(stage, "process_one"):
                            record = await stage.process_one(dict(record))
                        else:
                            [record] = stage.process([dict(record)])
                    except Reject as error:
                        return error
                return record

        tasks = [asyncio.create_task(one(dict(record))) for record in records]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for stage in opened:
            await _finished(stage.close() if hasattr(stage, "close") else None)


def drive(stages: Sequence[Any], records: Sequence[dict[str, Any]], at_once: int = 8) -> list[Made]:
    """What becomes of each record, in order; exceptions other than Reject come out."""
    return asyncio.run(_drive(stages, records, at_once))


def good(
    stages: Sequence[Any], records: Sequence[dict[str, Any]], at_once: int = 8
) -> list[dict[str, Any]]:
    """The same where every record is to come through."""
    made = drive(stages, records, at_once)
    assert all(isinstance(record, dict) for record in made), made
    return [record for record in made if isinstance(record, dict)]


async def _finished(made: Any) -> None:
    if inspect.isawaitable(made):
        await made
