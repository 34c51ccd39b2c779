"""What saving costs a training loop: muster's writer beside torch.save, DCP and a plain copy.

    python benchmarks/checkpoint_stall.py            # 15 rounds: about 8 minutes
    python benchmarks/checkpoint_stall.py --quick

A real loop (forward, backward, AdamW; one thread) with 151 MB of model and optimizer state, saved
every 20 steps. All run in one process in turn, each in its documented way; a copy into memory that
is kept for it is the least that anything can do that writes while the training goes on.

In each round every contender saves once and goes on for 20 steps; then the rest of its writing is
waited for, as the next save would have to. ``blocked`` is what that call takes, and that wait;
``added`` is the time per step beyond that of 20 steps without saving right beside it, before it
and behind it in turn, so a writer that slows down the steps after the call pays for it: the median
with its 95 % interval. That of "no saving", two times the same, shows what is only scatter. Where
the interval has the goal in it, the goal is not judged: this machine cannot tell. ``thread`` is the
same in CPU time of the training thread, which other programs on the machine change least;
``worst`` is the longest step, with the save in it. muster and DCP sync their files to the disk;
torch.save does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from measuring import at_most, goal, interval, machine, summary, table, write_json
from muster.rank.checkpoint import CheckpointWriter, Snapshot
from muster.rank.checkpoint_files import model_tensors, optimizer_tensors

Tensors = Mapping[str, Tensor]


class Loop:
    """The training: ``step`` makes one, ``tensors`` is its state."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._x = torch.randn(batch, width)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> Tensors:
        state = {**model_tensors(self.model), **optimizer_tensors(self.model, self.optimizer)}
        return {name: tensor.detach() for name, tensor in state.items()}


class Nothing:
    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder = folder

    def save(self, step: int, tensors: Tensors) -> None:
        return

    def finish(self) -> None:
        return


