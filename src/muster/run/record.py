"""``run.json``: what a run folder was made for; and an id that tells the folder from its copies."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from muster.base.atomic_files import explain_os_error, replacing
from muster.base.codec import MalformedError, as_read_back, decode, read_record, write_json
from muster.base.errors import PlanMismatchError, SetupError
from muster.base.modules import version_of
from muster.base.shown_text import command_line, shell_word
from muster.run.folder import RunFolder

FORMAT = 1

#: What a run folder holds. An array and its elements are sweeps; `muster.fit` trains.
Kind = Literal["sweep", "map", "train", "agent", "run"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: The kinds of lock-step programs: they have ranks instead of tasks, and no ledger.
GANG_KINDS: tuple[Kind, ...] = ("train", "agent", "run")
KIND_NAMES: dict[Kind, str] = {
    "sweep": "a sweep",
    "map": "a map",
    "train": "a training",
    "agent": "the training of an agent",
    "run": "a run of a program",
}
_CALLS: dict[Kind, str] = {"sweep": "muster.sweep", "map": "muster.map"}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    run_id: str
    name: str
    kind: Kind
    created_s: float
    spec: Mapping[str, Any]
    code: dict[str, str]
    options: dict[str, Any]
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    targets: tuple[dict[str, Any], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def is_gang(self) -> bool:
        """Whether it has ranks in lock-step, instead of tasks in a ledger."""
        return self.kind in GANG_KINDS

    @property
    def kind_name(self) -> str:
        """The kind with its article, for sentences."""
        return KIND_NAMES[self.kind]

    def check_kind(self, kind: Kind, folder: RunFolder) -> None:
        """Raise PlanMismatchError where a run of another ``kind`` is to go into its folder."""
        if self.kind != kind:
            raise PlanMismatchError(
                f"{folder.path} is the folder of {self.kind_name}, not of {KIND_NAMES[kind]}: it "
                "is left alone.",
                hint="choose another --run-dir or --name.",
            )

    @property
    def is_map(self) -> bool:
        return self.kind == "map"

    @property
    def is_search(self) -> bool:
        """Whether it is a sweep whose settings are chosen as results come."""
        return self.kind == "sweep" and bool(self.spec.get("search"))

    @property
    def call(self) -> str:
        """The function that makes such a run."""
        return _CALLS.get(self.kind, "muster.fit")

    @property
    def is_program(self) -> bool:
        """Whether it is a program of the user's, of which only its ranks are known."""
        return self.kind == "run"

    def how_it_goes_on(self, folder: RunFolder) -> str:
        """What the user types to go on with the run in ``folder``, of which this is the record."""
        if self.is_program or not (self.argv or folder.array):
            call = command_line(self.argv) if self.argv else f"{self.call}(…)"
            return f"the same again, in {self.cwd}: {call}"
        return f"muster resume {shell_word(folder.whole)}"


def new_record(folder: RunFolder, kind: Kind, options: Any, **asked: Any) -> RunRecord:
    """The record of a run that begins here and now.

    ``options``: a dataclass; ``asked``: the remaining fields of the record.
    """
    return RunRecord(
        run_id=uuid.uuid4().hex,
        name=folder.name,
        kind=kind,
        created_s=time.time(),
        options=plain_options(options),
        cwd=str(Path.cwd()),
        environment=environment(),
        **asked,
    )


def plain_options(options: Any) -> dict[str, Any]:
    """Options as JSON has them, without those for one start: `muster resume` repeats the others."""
    lasting = dataclasses.replace(options, allow_changed_code=False, restart=False)
    plain: dict[str, Any] = as_read_back(lasting)
    plain.pop("is_chosen_anew", None)
    return plain


def environment() -> dict[str, str]:
    """What ran this: enough to set it up again."""
    versions = {"python": sys.version.split()[0], "platform": _platform()}
    for package in ("muster-gpu", "torch", "numpy"):
        if version := version_of(package):
            versions[package] = version
    return versions


