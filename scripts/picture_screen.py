"""The README's picture of the live screen, docs/pictures/screen.svg, of a sweep run for it.

python scripts/picture_screen.py [SVG]
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from muster.api.launch import Audience, run_workload
from muster.cli.commands.sweep import flags_of_sweep, workload_of
from muster.cli.flags import sweep_options
from muster.cli.screens import render
from muster.farm.view import RunView

WORK = """
import random, time

def run(lr, width=64, seed=0, *, ctx):
    draw = random.Random(f"{lr} {width} {seed}")
    for epoch in range(1, 11):
        time.sleep(draw.uniform(0.1, 0.3))
        ctx.report(epoch / 10, f"loss {1 / epoch + lr:.3f}")
    return {"loss": lr + 1 / width}
"""
COMMAND = "muster sweep train.py:run --grid lr=1e-3,1e-2,1e-1 --grid width=64,128 --seeds 5"
_ROWS, _COLUMNS = 16, 92


def main(target: Path) -> None:
    views: list[RunView] = []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        Path("train.py").write_text(WORK)
        words = [*COMMAND.split()[2:], "--devices", "cpu:4", "--run-dir", "runs/first"]
        parsed = flags_of_sweep(words)
        run_workload(workload_of(parsed), sweep_options(parsed), Audience(show=views.append))
    view = next(
        view for view in views
        if view.num_ended > view.total / 2 and all(line.progress for line in view.workers)
    )  # fmt: skip
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}\n", style="bold"))
    console.print(render(view, _ROWS))
    picture = console.export_svg(title="muster sweep")
    # A page that shows the picture fetches nothing for it.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    target.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures/screen.svg").absolute())
