"""Ask for other devices of a run that is at work, or for the next start of one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

from muster.api.runs import Run
from muster.api.start.lending import Lending
from muster.api.start.options import SweepOptions
from muster.api.start.placing import as_wanted, device_request, slots_of, would_take
from muster.api.sweeps.plans import stored_options
from muster.base.errors import UsageError
from muster.base.journal import read_journal
from muster.base.settings import read_settings
from muster.base.shown_text import shell_word
from muster.devices.placement import Placement
from muster.run.folder import RunFolder
from muster.run.requests import Ask, ask
from muster.run.session import is_held, open_run
from muster.run.state import is_between_starts


def change_devices(run: Run, what: Mapping[str, Any], *, now: bool = False) -> dict[str, Any]:
    """Ask a run for other devices: ``{"release": 2}``, ``{"add": 2}`` or ``{"only": "0,3"}``.

    ``now``: its tasks there need not end, only reach their next checkpoint. Returns which it
    "has", "gives_back" and "takes", and "is_at_work"; where nobody works on it, it will begin so.
    Raises UsageError for what cannot be, and for a run of ranks, and SetupError where it does not
    answer.
    """
    stored, folder = run.stored, run.folder
    asked = {"devices": dict(what), "now": now}
    answers: list[Mapping[str, Any]] = []
    options = stored.options
    on_nodes = options.get("num_nodes", 1) > 1 or options.get("hosts") is not None
    if stored.is_program or (stored.is_gang and on_nodes):
        raise UsageError(
            f"{run.path} is {stored.kind_name}"
            + (", whose ranks" if stored.is_program else " on several nodes, whose ranks")
            + " work in lock-step: their number stays while they run.",
            hint=f"end it (muster cancel {shell_word(run.path)}), and start it on others.",
        )

    def is_at_work() -> bool:
        return is_held(folder) or (stored.is_gang and is_between_starts(folder))

    if is_at_work():
        answer = ask(folder, asked, is_at_work)
        answers += [] if answer is None else [answer]
    if not answers and stored.is_gang:
        raise UsageError(
            f"{run.path} is {stored.kind_name}, and nobody works on it.",
            hint="go on with it on other devices: "
            f"muster resume {shell_word(run.path)} --devices N",
        )
    if not answers:
        answers.append({"is_at_work": False, **_write_down(run, asked)})
    [found] = answers
    if "refused" in found:
        raise UsageError(str(found["refused"]), hint=str(found["hint"]) or None)
    return {"is_at_work": True, **found}


def _write_down(run: Run, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Change what the next start of a run begins with."""
    answers: list[Mapping[str, Any]] = []
    settings, options = read_settings(), stored_options(run)
    with open_run(run.folder):
        placement = would_take(as_wanted(run.folder, options), settings)
        _refuse_other_host(run.folder, options, placement)
        lending = Lending(run.folder, options, settings, slots_of(placement, options))
        with closing(lending):
            lending.hear(Ask(asked, answers.append))
    return answers[0]


def _refuse_other_host(folder: RunFolder, options: SweepOptions, placement: Placement) -> None:
    """UsageError where a run with GPUs would be given CPU workers, because here is no GPU."""
    starts = [line for line in read_journal(folder.events) if line.get("event") == "start"]
    labels: list[Any] = (starts[-1].get("workers") if starts else None) or [""]
    had_gpus = str(labels[0]).startswith("cuda")
    is_auto = device_request(options).kind == "auto"
    if had_gpus and is_auto and placement.slots[0].kind == "cpu":
        raise UsageError(
            f"{folder.path} had GPUs when it last ran, and this machine shows none.",
            hint="ask on the machine where it will go on, or choose its devices there: "
            f"muster resume {shell_word(folder.path)} --devices N",
        )
