"""``muster devices``: the GPUs a program started here would see, and who uses them."""

from __future__ import annotations

from muster.base.settings import read_settings
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse
from muster.devices.discovery import discover
from muster.devices.placement import busy_reason

_HELP = """List the GPUs of this machine that a program sees, and who uses them.

Examples:
  muster devices
  muster devices --json
"""


def main(argv: list[str]) -> int:
    flags = parse(JsonFlags, argv, "devices", _HELP)
    settings = read_settings()
    inventory = discover(settings)
    if flags.json:
        gpus = [
            {
                "name": device.name,
                "uuid": device.uuid,
                "memory_total_mib": device.memory_total_mib,
                "memory_used_mib": device.memory_used_mib,
                "lost": device.lost,
            }
            for device in inventory.devices
        ]
        output.say_json(
            {"gpus": gpus, "cpu_cores": settings.cpu_count, "problem": inventory.problem}
        )
        return 0
    rows = []
    for number, device in enumerate(inventory.devices):
        state = device.lost or busy_reason(device) or "free"
        memory = f"{device.memory_used_mib}/{device.memory_total_mib} MiB"
        rows.append([f"cuda:{number}", device.name, memory, state, device.uuid])
    if rows:
        output.table(["device", "name", "memory", "state", "UUID"], rows)
    else:
        output.say(f"No GPU: {inventory.problem or 'none is visible'}")
    output.say(f"{settings.cpu_count} CPU cores")
    return 0
