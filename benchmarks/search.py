"""A search with early stopping, beside Optuna's pruner on its journal, Ray Tune and NePS.

    python benchmarks/search.py                    # 81 trials, two workers, some minutes
    python benchmarks/search.py --trials 9 --step-s 0.005 --only muster,optuna

All contenders go through the same recorded grid of 81 settings (tests/fixtures/digits_grid.json),
where an epoch is a sleep, until they have tried so many trials. What is measured: seconds from the
start of the process to its end, the best accuracy found, the epochs run, and the most memory of
the whole tree of processes. Then each is started again and its driver is killed (kill -9) after
half of the time that it took; ``left`` counts the trials whose result can still be read, about half
of them where none is lost. Muster's same command is then given once more: all trials have to be
there at its end. The contenders take turns for ``--rounds`` rounds, and medians are shown with the
smallest and the largest.

NePS counts every visit of a rung as an evaluation, promotes instead of stopping, and has two equal
workers instead of a driver: it is given 3/2 evaluations per trial (1 + 1/3 + 1/9 + 1/27 rungs), and
one worker is killed. Where it is not installed beside Muster, ``--neps PYTHON`` names a Python that
has it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from measuring import goal, installed, machine, table, write_json

GRID = Path(__file__).parents[1] / "tests" / "fixtures" / "digits_grid.json"
NAMES = ("lr", "momentum", "width", "weight_decay")
MODULE = Path(__file__).resolve()


def curve(params: dict[str, Any]) -> list[float]:
    grid = json.loads(GRID.read_text())
    for setting, right in zip(grid["settings"], grid["right"], strict=True):
        if all(float(setting[name]) == float(params[name]) for name in NAMES):
            return [count / grid["images"] for count in right]
    raise KeyError(str(params))


def choices() -> dict[str, list[float]]:
    settings = json.loads(GRID.read_text())["settings"]
    return {name: sorted({setting[name] for setting in settings}) for name in NAMES}


def note(folder: Path, accuracy: float) -> None:
    """One line for each epoch, so that epochs are counted in the same way everywhere."""
    time.sleep(float(os.environ["STEP_S"]))
    with (folder / "epochs.txt").open("a") as file:
        file.write(f"{accuracy}\n")


TARGET = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(MODULE.parent)!r})
import search as benchmark

def train(lr: float, momentum: float, width: int, weight_decay: float, ctx):
    params = dict(lr=lr, momentum=momentum, width=width, weight_decay=weight_decay)
    for step, accuracy in enumerate(benchmark.curve(params), 1):
        benchmark.note(Path(__file__).parent, accuracy)
        ctx.log(step, accuracy=accuracy)
    return {{"accuracy": accuracy}}
"""


def run_muster(folder: Path, trials: int) -> list[str]:
    (folder / "work.py").write_text(TARGET)
    space = [f"{name}=choice({','.join(map(str, values))})" for name, values in choices().items()]
    return [
        sys.executable, "-m", "muster", "sweep", str(folder / "work.py:train"),
        *(word for text in space for word in ("--space", text)),
        "--maximize", "accuracy", "--trials", str(trials), "--stop", "asha-stop:min=1,max=27,eta=3",
        "--devices", "cpu:2", "--run-dir", str(folder / "run"),
    ]  # fmt: skip


def run_optuna(folder: Path, trials: int) -> None:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    def objective(trial: Any) -> float:
        params = {name: trial.suggest_categorical(name, v) for name, v in choices().items()}
        for step, accuracy in enumerate(curve(params), 1):
            note(folder, accuracy)
            trial.report(accuracy, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return accuracy

    study = optuna.create_study(
        study_name="s",
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )
    study.optimize(objective, n_trials=trials, n_jobs=2)


def run_ray(folder: Path, trials: int) -> None:
    import ray
    from ray import tune

    def train(params: dict[str, Any]) -> None:
        for accuracy in curve(params):
            note(folder, accuracy)
            tune.report({"accuracy": accuracy})

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tune.Tuner(
        train,
        param_space={name: tune.choice(values) for name, values in choices().items()},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=trials,
            scheduler=tune.schedulers.ASHAScheduler(max_t=27, grace_period=1, reduction_factor=3),
        ),
        run_config=tune.RunConfig(storage_path=str(folder), name="tune", verbose=0),
    ).fit()