class Copy(Nothing):
    """Into memory that was there before."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._kept = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def save(self, step: int, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor)


class Muster(Nothing):
    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._writer = CheckpointWriter(folder, rank=0, num_ranks=1)
        self._writer.prepare(tensors)
        self._writer.wait()

    def save(self, step: int, tensors: Tensors) -> None:
        self._writer.save(Snapshot(step=step, tensors=tensors))

    def finish(self) -> None:
        self._writer.wait()


class TorchSave(Nothing):
    def save(self, step: int, tensors: Tensors) -> None:
        torch.save(dict(tensors), self.folder / f"step-{step}.pt")


class DcpAsync(Nothing):
    """``async_save`` as its tutorial has it: the write before is waited for."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder = folder
        self._future: Any = None

    def options(self) -> dict[str, Any]:
        return {}

    def save(self, step: int, tensors: Tensors) -> None:
        self.finish()
        target = self.folder / f"step-{step}"
        self._future = dcp.async_save(dict(tensors), checkpoint_id=target, **self.options())

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class DcpKept(DcpAsync):
    """The same with a stager that keeps its memory from save to save."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        super().__init__(folder, tensors)
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}

    def finish(self) -> None:
        if self._future is not None:
            getattr(self._future, "upload_completion", self._future).result()
            self._future = None


CONTENDERS: dict[str, Callable[[Path, Tensors], Nothing]] = {
    "no saving": Nothing,
    "plain copy": Copy,
    "muster": Muster,
    "DCP async_save": DcpAsync,
    "DCP async_save, DefaultStager": DcpKept,
    "torch.save": TorchSave,
}


@dataclass(frozen=True)
class Found:
    """Milliseconds; ``step_ms`` and ``thread_ms`` are per step with everything in it."""

    blocked_ms: float
    step_ms: float
    thread_ms: float
    worst_ms: float


def run(saver: Nothing, loop: Loop, *, number: int, every: int, folder: Path) -> Found:
    """One save, ``every`` steps, and the wait for what is still being written."""
    began, thread_began = time.perf_counter(), time.thread_time()
    worst = blocked = 0.0
    for index in range(every):
        step_began = time.perf_counter()
        if index == 0:
            saver.save(number, loop.tensors())
            blocked = time.perf_counter() - step_began
        loop.step()
        worst = max(worst, time.perf_counter() - step_began)
    wait_began = time.perf_counter()
    saver.finish()
    ended, thread_ended = time.perf_counter(), time.thread_time()
    for old in folder.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    return Found(
        blocked_ms=(blocked + ended - wait_began) * 1e3,
        step_ms=(ended - began) / every * 1e3,
        thread_ms=(thread_ended - thread_began) / every * 1e3,
        worst_ms=worst * 1e3,
    )


def _told(values: list[float]) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(median(values), *interval(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to write; default: temporary files")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.width, args.repeats = 512, 2
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    loop = Loop(args.width, args.batch)
    for _ in range(3):
        loop.step()
    size = sum(t.numel() * t.element_size() for t in loop.tensors().values())
    found: dict[str, list[Found]] = {name: [] for name in CONTENDERS}
    beside: dict[str, list[Found]] = {name: [] for name in CONTENDERS}  # without saving
    with tempfile.TemporaryDirectory(prefix="muster-bench-", dir=args.folder) as name:
        store = dist.FileStore(f"{name}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        savers: dict[str, Nothing] = {}
        nothing, nowhere = Nothing(Path(name), {}), Path(name, "nothing")
        nowhere.mkdir()
        for number, (contender, make) in enumerate(CONTENDERS.items()):
            folder = Path(name, str(number))
            folder.mkdir()
            savers[contender] = make(folder, loop.tensors())
            # The first save of all sets things up; a long training has one.
            run(savers[contender], loop, number=0, every=1, folder=folder)
        for round_number in range(1, args.repeats + 1):
            for number, (contender, saver) in enumerate(savers.items()):
                turns = [
                    (found[contender], saver, Path(name, str(number))),
                    (beside[contender], nothing, nowhere),
                ]
                for all_found, one, folder in turns if round_number % 2 else turns[::-1]:
                    all_found.append(
                        run(one, loop, number=round_number, every=args.every, folder=folder)
                    )
                without = f"{beside[contender][-1].step_ms:.1f} ms per step without"
                print(
                    f"  round {round_number}: {contender}: {found[contender][-1]}, {without}",
                    file=sys.stderr,
                )
        dist.destroy_process_group()
    copies = found["plain copy"]
    added = {
        contender: [v.step_ms - b.step_ms for v, b in zip(values, beside[contender], strict=True)]
        for contender, values in found.items()
    }
    of_copy = {
        contender: [v.blocked_ms / c.blocked_ms for v, c in zip(values, copies, strict=True)]
        for contender, values in found.items()
    }
    record = {
        contender: {
            "blocked_ms": summary([v.blocked_ms for v in values]),
            "added_ms": summary(added[contender]) | {"interval": interval(added[contender])},
            "thread_ms": summary(
                [v.thread_ms - b.thread_ms for v, b in zip(values, beside[contender], strict=True)]
            ),
            "step_ms": summary([v.step_ms for v in values]),
            "worst_ms": summary([v.worst_ms for v in values]),
            "of_copy": summary(of_copy[contender]),
        }
        for contender, values in found.items()
    }
    about = machine()
    print(f"{about['processor']}, {about['cores']} cores, {about['date']}")
    print(f"{size / 1e6:.0f} MB every {args.every} steps; {args.repeats} rounds")
    rows = [
        [
            contender,
            f"{r['blocked_ms']['median']:.1f}",
            f"[{r['blocked_ms']['low']:.1f}–{r['blocked_ms']['high']:.1f}]",
            f"{r['of_copy']['median']:.2f}",
            f"{r['added_ms']['median']:.2f}",
            "[{:.2f}, {:.2f}]".format(*interval(added[contender])),
            f"{r['thread_ms']['median']:.2f}",
            f"{r['step_ms']['median']:.1f}",
            f"{r['worst_ms']['median']:.0f}",
        ]
        for contender, r in record.items()
    ]
    headers = ["", "blocked ms per save", "range", "of the copy"]
    headers += ["added ms per step", "95 % interval", "thread", "step, ms", "worst step"]
    table(headers, rows)
    shares = of_copy["muster"]
    goal("a save blocks a step, × the copy", "≤ 1.5", _told(shares), at_most(shares, 1.5))
    # Beside what one copy takes, divided by the steps: what a copy adds to them is a difference of
    # two step times, and scatters by more than it is.
    copy = record["plain copy"]["blocked_ms"]["median"] / args.every
    times = [own / copy for own in added["muster"]]
    goal(
        "time that saves add to a step, × the copy's", "≤ 1.5",
        f"{_told(times)} ({median(times) * copy:.2f} ms, {copy:.2f} ms)", at_most(times, 1.5),
    )  # fmt: skip
    write_json(args.json, {"machine": about, "bytes": size, "found": record})


if __name__ == "__main__":
    main()
