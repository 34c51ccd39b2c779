"""``muster verify``: is the gradient of several ranks the gradient of one?"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

from muster.base.errors import EXIT_OK, EXIT_SOME_FAILED, UsageError
from muster.gang.launch import start_supervisor

_HELP = """Compare the gradients of a task on one rank, on several, and with accumulation.

One batch of the training data goes through the task on one rank as a whole, in micro-batches, and
on all ranks; the largest relative difference is shown with the parameter it is in. The types in
which products are really computed are shown too, and the parameters that the loss does not use.
Nothing is trained. Exit code 1 when gradients differ by more than rounding.

Examples:
  muster verify digits --devices cpu:2
  muster verify my_task.py:MyTask --gpus 2 --precision bf16
"""


def main(argv: list[str]) -> int:
    with ExitStack() as stack:
        supervisor = None
        if argv and not any(word in ("-h", "--help", "--help-all") for word in argv):
            supervisor = stack.enter_context(start_supervisor(forks=True))
        return _verify(argv, supervisor)


def _verify(argv: list[str], supervisor: Any) -> int:
    from muster.api.train import verify_task
    from muster.cli import output
    from muster.cli.gang_screen import gang_audience
    from muster.cli.train_flags import flags_of_train, train_job
    from muster.train.config import TrainConfig

    flags = flags_of_train(argv, "verify", _HELP)
    job, options = train_job(flags)
    shown = flags.shown
    if not isinstance(job.config, TrainConfig):
        raise UsageError(
            f"muster verify compares the gradients of a task; {job.name} learns by acting.",
            hint="every update of its training compares the ranks' parameters anyway.",
        )

    def hear(rank: int, line: str) -> None:
        if rank == 0 and shown.level in ("info", "debug"):
            output.say(line)

    given = gang_audience((), all_ranks=False, level=shown.level)
    audience = dataclasses.replace(given, hear=hear)
    ending, findings = verify_task(job, options, audience, supervisor=supervisor)
    for line in ending.report:
        output.remark(line)
    if ending.exit_code != EXIT_OK:
        return ending.exit_code
    is_good = all(finding["is_good"] is not False for finding in findings)
    if shown.json:
        output.say_json({"is_good": is_good, "findings": findings})
    elif not (shown.quiet and is_good):
        words = {True: "same", False: "DIFFERENT", None: "note"}
        rows = [[words[f["is_good"]], f["what"], f["text"]] for f in findings]
        output.table(["", "what", "result"], rows)
    return EXIT_OK if is_good else EXIT_SOME_FAILED
