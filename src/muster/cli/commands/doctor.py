"""``muster doctor``: does this machine work, and how fast is it really?"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.api.doctor import (
    DoctorOptions,
    Examination,
    examine,
    examine_recorded,
    keep_facts,
    write_fixes,
)
from muster.api.options import parse_duration
from muster.base.errors import UsageError
from muster.cli import output
from muster.cli.doctor_wording import finding_lines, summary
from muster.cli.flags import Switch
from muster.cli.parse import parse
from muster.doctor.findings import exit_code

_HELP = """Examine this machine: driver, torch, GPUs, links between them, disk, network, launcher.

Products of matrices, copies and an all-reduce are really run, in child processes with time limits,
and their values are checked. Exit code 0: healthy; 1: warnings, with --strict; 2: broken.

Examples:
  muster doctor
  muster doctor --quick
  muster doctor --fix env; source muster_env.sh
  muster doctor --save-facts host.json
  muster doctor --from-facts host.json --json
"""
_D = DoctorOptions()
_FIX_FILE = Path("muster_env.sh")


@dataclass(frozen=True)
class _Doctor:
    devices: str | None = None
    """What is measured: auto (all free GPUs, else two CPU ranks), 4 (GPUs), 0,2,3, cpu, cpu:4."""
    quick: Switch = False
    """Measure nothing and start no torch: about a second."""
    run_dir: Path | None = None
    """Where runs will be written: its disk is examined. Default: runs."""
    time_limit: str | None = None
    """For everything together: 55, 2m. What is not reached is said to be skipped."""
    strict: Switch = False
    """Exit code 1 when there are warnings."""
    fix: Literal["env"] | None = None
    """env: write the variables that repair what was found to a file, to be sourced."""
    fix_file: Path | None = None
    """That file. Default: muster_env.sh."""
    save_facts: Path | None = None
    """Write everything that was seen to this file (JSON)."""
    from_facts: Path | None = None
    """Examine the machine recorded in this file instead of this one."""
    quiet: Switch = False
    """Show only what is not in order."""
    json: Switch = False
    """Findings and facts as JSON."""


def main(argv: list[str]) -> int:
    flags = parse(_Doctor, argv, "doctor", _HELP)
    _refuse_contradictions(flags)
    found = _examine(flags)
    if flags.save_facts is not None:
        keep_facts(flags.save_facts, found.facts)
    if flags.fix is not None:
        write_fixes(flags.fix_file or _FIX_FILE, found)
    _show(flags, found)
    return exit_code(found.findings, strict=flags.strict)


def _refuse_contradictions(flags: _Doctor) -> None:
    if flags.from_facts is not None:
        useless = [
            name
            for name, is_given in (
                ("--devices", flags.devices is not None),
                ("--quick", flags.quick),
                ("--run-dir", flags.run_dir is not None),
                ("--time-limit", flags.time_limit is not None),
                ("--save-facts", flags.save_facts is not None),
            )
            if is_given
        ]
        if useless:
            raise UsageError(
                f"{' and '.join(useless)} with --from-facts: nothing is examined here then.",
                hint="leave one of them out.",
            )
    if flags.quick and flags.devices is not None:
        raise UsageError(
            "--devices with --quick: nothing is measured then.", hint="leave one of them out."
        )
    if flags.fix_file is not None and flags.fix is None:
        raise UsageError("--fix-file without --fix env writes nothing.", hint="add --fix env.")


def _examine(flags: _Doctor) -> Examination:
    if flags.from_facts is not None:
        return examine_recorded(flags.from_facts)
    options = DoctorOptions(
        devices=flags.devices,
        run_dir=flags.run_dir or _D.run_dir,
        is_quick=flags.quick,
        time_limit_s=_D.time_limit_s
        if flags.time_limit is None
        else parse_duration(flags.time_limit, "--time-limit"),
    )
    is_silent = flags.quiet or flags.json
    return examine(options, (lambda _: None) if is_silent else _tell)


def _tell(what: str) -> None:
    output.remark(f"… {what}")


def _text_width() -> int | None:
    """Of the terminal; None where the output goes elsewhere, whose lines stay whole."""
    return shutil.get_terminal_size().columns if output.is_terminal() else None


def _show(flags: _Doctor, found: Examination) -> None:
    if flags.json:
        output.say_json(
            {
                "exit_code": exit_code(found.findings, strict=flags.strict),
                "findings": [dataclasses.asdict(finding) for finding in found.findings],
                "facts": dataclasses.asdict(found.facts),
            }
        )
        return
    shown = [one for one in found.findings if not (flags.quiet and one.severity == "ok")]
    for line in finding_lines(shown, _text_width()):
        output.say(line)
    if not flags.quiet:
        output.say(summary(found.findings, found.facts.seconds))
    if flags.fix is not None:
        output.remark(f"source {flags.fix_file or _FIX_FILE}   # sets what can be set")
