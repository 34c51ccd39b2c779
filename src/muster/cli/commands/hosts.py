"""``muster hosts check``: whether machines reached by SSH can run a sweep together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from muster.base.errors import EXIT_OK, EXIT_SETUP, UsageError
from muster.base.flags import Flag
from muster.base.shown_text import clean_text
from muster.cli import output
from muster.cli.flags import JsonFlags
from muster.cli.parse import parse
from muster.hosts.check import (
    Finding,
    clock_skew_s,
    close_all,
    connect_all,
    here,
    how_to_link,
    judge,
    measure,
    try_links,
)
from muster.hosts.connection import Connection, Way
from muster.hosts.names import Host, parse_hosts


@dataclass(frozen=True, kw_only=True)
class _Flags(JsonFlags):
    """Which hosts."""

    what: Annotated[str, Flag(is_positional=True, metavar="check")] = ""
    """What to do with the hosts: check."""
    hosts: Annotated[str, Flag(is_positional=True, metavar="HOSTS")] = ""
    """a,b:0-3 or @FILE, as for --hosts: names that ssh knows, also from ~/.ssh/config."""
    hosts_python: Annotated[str | None, Flag(metavar="PATH")] = None
    """The Python of the hosts that has Muster, if its path differs from the one here."""
    setup: Annotated[tuple[str, ...], Flag(metavar="LINE")] = ()
    """A line of bash that each host runs before Python is looked for. May be given several
    times."""


_HELP = """Check machines that are reached by SSH: Python, Muster, Ray, torch, GPUs and driver,
clock, disk, latency, bandwidth, and whether they reach each other; with what repairs each.
Nothing is changed.

Exit codes: 0 all can be used (there may be warnings), 3 one of them cannot, 2 wrong usage.

Examples:
  muster hosts check a,b:0-3
  muster hosts check @boxes.txt --json
"""


def main(argv: list[str]) -> int:
    flags = parse(_Flags, argv, "hosts", _HELP)
    if flags.what != "check" or not flags.hosts:
        raise UsageError(
            "muster hosts needs the word check and the names of hosts.",
            hint="write muster hosts check a,b",
        )
    hosts = parse_hosts(flags.hosts)
    found = _look(hosts, Way(flags.hosts_python, flags.setup))
    is_fit = not any(one.state == "failure" for findings in found.values() for one in findings)
    if flags.json:
        rows: list[dict[str, Any]] = [
            {"host": name, "findings": [dataclasses.asdict(one) for one in findings]}
            for name, findings in found.items()
        ]
        output.say_json({"hosts": rows, "is_fit": is_fit})
    else:
        _show(found, is_fit=is_fit)
    return EXIT_OK if is_fit else EXIT_SETUP


def _look(hosts: tuple[Host, ...], way: Way) -> dict[str, list[Finding]]:
    """What was found of each host, the worst news of all first where it is not reached."""
    results = connect_all([(host, way) for host in hosts])
    connections = [one for one in results if isinstance(one, Connection)]
    found: dict[str, list[Finding]] = {}
    try:
        for host, one in zip(hosts, results, strict=True):
            if isinstance(one, Connection):
                facts = {**one.facts, "skew_s": clock_skew_s(one)}
                found[host.name] = [*judge(host, facts, here()), *measure(one)]
            else:
                text, _, fix = str(one).partition("\nHint: ")
                found[host.name] = [Finding("ssh", "failure", text, fix)]
        broken = try_links(connections).broken if connections else []
    finally:
        close_all(connections)
    for one in connections:
        name = one.host.name
        mine = [link for link in broken if link[0] == name or link[:2] == ("here", name)]
        for link in mine:
            text = f"{link[0]} does not reach {link[1]}: {clean_text(link[2])}"
            fix = f"sweeps and maps go through SSH; for a training {how_to_link(link)}"
            found[name].append(Finding("ports", "warning", text, fix))
        if not mine:
            found[name].append(Finding("ports", "ok", "reached, and reaches the others"))
    return found


def _show(found: dict[str, list[Finding]], *, is_fit: bool) -> None:
    marks = {"ok": "ok", "warning": "warning", "failure": "FAILURE"}
    for name, findings in found.items():
        output.table([name, "", ""], [[one.what, marks[one.state], one.found] for one in findings])
        for one in findings:
            if one.fix:
                output.say(f"  {one.what}: {one.fix}")
        output.say()
    output.say("All of them can be used." if is_fit else "Not all of them can be used.")