def left_muster(folder: Path) -> int:
    with sqlite3.connect(f"file:{folder / 'run' / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        return int(ledger.execute("select count(*) from results").fetchone()[0])


def left_optuna(folder: Path) -> int:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    trials = optuna.load_study(study_name="s", storage=storage).trials
    return sum(trial.state.is_finished() for trial in trials)


def left_ray(folder: Path) -> int:
    """The trials that the newest snapshot of the experiment's state calls terminated."""
    states = sorted((folder / "tune").glob("experiment_state-*.json"))
    return len(re.findall("TERMINATED", states[-1].read_text())) if states else 0


def run_neps(folder: Path, trials: int, worker: int = 0) -> None:
    import neps

    class Space(neps.PipelineSpace):  # type: ignore[misc]
        epochs = neps.IntegerFidelity(1, 27)

    for name, values in choices().items():
        setattr(Space, name, neps.Categorical(values))

    def evaluate(
        epochs: int,
        lr: float,
        momentum: float,
        width: int,
        weight_decay: float,
        pipeline_directory: Path,
        previous_pipeline_directory: Path | None,
    ) -> dict[str, float]:
        reached = 0
        if previous_pipeline_directory is not None:  # it goes on from the rung below
            reached = int((Path(previous_pipeline_directory) / "reached").read_text())
        params = {"lr": lr, "momentum": momentum, "width": width, "weight_decay": weight_decay}
        for accuracy in curve(params)[reached:epochs]:
            note(folder, accuracy)
        (Path(pipeline_directory) / "reached").write_text(str(epochs))
        return {"objective_to_minimize": 1 - accuracy, "cost": epochs - reached}

    second = None
    if worker == 0:
        words = [sys.executable, str(MODULE), "--contender", "neps-worker", "--folder", str(folder)]
        second = subprocess.Popen([*words, "--trials", str(trials)])
    neps.run(
        evaluate,
        Space(),
        root_directory=folder / "neps",
        optimizer=("asha", {"eta": 3}),
        total_evaluations_to_spend=trials * 3 // 2,
    )
    if second is not None:
        second.wait()


def left_neps(folder: Path) -> int:
    """The evaluations that have a report."""
    return len(list((folder / "neps" / "configs").glob("*/report.yaml")))


CONTENDERS = {"muster": left_muster, "optuna": left_optuna, "ray": left_ray, "neps": left_neps}


def start(name: str, folder: Path, flags: argparse.Namespace) -> subprocess.Popen[bytes]:
    python = flags.neps if name == "neps" else sys.executable
    words = [python, str(MODULE), "--contender", name, "--folder", str(folder),
             "--trials", str(flags.trials)]  # fmt: skip
    if name == "muster":
        words = run_muster(folder, flags.trials)
    log = (folder / "log.txt").open("wb")
    environment = {**os.environ, "STEP_S": str(flags.step_s)}
    return subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)


def memory_mib(pid: int) -> float:
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.Error:
        pass
    return total / 2**20


def measure(name: str, flags: argparse.Namespace) -> list[float]:
    """One round: seconds, best accuracy, epochs, MiB, what is left after a kill, and for Muster
    what is there once the same command has gone on.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"search-{name}-"))
    began, most = time.monotonic(), 0.0
    process = start(name, folder, flags)
    while process.poll() is None:
        most = max(most, memory_mib(process.pid))
        time.sleep(0.1)
    took = time.monotonic() - began
    if process.returncode:
        print((folder / "log.txt").read_text()[-2000:])
    epochs = (folder / "epochs.txt").read_text().split() if process.returncode == 0 else ["nan"]
    shutil.rmtree(folder)
    killed = Path(tempfile.mkdtemp(prefix=f"search-{name}-"))
    process = start(name, killed, flags)
    time.sleep(took / 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3)
    for child in children:  # what the driver left running
        if child.is_running():
            child.kill()
    left = again = CONTENDERS[name](killed)
    if name == "muster":
        start(name, killed, flags).wait()
        again = left_muster(killed)
    shutil.rmtree(killed, ignore_errors=True)
    return [took, max(map(float, epochs)), len(epochs), most, left, again]


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=81)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neps", default=sys.executable, help="a Python that has NePS")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--contender")
    parser.add_argument("--quick", action="store_true", help="9 trials of short steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    flags = parser.parse_args()
    if flags.quick:
        flags.trials, flags.step_s, flags.rounds = 9, 0.005, 1
    if flags.contender:
        contenders = {"optuna": run_optuna, "ray": run_ray, "neps": run_neps}
        contenders["neps-worker"] = partial(run_neps, worker=1)
        contenders[flags.contender](flags.folder, flags.trials)
        return
    print(json.dumps(machine("optuna", "ray")))
    names = installed(flags.only.split(","), {"optuna": "optuna", "ray": "ray"})
    words = [flags.neps, "-c", "import neps"]
    if "neps" in names and subprocess.run(words, capture_output=True).returncode:
        print("NePS is not installed here and was not measured.")
        names.remove("neps")
    rounds: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(flags.rounds):
        for name in names:
            rounds[name].append(measure(name, flags))
    digits = {"seconds": 1, "best epoch": 4, "epochs": 0, "most MiB": 0, "left after kill": 0}
    rows = []
    for name, measured in rounds.items():
        figures = zip(zip(*measured, strict=True), digits.values(), strict=False)
        rows.append([name, *(spread(list(values), number) for values, number in figures)])
    table(["contender", *digits], rows)
    if "muster" in rounds:
        again = [int(one[-1]) for one in rounds["muster"]]
        goal("trials after kill -9 in the middle and the same command", f"{flags.trials}",
             f"{min(again)}", {*again} == {flags.trials}, at_any_size=True)  # fmt: skip
    write_json(flags.json, {"machine": machine("optuna", "ray"), "rounds": rounds})


if __name__ == "__main__":
    main()
