"""An executor: ``--on counted``. It is the local one, and counts the tasks that it sends."""

from collections.abc import Sequence

from muster.executors import Assignment, Event, SlotSpec, Task, make_executor


class Counted:
    def __init__(self, assignment: Assignment) -> None:
        self._inner = make_executor("local", assignment)
        self._count = assignment.folder.path / "sent.txt"

    def start(self, worker_id: int, slot: SlotSpec) -> str:
        return self._inner.start(worker_id, slot)

    def send(self, worker_id: int, tasks: Sequence[Task], *, together: bool) -> None:
        with self._count.open("a") as file:
            file.write("task\n" * len(tasks))
        self._inner.send(worker_id, tasks, together=together)

    def share(self, worker_id: int, task_id: int, others: int) -> None:
        self._inner.share(worker_id, task_id, others)

    def stop_task(self, worker_id: int, task_id: int, *, pauses: bool) -> None:
        self._inner.stop_task(worker_id, task_id, pauses=pauses)

    def revoke(self, worker_id: int) -> None:
        self._inner.revoke(worker_id)

    def confirm(self, worker_id: int, serial: int) -> None:
        self._inner.confirm(worker_id, serial)

    def end(self, worker_id: int, *, kill: bool) -> None:
        self._inner.end(worker_id, kill=kill)

    def poll(self, timeout_s: float) -> list[Event]:
        return self._inner.poll(timeout_s)

    def close(self) -> None:
        self._inner.close()
