"""``muster doctor``: does this machine work, and how fast is it really?"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from muster.api.look.plan import MemoryPlan, known_model, known_task, plan_memory
from muster.base.clock import human_duration
from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, UsageError
from muster.base.flags import Flag
from muster.base.settings import read_settings
from muster.cli import output, screens
from muster.cli.flags import JsonFlags
from muster.cli.options import Part
from muster.cli.parse import Parsed, parse_groups
from muster.doctor.findings import SEVERITIES, Finding, exit_code
from muster.doctor.gather import (
    DoctorOptions,
    Examination,
    examine,
    examine_recorded,
    keep_facts,
    write_fixes,
)
from muster.plan.request import PlanRequest

_HELP = """Examine this machine: driver, torch, GPUs, links between them, disk, network, launcher.

Products of matrices, copies and an all-reduce are really run, in child processes with time limits,
and their values are checked. Exit code 0: healthy; 1: warnings, with --strict; 2: broken.

Examples:
  muster doctor
  muster doctor --quick
  muster doctor --fix env; source muster_env.sh
  muster doctor --save-facts host.json
  muster doctor --from-facts host.json --json
  muster doctor --quick --model params=7e9 --strategy fsdp --batch-size 4
"""
_FIX_FILE = Path("muster_env.sh")


@dataclass(frozen=True, kw_only=True)
class _Doctor(JsonFlags):
    """What is made of what was found."""

    strict: bool = False
    """Exit code 1 when there are warnings."""
    fix: Literal["env"] | None = None
    """env: write the variables that repair what was found to a file, to be sourced."""
    fix_file: Annotated[Path | None, Flag(metavar="FILE")] = None
    """The file that --fix writes. Default: muster_env.sh."""
    save_facts: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Write everything that was seen to this file (JSON)."""
    from_facts: Annotated[Path | None, Flag(metavar="FILE")] = None
    """Examine the machine recorded in this file instead of this one."""
    model: str | None = None
    """Show also how much memory of each device the training of this takes, by part (exit code 1
    where it does not fit): params=7e9, hf:config.json, or a task, which is run for some steps."""
    quiet: bool = False
    """Leave out the checks that found nothing wrong."""


_GROUPS = {
    "options": DoctorOptions,
    "doctor": _Doctor,
    "request": Part(
        of=PlanRequest, only=("batch_size", "precision", "strategy", "sequence_length")
    ),
}


def main(argv: list[str]) -> int:
    parsed = parse_groups(_GROUPS, argv, "doctor", _HELP)
    flags: _Doctor = parsed.doctor
    _refuse_contradictions(parsed)
    found = _examine(parsed)
    if flags.save_facts is not None:
        keep_facts(flags.save_facts, found.facts)
    if flags.fix is not None:
        write_fixes(flags.fix_file or _FIX_FILE, found)
    plans = () if flags.model is None else _memory_of(flags.model, parsed)
    _show(flags, found, plans)
    misfits = EXIT_SOME_FAILED if any(plan.fits is False for plan in plans) else EXIT_OK
    return max(exit_code(found.findings, strict=flags.strict), misfits)


def _memory_of(model: str, parsed: Parsed) -> tuple[MemoryPlan, ...]:
    """What ``muster plan --memory`` says of the devices here."""
    request: PlanRequest = parsed.request
    settings = read_settings()
    known = known_model(model, request)
    if known is None:
        request = dataclasses.replace(request, calibrate=True)
        known = known_task(model, [], request, settings, _tell)
    return plan_memory(known, settings)


