"""``muster devices``: the GPUs a program started here would see, and who uses them; those of a run,
and what a run is to give back and to take. ``muster queue``: who waits for them, in which order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from muster.base.clock import human_duration
from muster.base.errors import UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse
from muster.devices.discovery import discover
from muster.devices.leases import holders
from muster.devices.placement import busy_reason
from muster.devices.queue_rules import read_rules
from muster.devices.tickets import own_uid, user_name, who_floods
from muster.devices.waiting import Line, look, reason
from muster.run.session import stopped_process
from muster.run.state import last_start

if TYPE_CHECKING:
    from muster.api.runs import Run


@dataclass(frozen=True, kw_only=True)
class _Flags(JsonFlags):
    """Which run, and what it is to give back or to take."""

    run: Annotated[str, Flag(is_positional=True, metavar="[RUN]")] = ""
    """A run's folder, or its name below ./runs: show the devices that it has."""
    release: Annotated[int | None, Flag(metavar="N", chooses="what changes")] = None
    """Give back this many GPUs or CPU workers, each after its current task; a training saves and
    goes on with the others."""
    add: Annotated[int | None, Flag(metavar="N", chooses="what changes")] = None
    """Take this many more GPUs or CPU workers, which must be free."""
    only: Annotated[str | None, Flag(metavar="0,3|cpu:N", chooses="what changes")] = None
    """Go on with exactly these."""
    now: bool = False
    """Do not wait until a task on a device that is given back ends, only until its next
    checkpoint; it goes on elsewhere. A program is told by SIGTERM."""


_HELP = """List the GPUs of this machine that a program sees, and who uses them, or change the
devices of a sweep, a search, a map or a training while it goes on.

Examples:
  muster devices
  muster devices runs/train-1a2b3c --release 2
  muster devices runs/train-1a2b3c --only 0,3 --now
"""


def main(argv: list[str]) -> int:
    flags = parse(_Flags, argv, "devices", _HELP)
    asked = {"release": flags.release, "add": flags.add, "only": flags.only}
    what = {name: value for name, value in asked.items() if value is not None}
    if flags.now and not what:
        raise UsageError("--now has no effect alone.", hint="add --release N or --only LIST.")
    if flags.run:
        from muster.api.look.listing import find_run

        run = find_run(flags.run)
        return _change(run, what, flags) if what else _show_run(run, as_json=flags.json)
    if what:
        raise UsageError(
            f"--{next(iter(what))} changes the devices of a run, and no run is named.",
            hint=f"muster devices RUN --{next(iter(what))} {next(iter(what.values()))}",
        )
    settings = read_settings()
    inventory = discover(settings)
    leased = holders(settings)
    if flags.json:
        gpus = [
            {
                "name": device.name,
                "uuid": device.uuid,
                "memory_total_mib": device.memory_total_mib,
                "memory_used_mib": device.memory_used_mib,
                "lost": device.lost,
                "leased": str(held) if (held := leased.get(device.uuid)) else None,
            }
            for device in inventory.devices
        ]
        output.say_json(
            {"gpus": gpus, "cpu_cores": settings.cpu_count, "problem": inventory.problem}
        )
        return 0
    rows = []
    for number, device in enumerate(inventory.devices):
        state = device.lost or str(leased.get(device.uuid) or busy_reason(device) or "free")
        memory = f"{device.memory_used_mib}/{device.memory_total_mib} MiB"
        rows.append([f"cuda:{number}", device.name, memory, state, device.uuid])
    if rows:
        output.table(["device", "name", "memory", "state", "UUID"], rows)
    else:
        output.say(f"No GPU: {inventory.problem or 'none is visible'}")
    output.say(f"{settings.cpu_count} CPU cores")
    return 0


def _change(run: Run, what: dict[str, Any], flags: _Flags) -> int:
    from muster.api.sweeps.adding import change_devices

    answer = change_devices(run, what, now=flags.now)
    if flags.json:
        output.say_json({"run": run.folder.name, **answer})
        return 0
    name = run.folder.name
    gone, later = answer["gives_back"], ""
    each = "each " if len(gone) > 1 else ""
    when = f"{each}after {'its next checkpoint' if flags.now else 'the task in hand'}"
    if not answer["is_at_work"]:
        when = later = "when it goes on"
    elif run.stored.is_gang:
        when = later = "once its ranks have saved"
    if gone:
        output.say(f"{name}: gives back {', '.join(gone)}, {when}")
    if taken := answer["takes"]:
        output.say(f"{name}: takes {', '.join(taken)}{', ' if later else ''}{later}")
    if not (gone or taken):
        output.say(f"{name}: nothing changes")
    output.say(f"  it has {', '.join(answer['has'])} then, also when it is resumed")
    return 0


