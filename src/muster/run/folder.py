"""The run folder: the only place that knows the names of the files in it.

runs/<name>/
  run.json            what was asked: target, space, options, environment, command line
  ledger.sqlite       the durable record: every task, attempt and result
  ledger.segment      what was recorded since the last copy, where the ledger works on a local disk
  events.jsonl        what happened to the run, a line each (start, resume, quarantine, …)
  status.json         the last known picture of a run that is under way
  identity.json       the id of this very folder; a copy of it gets another one
  devices.json        which devices it is to have, where somebody has said so since it was begun
  spent.json          the device hours that were used under a limit, such as --max-gpu-hours
  run.lock            held while a coordinator runs
  logs/worker-3.log   everything the tasks of slot 3 printed; the ledger knows the offsets
  logs/rank-3.log     everything rank 3 of a gang printed, over all restarts
  logs/rank-3.error.json  the exception that ended it; logs/rank-3.stack where it stood in a stall
  logs/phases.json    for how many seconds each rank was at what, in its last start
  logs/command.log    what the command itself printed that was started with --detach; command.log.1
                      what it had printed before that
  logs/ray-HOST.log   with --hosts: what Ray said on a host on which it did not come up
  logs/agent.log      the log of the supervisor, which starts the ranks and watches over them
  ending.json         how a gang ended, where its ranks say so (requeue: start me again)
  artifacts/ab/<key>/ the folder of a finished task that wrote files
  attempts/           folders of attempts that have not been accepted (or failed)
  spare/              empty folders that workers keep for their next commands, while they are there
  files/HOST/         with --hosts: what a program has written into its working folder on that host
  checkpoints/        <key>.ckpt of long tasks that saved one; <key>/ what a program saved, and the
                      run folder of a training that is a task, until it is done
  points/             what the programs of unfinished tasks have logged
  values/             results too large for the ledger
  requests/           which session works on the run, and what others have asked of it
  results.parquet     one row per task; results.csv is the same
  table.csv, figures/ what a recipe makes of the results
  cells/NAME/         of a run from a notebook: the module that its function or class became
  report/index.html   all of it on one page, which holds its pictures and can be sent away
  metrics.jsonl       a line per optimizer step and evaluation of a training
  tb/                 the same for TensorBoard; of a sweep a folder for each task
  trackers/           with --log-to: how far each tracker has got, and what it keeps on this machine
  training_results.json  what a training came to; curves.png is its picture
  monitor.csv         what GPUs and host did, a row per device every few seconds; on further nodes
                      of a gang monitor-1.csv, …; monitor.png is their picture
  plan.json           what `muster plan --for-run` has predicted
  plan_error.json     the prediction beside what the run has taken
  verify.json         what `muster verify` has found
  map.json            what every worker of a map is told: source, stages, limits
  columns.json        the types of columns that stages have declared
  parts/0000/         the finished and growing chunks of a map, 256 shards to a folder
  input/              the index of a map's input, and what had to be unpacked or downloaded
  errors.jsonl        the records of a map that failed, with stage, reason and traceback
  publishing.json     there while a map writes its output
  published.json      the output that a map has written, with its size and counts
  stages/0/ …         a run folder per stage of a map with --stage-by-stage
  memory.json         the micro-batch that was found to fit after an out-of-memory error
  model/              what the task of a training has written at its end, such as the model
  pilots/             on a cluster: what the coordinator and the workers' hosts write to each other
  pilots/token        a text by which a worker's host knows that it sees this very folder (Ray)
  pilots/beat         the coordinator's heartbeat; pilots/assignment.json what every pilot is told
  pilots/jobs.json    the jobs that were submitted and have not been seen to end
  pilots/7/812.0/     the files of slot 7's pilot in job 812: outbox, inbox-1 of coordinator 1, …
  pilots/jobs/        the scripts that were submitted and what the jobs printed
  slurm/              of a gang on SLURM: job.sh as it was sent, job.json which job that became,
                      job-812.log what it printed, job-812.cancelled: somebody has cancelled it
  elements/7/         with --array: the run folder of element 7, until `muster collect`

The folder of an experiment with phases has a run folder for each phase, experiment.json (what was
asked) and phases.jsonl (how phases began and ended).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from muster.base.settings import CHECKPOINT_DIR, variable

#: What a command leaves in ``MUSTER_TASK_DIR``: a JSON object, the result of the task.
RESULT_FILE = "result.json"
#: What the folder of an experiment with phases has, instead of a run.json.
EXPERIMENT_FILE = "experiment.json"
_HASH_DIGITS = 6
#: File systems allow 255 bytes; the rest is left to whatever is put after the name.
_MAX_NAME = 80


def default_root() -> Path:
    """Where runs are kept that were given no place: a run that is a task of another is inside it,
    where its next attempt goes on with it."""
    return Path(variable(CHECKPOINT_DIR) or "runs")


def name_with_hash(name: str, digest: str) -> str:
    """``<name>-<6 digits of digest>``, safe as a file name on every system.

    Anything but ASCII letters, digits, ``.``, ``_`` and ``-`` becomes ``-``; an empty name
    becomes ``run``.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    safe = re.sub(r"-{2,}", "-", safe)[:_MAX_NAME].strip("-.")
    return f"{safe or 'run'}-{digest[:_HASH_DIGITS]}"