def _platform() -> str:
    """As `platform.platform` has it, which on Linux starts a process to leave its answer out."""
    if sys.platform != "linux":
        return platform.platform()
    system = os.uname()
    library = "".join(platform.libc_ver())
    parts = (system.sysname, system.release, system.machine, library and f"with-{library}")
    return "-".join(filter(None, parts))


def write_run(folder: RunFolder, stored: RunRecord) -> None:
    write_json(folder.run_json, stored)


def read_run(folder: RunFolder) -> RunRecord:
    """The record of a folder; SetupError if it is missing, damaged or from a newer muster."""
    record = read_record(folder.run_json, "run.json", {})
    if "run_id" not in record:
        raise SetupError(f"{folder.run_json} is not a run.json of muster.")
    form = record.get("format", 0)
    if isinstance(form, int) and form > FORMAT:
        raise SetupError(
            f"{folder.run_json} was written by a newer muster (format {form}).",
            hint="upgrade muster: pip install --upgrade muster-gpu.",
        )
    try:
        values = {**record, "kind": _kind_of(record), "format": FORMAT}
        return decode(RunRecord, values, ignore_unknown=True)
    except MalformedError as error:
        raise SetupError(
            f"The run.json at {folder.run_json} is damaged: {error}.",
            hint="restore it from a copy.",
        ) from None


def _kind_of(record: Mapping[str, Any]) -> Kind:
    """What the record says; inferred for folders that were made before it said so."""
    for kind in KINDS:
        if record.get("kind") == kind:
            return kind
    spec = record.get("spec")
    if not isinstance(spec, dict):
        return "sweep"
    if "train" in spec:
        program = spec.get("program")
        target = program.get("target", "") if isinstance(program, dict) else ""
        return "agent" if str(target).startswith("muster.rl.") else "train"
    if "program" in spec:
        return "run"
    return "map" if "stages" in spec else "sweep"


class FolderId(NamedTuple):
    """The id of a folder. A copy has the same run id as its original, so what a run has outside of
    its folder, such as its processes and a ledger on a local disk, is named after the folder. The
    id is kept in a file with the inodes of the folder and of that file: no copy has the same.

    ``is_new_copy``: this folder was copied, or moved to another disk, since the last start.
    """

    text: str
    is_new_copy: bool = False


def own_id(folder: RunFolder, fresh: str = "") -> FolderId:
    """The id of this very folder, drawn at the first call. The caller holds its lock.

    A folder that moves within its file system keeps its id. A copy gets a new one, and loses what
    was assigned to the pilots of the original. ``fresh``: what to take where there is none yet, of
    whoever had to know it before. Raises SetupError where it cannot be written.
    """
    if (known := known_id(folder)) is not None:
        return FolderId(known)
    record, drawn = _read(folder.identity_json), fresh or drawn_id()
    try:
        if record is not None:
            folder.pilot_assignment.unlink(missing_ok=True)  # pilots of the original serve that one
        with replacing(folder.identity_json) as beside:
            values = {"id": drawn, "inodes": _inodes(folder, beside)}
            beside.write_text(json.dumps(values) + "\n")
    except OSError as error:
        raise explain_os_error(error, "write", folder.identity_json) from error
    return FolderId(drawn, is_new_copy=record is not None)


def drawn_id() -> str:
    """An id that no run folder has."""
    return uuid.uuid4().hex


def known_id(folder: RunFolder) -> str | None:
    """The folder's id; None where none was drawn for this very folder. It changes nothing."""
    record = _read(folder.identity_json)
    if record is None or record.get("inodes") != _inodes(folder, folder.identity_json):
        return None
    return str(record.get("id"))


def _inodes(folder: RunFolder, file: Path) -> list[int]:
    return [folder.path.stat().st_ino, file.stat().st_ino]


def _read(path: Path) -> dict[str, object] | None:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