def _show_run(run: Run, *, as_json: bool) -> int:
    from muster.api.start.placing import read_wanted

    status, wanted = run.status(), read_wanted(run.folder)
    lines = status.live["workers"] if status.live else _ranks(run, is_running=status.is_running)
    labels = None if wanted is None else list(wanted.labels)
    records: list[dict[str, Any]] = [
        {
            "device": line["slot"],
            "state": line["state"],
            "task": line["task"],
            "is_wanted": labels is None or line["slot"].partition("/")[0] in labels,
        }
        for line in lines
    ]
    if as_json:
        output.say_json({"run": run.folder.name, "devices": records, "wanted": labels})
        return 0
    rows = [
        [r["device"], r["state"], r["task"], "yes" if r["is_wanted"] else "no"] for r in records
    ]
    if rows:
        output.table(["device", "state", "task", "stays"], rows)
    else:
        output.say(f"{run.folder.name}: {status.state}; it holds no device")
    if status.is_running and (pid := stopped_process(run.folder)):
        output.say(f"  its process is stopped (Ctrl-Z); to let it go on: kill -CONT {pid}")
    if labels is not None:
        output.say(f"  asked for since it was begun: {', '.join(labels)}")
    return 0


def _ranks(run: Run, *, is_running: bool) -> list[dict[str, str]]:
    """The devices of ranks, as the last start has written them down."""
    if not (is_running and run.stored.is_gang):
        return []
    labels = last_start(run.folder).begin.get("ranks") or []
    return [
        {"slot": str(label), "state": "running", "task": f"rank {rank}"}
        for rank, label in enumerate(labels)
    ]


_WAIT = """Show the queue for the GPUs of this machine: the runs of all users that wait (--wait), in
their order, why each waits and when it is expected to begin; and who has GPUs now.

Examples:
  muster queue
  muster queue --json
"""


def queue(argv: list[str]) -> int:
    flags = parse(JsonFlags, argv, "queue", _WAIT)
    # Those of the whole machine: others wait for GPUs that this user may have hidden.
    settings = dataclasses.replace(read_settings(), cuda_visible_devices=None)
    inventory, rules = discover(settings), read_rules(settings)
    line = look(inventory, settings, rules)
    numbers = {device.uuid: number for number, device in enumerate(inventory.devices)}
    waiting, held = _waiting(line), _held(line, numbers)
    warning = _warning(settings.lease_folder) or _floods(settings.lease_folder)
    if flags.json:
        used = {user_name(uid): round(s / 3600.0, 6) for uid, s in line.world.used.items()}
        output.say_json(
            {"waiting": waiting, "held": held, "used_gpu_hours": used, "warning": warning}
        )
        return 0
    if held:
        output.table(
            ["GPU", "user", "run", "for"],
            [[r["gpu"], r["user"], r["run"], human_duration(r["held_s"])] for r in held],
        )
    if waiting:
        output.table(
            ["place", "user", "run", "wants", "waits for", "because", "start"],
            [
                [str(r["position"]), r["user"], r["run"], r["asks"],
                 human_duration(r["waited_s"]), r["reason"], r["expected"]]
                for r in waiting
            ],
        )  # fmt: skip
    else:
        output.say("Nobody waits.")
    free = len(line.world.free)
    are = "is" if 1 in (free, len(numbers)) else "are"
    output.say(f"{free} of {count(len(numbers), 'GPU')} {are} free")
    if warning:
        output.complain(warning)
    return 0


def _waiting(line: Line) -> list[dict[str, Any]]:
    found = []
    for one in line.standings:
        note, ticket = line.notes[one.ticket.name], one.ticket
        starts_s = one.starts_in_s
        found.append(
            {
                "position": one.position,
                "user": user_name(ticket.uid),
                "uid": ticket.uid,
                "pid": note.pid,
                "run": note.run,
                "asks": ticket.asks,
                "least": ticket.least,
                "most": ticket.most,
                "gpus": list(ticket.devices),
                "priority": ticket.priority,
                "waited_s": round(line.world.now_s - ticket.since_s, 1),
                "why": one.why,
                "reason": reason(line, one),
                "expected": one.expected,
                "starts_in_s": None if starts_s is None else round(starts_s, 1),
            }
        )
    return found


def _held(line: Line, numbers: dict[str, int]) -> list[dict[str, Any]]:
    found = []
    for one in line.world.holdings:
        note = line.holders[one.device]
        number = numbers.get(one.device)
        found.append(
            {
                "gpu": "?" if number is None else f"cuda:{number}",
                "uuid": one.device if number is not None else None,
                "user": user_name(one.uid),
                "uid": one.uid,
                "pid": note.pid,
                "run": note.run,
                "held_s": round(line.world.now_s - one.since_s, 1),
            }
        )
    return sorted(found, key=lambda row: row["gpu"])


def _warning(folder: Any) -> str:
    """Who made the folder can remove what is in it, the locks too."""
    try:
        owner = folder.stat().st_uid
    except OSError:
        return ""
    if owner in (0, own_uid()):
        return ""
    return (
        f"{folder} belongs to {user_name(owner)}, who can remove what others have in it. On a "
        f"machine that several people share it should be root's: chown root {folder}"
    )


def _floods(folder: Any) -> str:
    """Whoever has put very many files there makes every look slower."""
    many = who_floods(folder)
    if not many:
        return ""
    named = ", ".join(f"{user_name(uid)} has {number:,} files" for uid, number in many.items())
    return (
        f"in {folder} {named}, which everybody who looks has to list; most of them are read by "
        "nobody. Its user can remove them (a run that waits needs one), and so can root"
    )
