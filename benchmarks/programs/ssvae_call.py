"""One process of benchmarks/ssvae_ensemble.py: computes the tasks of a file in one call.

python ssvae_call.py tasks.json results.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster import Context
from muster.farm.task import Order
from muster.farm.worker.context import Surroundings
from muster.run.folder import RunFolder
from muster_recipes.ssvae.tasks import ssvae_runs, supervised_runs


class Nobody:
    """The other end of a worker's line, where nobody listens."""

    confirms_meanwhile = False

    def progress(self, task_id: int, text: str, numbers: Mapping[str, float]) -> None:
        return

    def logged(self, task_id: int, token: int, body: bytes, serial: int | None = None) -> int:
        return 0

    def confirmed(self) -> int:
        return 0

    def halted(self, task_id: int) -> None:
        return

    def runs(self, task_id: int, pid: int | None, *, passes_on: bool = False) -> None:
        return

    def should_stop(self) -> bool:
        return False

    def wanted(self, task_id: int) -> int:
        return 0

    def divide(
        self,
        task_id: int,
        token: int,
        kept: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
    ) -> None:
        raise NotImplementedError


def context_in(folder: Path) -> Context:
    """What a task finds that no worker does."""
    around = Surroundings(RunFolder(folder), "cpu", Nobody(), os.getpid())
    return Context(around, Order(1, 1, 1, "0" * 32, 1, b"{}"), {})


def main() -> None:
    tasks = json.loads(Path(sys.argv[1]).read_text())
    call = {"ssvae": ssvae_runs, "supervised": supervised_runs}[tasks[0]["method"]]
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        results = call(tasks, context_in(Path(folder)))
    for result in results:
        if isinstance(result, Exception):
            raise result
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