def id_of(path: Path) -> str:
    """The same for the same folder, however it is reached, and whether it is there yet or not."""
    return blake2b(os.fsencode(os.path.realpath(path)), digest_size=6).hexdigest()


def folder_for(name: str, digest: str, more: str = "") -> RunFolder:
    """The folder of a run that was given no place. ``digest``: of what decides about its result,
    so that the same command finds it again; ``more``: what follows the name.
    """
    return RunFolder(default_root() / f"{name_with_hash(name, digest)}{more}")


class _Place:
    """A file or folder of a run folder, by its place in it: a path, which is made once."""

    def __init__(self, below: str) -> None:
        self._below = below

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        path = folder.__dict__[self._name] = folder.path / self._below
        return path


@dataclass(frozen=True)
class RunFolder:
    path: Path

    run_json = _Place("run.json")
    ledger = _Place("ledger.sqlite")
    events = _Place("events.jsonl")
    status_json = _Place("status.json")
    identity_json = _Place("identity.json")
    devices_json = _Place("devices.json")
    lock = _Place("run.lock")
    logs = _Place("logs")
    rank_phases = _Place("logs/phases.json")
    command_log = _Place("logs/command.log")
    ending_json = _Place("ending.json")
    attempts = _Place("attempts")
    artifacts = _Place("artifacts")
    checkpoints = _Place("checkpoints")
    points = _Place("points")
    values = _Place("values")
    requests = _Place("requests")
    results_parquet = _Place("results.parquet")
    results_csv = _Place("results.csv")
    table_csv = _Place("table.csv")
    figures = _Place("figures")
    report_html = _Place("report/index.html")
    metrics = _Place("metrics.jsonl")
    tensorboard = _Place("tb")
    trackers = _Place("trackers")
    training_results = _Place("training_results.json")
    curves = _Place("curves.png")
    pilots = _Place("pilots")
    pilot_heartbeat = _Place("pilots/beat")
    pilot_token = _Place("pilots/token")
    pilot_assignment = _Place("pilots/assignment.json")
    job_files = _Place("pilots/jobs")
    slurm = _Place("slurm")
    slurm_script = _Place("slurm/job.sh")
    slurm_job = _Place("slurm/job.json")
    elements = _Place("elements")
    elements_json = _Place("elements/array.json")
    """How many elements there are, and the job that runs them."""
    memory_json = _Place("memory.json")
    monitor_png = _Place("monitor.png")
    plan_json = _Place("plan.json")
    plan_error_json = _Place("plan_error.json")
    verify_json = _Place("verify.json")
    map_json = _Place("map.json")
    parts = _Place("parts")
    map_input = _Place("input")
    map_columns = _Place("columns.json")
    publishing_json = _Place("publishing.json")
    errors_jsonl = _Place("errors.jsonl")
    published_json = _Place("published.json")
    model = _Place("model")
    """What a task's ``finish`` writes: the trained model in a form of its own."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def ledger_files(self) -> tuple[Path, Path, Path]:
        """The ledger, SQLite's log of what is not in it yet, and what an away ledger has sent."""
        return self.ledger, Path(f"{self.ledger}-wal"), self.ledger.with_suffix(".segment")

    @property
    def last_at_work_s(self) -> float:
        """Unix time. A start that changes nothing leaves run.json, and writes to its journal."""
        found = 0.0
        for path in (self.run_json, self.events):
            with suppress(OSError):
                found = max(found, path.stat().st_mtime)
        return found

    @property
    def spent_json(self) -> Path:
        return self.whole / "spent.json"  # the stages of a map have one amount

    def worker_log(self, slot_id: int) -> Path:
        return self.logs / f"worker-{slot_id}.log"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def rank_error(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.error.json"

    def rank_stack(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.stack"

    def agent_log(self, node_rank: int) -> Path:
        return self.logs / ("agent.log" if node_rank == 0 else f"agent-{node_rank}.log")

    def ray_log(self, host: str) -> Path:
        return self.logs / f"ray-{host}.log"

    def attempt(self, key: str, token: int) -> Path:
        """The private folder of one attempt, published by rename when it is accepted."""
        return self.attempts / f"{key}.{token}"

    def spare_of(self, worker: str) -> Path:
        """What the names of the empty folders begin with that the worker with this log keeps."""
        return self.path / "spare" / worker

    def artifact(self, key: str) -> Path:
        """Spread over 256 folders, so that 100,000 tasks do not share one listing."""
        return self.artifacts / key[:2] / key

    def points_of(self, key: str, token: int) -> Path:
        """Where the program of one attempt writes numbers, until the task is done."""
        return self.points / f"{key}.{token}.jsonl"

    def checkpoint(self, key: str) -> Path:
        return self.checkpoints / f"{key}.ckpt"

    def saved(self, key: str) -> Path:
        """What the program of a task saves for its later attempts."""
        return self.checkpoints / key

    def value(self, key: str) -> Path:
        return self.values / key[:2] / f"{key}.json"

    def tracker_position(self, name: str) -> Path:
        return self.trackers / f"{name}.jsonl"

    def tracker_log(self, name: str) -> Path:
        return self.logs / f"tracker-{name}.log"

    @property
    def job_name(self) -> str:
        """The name of the folder's pilot jobs on SLURM and of no other's; squeue filters by it."""
        path = self.path.absolute()
        shown = re.sub(r"[^A-Za-z0-9_.-]", "-", path.name)[:24]
        return f"muster-{shown}-{sha256(str(path).encode()).hexdigest()[:10]}"

    @property
    def array_name(self) -> str:
        """The name of an array that needs no coordinator: none may end its elements as its own."""
        return f"{self.job_name}-array"

    def pilots_of(self, slot_id: int) -> Path:
        """A folder for every pilot that this slot has had."""
        return self.pilots / str(slot_id)

    def slurm_log(self, job_id: str) -> Path:
        return self.slurm / f"job-{job_id}.log"

    def slurm_cancelled(self, job_id: str) -> Path:
        return self.slurm / f"job-{job_id}.cancelled"

    def element(self, number: int) -> RunFolder:
        return RunFolder(self.elements / str(number))

    @property
    def array(self) -> RunFolder | None:
        """The run that this one is an element of; None for a run of its own."""
        place = self.path.absolute()
        if place.parent.name != self.elements.name or not place.name.isdigit():
            return None
        array = RunFolder(place.parent.parent)
        return array if array.elements_json.exists() and array.exists() else None

    def files_of(self, host: str) -> Path:
        return self.path / "files" / host

    def monitor_csv(self, node_rank: int = 0) -> Path:
        return self.path / ("monitor.csv" if node_rank == 0 else f"monitor-{node_rank}.csv")

    def monitor_logs(self) -> list[Path]:
        """The monitor files that exist, of all nodes."""
        further = sorted(self.path.glob("monitor-*.csv"))
        return [path for path in (self.monitor_csv(), *further) if path.exists()]

    def parts_of(self, order: int) -> Path:
        """Where the chunks of a shard are: a million of them must not share one listing."""
        return self.parts / f"{order // 256:04d}"

    def stage(self, number: int) -> Path:
        return self.path / "stages" / str(number)

    @property
    def whole(self) -> Path:
        """The folder of the whole map where this is one of its earlier stages; else this one."""
        is_stage = self.path.parent.name == "stages" and self.path.name.isdigit()
        return self.path.parent.parent if is_stage else self.path

    def exists(self) -> bool:
        """Also where it may not be looked at: whoever reads it then says so."""
        try:
            return self.run_json.is_file()
        except PermissionError:
            return True
        except OSError:
            return False

    def create(self) -> None:
        """Make the folder and its fixed sub-folders; raises OSError where that fails."""
        # If the path is a link, the folder that it leads to may have been moved aside.
        Path(os.path.realpath(self.path)).mkdir(parents=True, exist_ok=True)
        for folder in (self.logs, self.requests):
            folder.mkdir(exist_ok=True)