def _refuse_contradictions(parsed: Parsed) -> None:
    flags: _Doctor = parsed.doctor
    of_here = [f"--{said.option.name}" for said in parsed.said if said.option.group == "options"]
    of_here += ["--save-facts"] * (flags.save_facts is not None)
    if flags.from_facts is not None and of_here:
        raise UsageError(
            f"{' and '.join(of_here)} {'has' if len(of_here) == 1 else 'have'} no effect with "
            "--from-facts, which examines nothing here.",
            hint="leave one of them out.",
        )
    if parsed.options.is_quick and parsed.options.devices is not None:
        raise UsageError(
            "--devices has no effect with --quick, which measures nothing.",
            hint="leave one of them out.",
        )
    of_model = [s.option.name for s in parsed.said if s.option.group == "request"]
    if of_model and flags.model is None:
        raise UsageError(
            f"--{of_model[0]} has no effect without --model.",
            hint="add --model params=7e9, hf:config.json or a task.",
        )
    if flags.model is not None and flags.from_facts is not None:
        raise UsageError(
            "--model is about the devices here, and --from-facts about those of another machine.",
            hint='use muster plan --memory --devices "H100 SXM x8" for others.',
        )
    if flags.fix_file is not None and flags.fix is None:
        raise UsageError("--fix-file has no effect without --fix env.", hint="add --fix env.")


def _examine(parsed: Parsed) -> Examination:
    flags: _Doctor = parsed.doctor
    if flags.from_facts is not None:
        return examine_recorded(flags.from_facts)
    is_silent = flags.quiet or flags.json
    return examine(parsed.options, (lambda _: None) if is_silent else _tell)


def _tell(what: str) -> None:
    output.remark(f"… {what}")


def _text_width() -> int | None:
    """Of the terminal; None where the output goes elsewhere, whose lines stay whole."""
    return shutil.get_terminal_size().columns if output.is_terminal() else None


def _show(flags: _Doctor, found: Examination, plans: Sequence[MemoryPlan]) -> None:
    if flags.json:
        output.say_json(
            {
                "exit_code": exit_code(found.findings, strict=flags.strict),
                "findings": [dataclasses.asdict(finding) for finding in found.findings],
                "facts": dataclasses.asdict(found.facts),
                "memory": [plan.record() for plan in plans],
            }
        )
        return
    shown = [one for one in found.findings if not (flags.quiet and one.severity == "ok")]
    for line in finding_lines(shown, _text_width()):
        output.say(line)
    if not flags.quiet:
        output.say(summary(found.findings, found.facts.seconds))
    for plan in plans:
        screens.show_memory(plan)
    if flags.fix is not None:
        output.remark(f"source {flags.fix_file or _FIX_FILE}   # sets what can be set")


_WORDS = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
_LABEL_WIDTH = 9


def finding_lines(findings: Sequence[Finding], width: int | None) -> list[str]:
    """The worst last, where a terminal shows it; ``width`` None: nothing is broken into lines.

    >>> finding_lines([Finding(severity="note", what="A.", fix="B", check="c")], None)
    ['note     c: A.', '         fix: B']
    """
    lines = []
    for severity in SEVERITIES:
        for finding in findings:
            if finding.severity == severity:
                lines += _lines_of(finding, width)
    return lines


def _lines_of(finding: Finding, width: int | None) -> list[str]:
    label = _WORDS[finding.severity].ljust(_LABEL_WIDTH)
    lines = _wrapped(f"{label}{finding.check}: {_one_line(finding.what)}", width)
    for name, text in (("why", finding.why), ("fix", finding.fix)):
        if text:
            lines += _wrapped(f"{' ' * _LABEL_WIDTH}{name}: {_one_line(text)}", width)
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    indent = " " * (_LABEL_WIDTH + 2)
    # Paths and addresses stay whole, so that they can be copied.
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def summary(findings: Iterable[Finding], seconds: float) -> str:
    """``2 errors, 1 warning, 3 notes, 20 in order; 12.3 s``."""
    counts = dict.fromkeys(SEVERITIES, 0)
    for finding in findings:
        counts[finding.severity] += 1
    parts = [
        f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}"
        for name in ("error", "warning", "note")
        if counts[name]
    ]
    parts.append(f"{counts['ok']} in order")
    verdict = "broken" if counts["error"] else "healthy"
    return f"{verdict}: {', '.join(parts)}; {human_duration(seconds)}"
