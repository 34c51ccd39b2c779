"""What `muster sweep` says to those who typed it in another form, or get no numbers from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from muster.api.sweeps.workload import Workload
from muster.base.errors import MusterError, UsageError
from muster.base.flags import wants_help
from muster.base.modules import names_at_top, read_source
from muster.base.shown_text import shell_word
from muster.base.target import parse_target
from muster.cli.parse import UnknownFlag
from muster.cli.values import as_program, is_script, values_of
from muster.farm.look import static_signature

if TYPE_CHECKING:
    from muster.api.runs import Run


def refuse_program(target: str, words: Sequence[str], takes: Callable[[str], int | None]) -> None:
    """A program is no target: say how it is swept, with the user's own parameters.

    ``words`` as they are typed, with the target; ``takes`` as in `as_program`.
    """
    if target.endswith((".toml", ".yaml", ".yml")):
        raise UsageError(
            f"The target {target!r} names no function.",
            hint=f"an experiment file is started by muster start {shell_word(target)}; the sweep "
            f"file of W&B is read by --from-wandb {shell_word(target)}.",
        )
    if ":" in target or wants_help(words):
        return
    line = as_program(target, words, takes)
    if line is None:
        return
    functions: list[str] = []
    if is_script(target) and target.endswith(".py"):
        with suppress(SyntaxError, ValueError):
            functions = [f"{target}:{name}" for name in names_at_top(read_source(Path(target)))]
    listed = f"\n      or one of its functions: {', '.join(functions[:5])}." if functions else ""
    raise UsageError(
        f"The target {target!r} names no function; a program is given after `--`.",
        hint=f"write {line}{listed}",
    )


def refuse_parameter(target: str, words: Sequence[str], error: UnknownFlag) -> None:
    """A parameter of the function is no flag: say how it gets its values."""
    name, signature = error.name.replace("-", "_"), None
    with suppress(MusterError):
        signature = static_signature(parse_target(target))
    if signature is None or name not in signature.names:
        return
    values = ",".join(values_of(error.name, words)) or "VALUE,VALUE"
    raise UsageError(
        f"{name} is a parameter of {target} and no flag of muster sweep.",
        hint=f"write --grid {shell_word(f'{name}={values}')}; each value is a task.",
    ) from None


def no_numbers(workload: Workload, run: Run) -> str:
    (*_, spec) = workload.targets
    if spec.metrics_from:
        return (
            f"No number was read from the tasks: nothing fits --metrics-from {spec.metrics_from}\n"
            f"What they printed: muster logs {shell_word(run.path)} 1. What is done is not read "
            "again: correct the flag, and start with --restart as well."
        )
    if spec.kind == "command":
        return (
            "No task handed over a number. Where the program prints them, --metrics-from reads "
            "them,\nfor example --metrics-from 'stdout:loss[ =:]+(?P<loss>[-+.\\deE]+)'. It can "
            'also write {"loss": 0.1} to the file\n"$MUSTER_TASK_DIR/result.json", or call '
            "muster.log(3, loss=0.1) in Python. What is done is not read again: add --restart."
        )
    return 'No task returned a value: return a number, or several as {"loss": 0.1}.'
