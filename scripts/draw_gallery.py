"""Runs the commands of the gallery's pages and draws their pictures: docs/gallery/pictures.

``python scripts/draw_gallery.py [NAME…]``; without names all whose libraries are installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import muster

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"


def curves(metric: str, by: str = "") -> Callable[[Axes, Path], None]:
    """A line for each task (or for the run) of a metric over its steps, coloured by a parameter."""

    def draw(axes: Axes, run: Path) -> None:
        found: dict[object, list[tuple[float, float]]] = defaultdict(list)
        for point in muster.Run(run).metrics(name=metric).to_pylist():
            found[point["task"]].append((point["step"], point["value"]))
        rows = muster.Run(run).results().to_pylist() if by else []
        kind = {row["task"]: row[by] for row in rows}
        kinds = sorted(set(kind.values()))
        for task, points in found.items():
            value = next((v for key, v in kind.items() if str(task).startswith(key)), None)
            colour = f"C{kinds.index(value)}" if value in kinds else "C0"
            marker = "." if len(points) < 50 else ""
            axes.plot(
                *zip(*sorted(points), strict=True), color=colour, linewidth=1.2, marker=marker
            )
        for number, value in enumerate(kinds):
            axes.plot([], [], color=f"C{number}", label=f"{by} {value}")
        axes.set(xlabel="step", ylabel=metric)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return draw


def lines(x: str, y: str, by: str, **scales: str) -> Callable[[Axes, Path], None]:
    """A result over one parameter, a line for each value of another."""

    def draw(axes: Axes, run: Path) -> None:
        rows = muster.Run(run).results().to_pylist()
        for value in dict.fromkeys(row[by] for row in rows):
            points = sorted((row[x], row[y]) for row in rows if row[by] == value)
            axes.plot(*zip(*points, strict=True), "o-", label=f"{by} {value}")
        axes.set(xlabel=x, ylabel=y, **scales)

    return draw


def clouds(axes: Axes, run: Path) -> None:
    rows = parquet.read_table(run.parents[1] / "vectors.parquet").to_pylist()
    vectors = np.array([row["embedding"] for row in rows])
    vectors -= vectors.mean(0)
    places = vectors @ np.linalg.svd(vectors, full_matrices=False)[2][:2].T
    for tongue in dict.fromkeys(row["tongue"] for row in rows):
        chosen = [row["tongue"] == tongue for row in rows]
        axes.scatter(*places[chosen].T, s=10, label=tongue)
    axes.set(xlabel="first component", ylabel="second component")


PICTURES: dict[str, Callable[[Axes, Path], None]] = {
    "walk": curves("place", by="drift"),
    "svm": curves("accuracy"),
    "finetune": lines("shots", "accuracy", "start"),
    "nanogpt": curves("train/loss"),
    "corridor": curves("update/return"),
    "vectors": clouds,
    "hydra_app": lines("model.lr", "loss", "model.momentum", xscale="log", yscale="log"),
    "accelerate": curves("loss"),
    "lightning": curves("loss"),
    "trainer": curves("loss"),
}


def draw(name: str) -> None:
    page = (GALLERY / f"{name}.md").read_text()
    for module in re.findall(r"<!-- needs: (\w+) -->", page):
        if importlib.util.find_spec(module) is None:
            sys.stderr.write(f"{name}: needs {module}, left as it is\n")
            return
    command = "".join(re.findall(r"```bash\n(.*?)```", page, re.S))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        env = {**os.environ, "PATH": path, "MUSTER_LEASE_DIR": f"{folder}/leases"}
        subprocess.run(["bash", "-euc", command], cwd=folder, env=env, check=True)
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        PICTURES[name](axes, Path(folder) / "runs" / name)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        (GALLERY / "pictures").mkdir(exist_ok=True)
        figure.savefig(GALLERY / "pictures" / f"{name}.png", dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        draw(chosen)
