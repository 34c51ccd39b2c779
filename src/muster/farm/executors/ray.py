"""Workers in Ray actors: the driver's end of a pilot per slot. The only module that imports Ray.

Ray does not restart an actor that is lost: its worker's death is reported, and the next ``start``
for the slot asks for another actor, wherever there is room. One ``poll`` call is outstanding per
actor, so a turn costs one call each way, however many tasks it carries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, SetupError
from muster.base.settings import kept_environment
from muster.farm import wire
from muster.farm.events import Event, Note, Progress, WorkerDied
from muster.farm.executors import remote
from muster.farm.executors.base import Assignment
from muster.farm.executors.cluster import ClusterRequest
from muster.farm.executors.ray_files import SENT_HOME
from muster.farm.executors.ray_pilot import RUNS, Pilot, PilotSetup, muster_version
from muster.farm.executors.ray_sending import (
    CodeToSend,
    DriverView,
    MapToSend,
    places_of_pilot,
)
from muster.farm.executors.ray_session import RaySession, needs
from muster.farm.executors.remote import LOG, Unpacker, is_shipped, pack_file, write_log
from muster.farm.task import Outcome, SlotSpec, Task
from muster.run.folder import RunFolder

_TELL_AFTER_S = 3.0
_GOODBYE_S = 5.0


@dataclass(eq=False)
class _Pilot:
    """An actor as the driver knows it. ``commands`` wait for the next call."""

    slot: SlotSpec
    log_base: int
    asked_s: float
    actor: Any = None  # until there is a cluster to ask
    apply: Any = None
    worker_id: int | None = None
    commands: bytearray = field(default_factory=bytearray)
    num_calls: int = 0
    host: str = ""
    is_open: bool = False
    is_shared: bool = False
    view: DriverView | None = None
    is_gone: bool = False
    has_tasks: bool = False
    was_told: bool = False
    reader: remote.EventReader = field(default_factory=remote.EventReader)


class RayExecutor:
    """A driver of the cluster that the assignment names, or of one that is started here."""

    def __init__(self, assignment: Assignment) -> None:
        self._ray: Any = None
        self._assignment = assignment
        self._folder = assignment.folder
        self._request = assignment.cluster
        self._pilots: dict[int, _Pilot] = {}
        self._by_worker: dict[int, _Pilot] = {}
        self._arrived: queue.SimpleQueue[tuple[_Pilot, str, Any]] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._token = secrets.token_hex(16)
        plan = self._folder.map_json
        self._map = MapToSend(plan, self._folder.name) if plan.exists() else None
        stages = self._map.stages if self._map is not None else []
        self._code = CodeToSend([*assignment.targets.values(), *stages], Path.cwd())
        self._sent: dict[str, list[Any]] = {}  # what is in the object store: code, and input files
        self._unpacker = Unpacker(self._folder.path, SENT_HOME)
        self._session: RaySession | None = None  # until a worker is asked for
        self._folder.pilots.mkdir(parents=True, exist_ok=True)
        self._folder.pilot_token.write_text(self._token)

    # ------------------------------------------------------------------ the five questions

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        pilot = self._pilots.get(slot.slot_id)
        if pilot is None:
            log = self._folder.worker_log(slot.slot_id)
            log_base = log.stat().st_size if log.exists() else 0
            pilot = _Pilot(slot, log_base, time.monotonic())
            self._pilots[slot.slot_id] = pilot
        pilot.worker_id = worker_id
        self._by_worker[worker_id] = pilot
        pilot.commands += remote.start_command(worker_id, slot)
        return self._folder.worker_log(slot.slot_id).name

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        pilot = self._by_worker.get(worker_id)
        if pilot is None:
            return
        if not pilot.is_shared and self._folder.checkpoints.exists():
            for task in tasks:
                self._send_checkpoint(pilot, task.key.hex())
        pilot.commands += remote.pass_command(worker_id, tasks, together=together)
        pilot.has_tasks = True

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._command(worker_id, remote.share_command(worker_id, task_id, others))

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        self._command(worker_id, remote.stop_task_command(worker_id, task_id, pauses=pauses))

    def revoke(self, worker_id: int) -> None:
        self._command(worker_id, remote.revoke_command(worker_id))

    def confirm(self, worker_id: int, serial: int) -> None:
        self._command(worker_id, remote.confirm_command(worker_id, serial))

    def end(self, worker_id: int, *, kill: bool) -> None:
        pilot = self._by_worker.get(worker_id)
        if pilot is None:
            return
        if not pilot.is_open and (kill or not pilot.has_tasks):
            self._give_up(pilot, "its actor had not been placed yet and is no longer needed", None)
            return
        pilot.commands += remote.end_command(worker_id, kill=kill)

    def poll(self, timeout_s: float) -> list[Event]:
        if self._pilots and not self._is_ready(0.0 if self._events else timeout_s):
            timeout_s = 0.0
        for pilot in self._pilots.values():
            if pilot.actor is None and self._ray is not None:
                self._ask_for_actor(pilot)
            self._flush(pilot)
        if self._session is not None:
            self._events += [Note("hosts", text) for text in self._session.news()]
        self._tell_who_waits()
        if self._events:
            timeout_s = 0.0
        with contextlib.suppress(queue.Empty):
            self._hear(*self._arrived.get(timeout=max(timeout_s, 1e-4)))
            while True:
                self._hear(*self._arrived.get_nowait())
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pilots = list(self._pilots.values())
        self._pilots.clear()
        self._by_worker.clear()
        try:
            calls = [pilot.actor.close.remote() for pilot in pilots if pilot.is_open]
            if calls:
                self._ray.wait(calls, num_returns=len(calls), timeout=_GOODBYE_S)
            for pilot in pilots:
                pilot.is_gone = True
                self._kill(pilot)
        finally:
            self._folder.pilot_token.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.pilots.rmdir()  # unless something else is in it
            if self._session is not None:
                self._session.close()

    # ------------------------------------------------------------------ pilots

    def _is_ready(self, timeout_s: float) -> bool:
        """Whether there is a cluster to ask for actors; without a first call nobody needs one."""
        if self._session is None:
            self._session = RaySession(_import_ray, self._request, RunFolder(self._folder.whole))
            _ = self._kept_code  # while Ray starts
        if not self._session.is_ready(timeout_s):
            return False
        self._ray = self._session.ray
        return True

    @property
    def _kept_code(self) -> str:
        """By which hash hosts keep the code for the next start; a cluster of others keeps none."""
        is_kept = self._request.hosts is not None and self._code.is_needed
        return self._code.digest if is_kept else ""

    def _kill(self, pilot: _Pilot) -> None:
        if pilot.actor is not None:
            self._ray.kill(pilot.actor, no_restart=True)

    def _ask_for_actor(self, pilot: _Pilot) -> None:
        """Ask for an actor; Ray starts it where and when there is room."""
        slot = pilot.slot
        actor = pilot.actor = (
            self._ray.remote(Pilot)
            .options(
                num_cpus=self._request.cores_per_actor,
                num_gpus=self._request.gpus_per_worker,
                memory=self._request.memory_bytes or None,
                resources=self._request.custom_resources,
                scheduling_strategy=self._request.placement_strategy,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote()
        )
        # Without a return value: nobody waits for it, and what goes wrong is heard by poll.
        pilot.apply = actor.apply.options(num_returns=0)
        setup = PilotSetup(
            version=muster_version(),
            run_path=str(self._folder.path.absolute()),
            token_path=str(self._folder.pilot_token.absolute()),
            token=self._token,
            run_id=self._assignment.run_id,
            slot_id=slot.slot_id,
            targets={
                str(number): dataclasses.asdict(target)
                for number, target in self._assignment.targets.items()
            },
            roots=self._code.roots,
            digests=self._code.digests,
            kept_code=self._kept_code,
            input_files=self._map.files if self._map is not None else {},
        )
        self._listen(pilot, "open", actor.open.remote(setup.to_json()))

    def _listen(self, pilot: _Pilot, what: str, reference: Any) -> None:
        def arrived(future: Any) -> None:
            self._arrived.put((pilot, what, future))

        reference.future().add_done_callback(arrived)

    def _command(self, worker_id: int, frame: bytes) -> None:
        pilot = self._by_worker.get(worker_id)
        if pilot is not None:
            pilot.commands += frame

    def _flush(self, pilot: _Pilot) -> None:
        if pilot.is_open and pilot.commands:
            self._apply(pilot, bytes(pilot.commands))
            pilot.commands.clear()

    def _apply(self, pilot: _Pilot, data: Any) -> None:
        """``data``: frames, or a reference to frames in the object store."""
        pilot.apply.remote(pilot.num_calls, data)
        pilot.num_calls += 1

    def _apply_stored(self, pilot: _Pilot, name: str, pack: Callable[[], Iterator[bytes]]) -> None:
        """Through the object store, where what one pilot has got lies ready for the next."""
        if name not in self._sent:
            self._sent[name] = [self._ray.put(piece) for piece in pack()]
        for reference in self._sent[name]:
            self._apply(pilot, reference)

    def _send_map(
        self, pilot: _Pilot, plan: MapToSend, about: dict[str, Any], roots: Sequence[str]
    ) -> None:
        for path in about["missing"]:
            self._apply_stored(pilot, path, partial(plan.pack_input, path))
        self._apply(pilot, plan.pack_plan(about["scratch"], about["missing"], roots))

    def _send_checkpoint(self, pilot: _Pilot, key: str) -> None:
        place = f"{RUNS}/{self._folder.name}/checkpoints/{key}.ckpt"
        pilot.commands += b"".join(pack_file(self._folder.checkpoint(key), place))

    # ------------------------------------------------------------------ listening

    def _hear(self, pilot: _Pilot, what: str, future: Any) -> None:
        if pilot.is_gone:
            return
        error = future.exception()
        if error is not None:
            self._lost(pilot, error)
        elif what == "open":
            self._opened(pilot, future.result())
        else:
            self._listen(pilot, "poll", pilot.actor.poll.remote())
            for event in self._read(pilot, future.result()):
                self._events.append(event)

    def _opened(self, pilot: _Pilot, about: dict[str, Any]) -> None:
        if about["version"] != muster_version():
            raise SetupError(
                f"Muster is {muster_version()} here and {about['version']} on the node "
                f"{about['host']}.",
                hint="install the same version on all nodes of the cluster.",
            )
        pilot.is_open, pilot.host = True, about["host"]
        pilot.is_shared = about["is_shared"]
        needs_code = self._code.is_needed and not about["has_code"]
        if needs_code and not about["keeps_code"]:
            self._apply_stored(pilot, "code", lambda: iter([self._code.pack()]))
        if needs_code or not pilot.is_shared:
            here = [str(self._folder.path.absolute()), *self._code.roots]
            there = places_of_pilot(about["scratch"], self._folder.name, len(self._code.roots))
            pilot.view = DriverView(
                log_base=0 if pilot.is_shared else pilot.log_base,
                places=dict(zip(there, here, strict=True)),
            )
        if about["missing"] and pilot.is_shared:
            raise SetupError(
                f"The node {pilot.host} sees the run folder but not the input: "
                f"{about['missing'][0]} is not there, or has another size.",
                hint="put the input where all nodes see it, or the run folder where they do not: "
                "then the input is sent to them.",
            )
        if self._map is not None and not pilot.is_shared:
            self._send_map(pilot, self._map, about, self._code.roots if needs_code else ())
        self._flush(pilot)
        self._listen(pilot, "poll", pilot.actor.poll.remote())

    def _read(self, pilot: _Pilot, parcel: bytes) -> Iterator[Event]:
        for event in pilot.reader.read(self._written(pilot, wire.unpack(bytearray(parcel)))):
            if isinstance(event, WorkerDied):
                self._forget(event.worker_id)
            yield pilot.view.of(event) if pilot.view else event

    def _written(self, pilot: _Pilot, frames: Iterator[remote.Frame]) -> Iterator[remote.Frame]:
        """The frames of events; those of files are written when they are met, ahead of results."""
        for header, body in frames:
            if is_shipped(header):
                self._unpacker.take(header, body)
            elif header[0] == LOG:
                _, slot_id, position = header
                write_log(self._folder.worker_log(slot_id), pilot.log_base + position, body)
            else:
                yield header, body

    def _tell_who_waits(self) -> None:
        now = time.monotonic()
        for pilot in self._pilots.values():
            is_due = not (pilot.is_open or pilot.was_told) and now - pilot.asked_s > _TELL_AFTER_S
            if is_due and pilot.worker_id is not None:
                pilot.was_told = True
                text = f"waiting for {needs(self._request)} to be free"
                if self._ray is None:
                    text = _start_of(self._request)
                self._events.append(Progress(pilot.worker_id, 0, text))

    # ------------------------------------------------------------------ ending

    def _lost(self, pilot: _Pilot, error: BaseException) -> None:
        reason = reason_of(error)
        if not pilot.is_open and "ModuleNotFoundError" in str(error):
            raise SetupError(
                f"A worker could not be started on a node of the Ray cluster: {reason}",
                hint=f"install muster-gpu {muster_version()} in the Python that runs Ray there.",
            )
        where = f"its Ray actor on {pilot.host}" if pilot.host else "its Ray actor"
        self._give_up(pilot, f"{where} was lost: {reason}", Outcome.LOST)

    def _give_up(self, pilot: _Pilot, reason: str, outcome: Outcome | None) -> None:
        """Report the death of its worker; the actor is not listened to any more."""
        pilot.is_gone = True
        self._kill(pilot)
        del self._pilots[pilot.slot.slot_id]
        if pilot.worker_id is None:
            return
        log = self._folder.worker_log(pilot.slot.slot_id)
        end = log.stat().st_size if log.exists() else 0
        death = WorkerDied(
            pilot.worker_id, None, None, reason, log_start=end, log_end=end, outcome=outcome
        )
        self._forget(pilot.worker_id)
        self._events.append(death)

    def _forget(self, worker_id: int) -> None:
        pilot = self._by_worker.pop(worker_id, None)
        if pilot is not None and pilot.worker_id == worker_id:
            pilot.worker_id = None
            pilot.has_tasks = False


def reason_of(error: BaseException) -> str:
    """The sentence of Ray's report that gives the reason, without its tables of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("The actor is dead", "The actor died"))]
    text = told[-1] if told else (lines[-1] if lines else type(error).__name__)
    return text.split(" Some common causes", 1)[0][:400]


def _start_of(request: ClusterRequest) -> str:
    """What a worker waits for as long as there is no cluster."""
    if request.address is not None:
        return f"joining the Ray cluster at {request.address}"
    return f"Ray is being started on {'this machine' if request.hosts is None else 'the hosts'}"


def _import_ray() -> Any:
    try:
        with kept_environment():
            import ray
    except ImportError as error:
        raise MissingPackageError("--on ray", "ray", "ray") from error
    return ray
