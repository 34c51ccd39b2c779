"""``muster queue``: who waits for the GPUs of this machine, in which order, and who has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from muster.base.clock import human_duration
from muster.base.settings import read_settings
from muster.base.shown_text import count
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse
from muster.devices.discovery import discover
from muster.devices.queue_rules import read_rules
from muster.devices.tickets import own_uid, user_name
from muster.devices.waiting import Line, look, reason

_HELP = """Show the queue for the GPUs of this machine: the runs of all users that wait (--wait), in
their order, why each waits and when it is expected to begin; and who has GPUs now.

Examples:
  muster queue
  muster queue --json
"""


def main(argv: list[str]) -> int:
    flags = parse(JsonFlags, argv, "queue", _HELP)
    # Those of the whole machine: others wait for GPUs that this user may have hidden.
    settings = dataclasses.replace(read_settings(), cuda_visible_devices=None)
    inventory, rules = discover(settings), read_rules(settings)
    line = look(inventory, settings, rules)
    numbers = {device.uuid: number for number, device in enumerate(inventory.devices)}
    waiting, held = _waiting(line), _held(line, numbers)
    warning = _warning(settings.lease_folder)
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
    are = "is" if free == 1 else "are"
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
        f"machine that several people share it is root's: chown root {folder}"
    )
