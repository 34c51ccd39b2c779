"""``--from-wandb sweep.yaml``: a sweep file of Weights & Biases as the words of ``muster sweep``.

The words take the place of the flag before anything else looks at the command line. So the record
of a run holds what was meant, and the file is no longer needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.base.errors import MissingPackageError, UsageError
from muster.base.flags import kind_of_word
from muster.cli.values import split_command
from muster.search.distributions import Choice, word_of
from muster.search.spec import Stopping
from muster.search.wandb_sweep import Imported, checked_name, import_sweep

_FLAG = "--from-wandb"
_MACRO = re.compile(r"\$\{(\w+)(?::\w+)?\}")
_STANDARD = ("${env}", "${interpreter}", "${program}", "${args}")


def without_sweep_file(argv: Sequence[str], *, has_target: bool) -> tuple[list[str], list[str]]:
    """``argv`` with the words that the sweep file means, and a sentence for each thing that differs
    from W&B. What ``argv`` says itself takes precedence over the file.

    ``has_target``: whether it names a function or a recipe. Raises UsageError for a file that
    cannot be read or that holds what cannot be taken over.
    """
    words, program = split_command(argv)
    at = next((n for n, word in enumerate(words) if word.partition("=")[0] == _FLAG), None)
    if at is None:
        return list(argv), []
    _, sign, name = words[at].partition("=")
    if not sign and at + 1 == len(words):
        raise UsageError(f"{_FLAG} needs a file.", hint=f"{_FLAG} sweep.yaml")
    rest = [*words[:at], *words[at + (1 if sign else 2) :]]
    sweep = _read(Path(name if sign else words[at + 1]))
    typed = _parameters(rest)
    found = import_sweep(sweep)
    fixed = {key: value for key, value in found.fixed.items() if key not in typed}
    axes = [axis for axis in found.spec.space.axes if axis.name not in typed]
    names = dict.fromkeys((*found.fixed, *found.spec.space.names, *typed))
    found = dataclasses.replace(found, fixed=fixed)
    remarks = list(found.remarks)
    command: list[str] = []
    if not (has_target or program):
        command = [*_command(found, names, sweep.get("command"), remarks)]
    said = {word.partition("=")[0] for word in rest}
    if typed and sweep["method"] == "grid" and "run_cap" not in sweep:
        said.add("--trials")  # as many as there are settings now
    space = [f"{axis.name}={axis.to_text()}" for axis in axes]
    if not command:  # a command has its fixed values in its words
        space += [
            f"{checked_name(key)}={Choice((value,)).to_text()}" for key, value in fixed.items()
        ]
    own = [*(word for text in space for word in ("--space", text)), *_flags(found, said)]
    behind = program or command
    return [*rest, *own, *(["--", *behind] if behind else [])], remarks


def _parameters(words: Sequence[str]) -> list[str]:
    """The parameters that ``--space`` names on the command line."""
    found, is_space = [], False
    for word in words:
        text = word
        if kind_of_word(word) == "flag":
            flag, _, text = word.partition("=")
            is_space = flag == "--space"
        if is_space and "=" in text:
            found.append(text.partition("=")[0].strip())
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingPackageError("Reading a sweep file", "pyyaml", "") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"Cannot read the sweep file {path}: {reason}.") from None
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{path} is not a sweep file: it has no keys such as method, metric and parameters."
        )
    return found


def _flags(found: Imported, said: Collection[str]) -> Iterator[str]:
    """Goal, sampler, budget and rule, as far as the command line does not say them itself."""
    spec = found.spec
    if not {"--maximize", "--minimize"} & set(said):
        for goal in spec.objectives:
            yield from (f"--{goal.direction}", goal.name)
    if "--sampler" not in said:
        yield from ("--sampler", spec.sampler)
    if spec.budget.trials is not None and "--trials" not in said:
        yield from ("--trials", str(spec.budget.trials))
    if spec.stopping != Stopping() and "--stop" not in said:
        rule = spec.stopping
        last = "" if rule.max_step is None else f",max={rule.max_step:g}"
        yield from ("--stop", f"{rule.rule}:min={rule.min_step:g}{last},eta={rule.eta}")


def _command(
    found: Imported, names: Iterable[str], command: Any, remarks: list[str]
) -> Iterator[str]:
    """The words of the command that the file describes, with a place for each parameter."""
    words = list(_STANDARD) if command is None else command
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError("command of the sweep file is not a list of words.",
                         hint='command: ["${env}", "python", "${program}", "${args}"]')  # fmt: skip
    if found.program is None and any("${program}" in word for word in words):
        raise UsageError(
            "The sweep file names no program, and the command line no target.",
            hint="program: train.py in the file, or -- python train.py --lr {lr} behind the flags.",
        )
    values = {name: f"{{{name}}}" for name in names}
    values |= {name: word_of(value) for name, value in found.fixed.items()}
    handed: list[Any] = [*found.fixed.values()]
    for axis in found.spec.space.axes:
        handed += axis.distribution.values if isinstance(axis.distribution, Choice) else ()
    if any(isinstance(value, bool | None) for value in handed):
        remarks.append(
            "Booleans are handed over as true and false, and null as null; W&B writes True, False "
            "and None."
        )
    for word in words:
        if word == "${args}":
            yield from (f"--{name}={value}" for name, value in values.items())
        elif word == "${args_no_hyphens}":
            yield from (f"{name}={value}" for name, value in values.items())
        elif word != "${env}":
            yield _MACRO.sub(lambda found_: _one(found_, found.program), word)


def _one(macro: re.Match[str], program: str | None) -> str:
    if macro[1] in ("interpreter", "program"):
        return "python" if macro[1] == "interpreter" else str(program)
    raise UsageError(
        f"command of the sweep file has {macro[0]}, which cannot be taken over.",
        hint='write the command behind --, and read the parameters from "$MUSTER_PARAMS" (JSON).',
    )
