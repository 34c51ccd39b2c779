"""Break what Muster promises, one promise at a time, and see that a test goes red.

    python scripts/break_invariants.py                  # all; a table of what went red
    python scripts/break_invariants.py claims secrets   # these

Each break is a text of the source and what stands there instead; the text must be found exactly
once, in whatever module it is. It is put into a copy of the source, never into the tree itself,
and the named tests run on that copy. Before that they run on the copy as it is, and must be green.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Break(NamedTuple):
    """``tests``: the name of a file, which no other test has, and what ``-k`` selects in it."""

    name: str
    promise: str
    text: str
    instead: str
    tests: str
    only: str = ""


BREAKS = [
    Break(
        "changed-code",
        "work whose code has changed is not gone on with",
        "    files = changed_files(before, now)\n    if not files or (",
        "    files = changed_files(before, now)\n    if True or (",
        "test_changed_script.py",
        "refused",
    ),
    Break(
        "changed-helper",
        "a file that has changed since is named",
        "other = [name for name in before if name in now and now[name] != before[name]]",
        "other: list[str] = []",
        "test_code.py",
        "told_by_name",
    ),
    Break(
        "rows",
        "a map publishes only when its rows are those of the source",
        "if why is None and rows_in == sum(shards):",
        "if why is None or rows_in <= sum(shards):",
        "test_map_balance.py",
    ),
    Break(
        "two-ledgers",
        "of two ledgers that went on apart, none is overwritten",
        "return Choice.HOME if home.contains(away) else Choice.REFUSED",
        "return Choice.HOME",
        "test_ledger_home.py",
        "both_kept or gone_on_with",
    ),
    Break(
        "late-request",
        "a request to cancel is for one session",
        'return folder.requests / f"cancel-{token}"',
        'return folder.requests / "cancel"',
        "test_requests.py",
    ),
    Break(
        "copy",
        "a copy of a run folder is another run",
        'record.get("inodes") != _inodes(folder, folder.identity_json)',
        '"inodes" not in record',
        "test_folder_id.py",
        "copy",
    ),
    Break(
        "late-errors",
        "what a full server refuses late is written again",
        "        self._arrived += len(self._waiting)\n        self._waiting.clear()\n",
        "        self._waiting.clear()\n",
        "test_mailbox.py",
        "refuses_late",
    ),
    Break(
        "checkpoint",
        "a damaged checkpoint is found",
        "if crc32_of(path) != checksum:",
        "if False:",
        "test_checkpoint_files.py",
        "changed_byte",
    ),
    Break(
        "uneven-batch",
        "a gradient is the mean over the samples that its batch has",
        "scale = 1.0 / window.planned",
        "scale = 1.0 / 8",
        "test_trouble_on_ranks.py",
        "changes_no_loss",
    ),
    Break(
        "torn-line",
        "a torn line does not swallow the next",
        '        text = b"\\n" + text if self._is_torn else text\n',
        "",
        "test_journal.py",
    ),
    Break(
        "nohup",
        "an ignored signal stays ignored",
        "if name in always or signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
        "test_signal_policy.py",
        "ignored_signal",
    ),
    Break(
        "busy-rank",
        "a silent rank that computes gets the long limit",
        "    if len(rank.seen_cpu) < 2:",
        "    if True:",
        "test_stall.py",
        "long_limit",
    ),
    Break(
        "float-result",
        "what a function returns is kept",
        "{_VALUE: value} if entries is None else entries, keep, 0)",
        "{} if entries is None else entries, keep, 0)",
        "test_results.py",
        "becomes_fields",
    ),
    Break(
        "device-memory",
        "a command without memory on its device is known by its output",
        r"(CUDA|HIP|XPU|MPS backend) out of memory",
        r"NothingLikeIt",
        "test_failures.py",
        "without_memory",
    ),
    Break(
        "units",
        "answers in other units are not equal",
        "        raise OtherWords\n    for dimension",
        "        return Fraction(1)\n    for dimension",
        "test_reasoning_units.py",
        "rules_decide",
    ),
    Break(
        "formulas",
        "no cell of a table is a formula",
        '    if not text or text[0] not in "=+-@\\t\\r":',
        "    if True:",
        "test_export.py",
        "whatever_is_returned",
    ),
    Break(
        "secrets",
        "secrets are not shown",
        "return re.search(_SECRET, name) is not None and re.search(_HARMLESS, name) is None",
        "return False",
        "test_shown_text.py",
        "doctests",
    ),
    Break(
        "escapes",
        "what users' texts say, a terminal does not obey",
        "    if not _UNSEEN.search(text):\n        return text\n",
        "    return text\n",
        "test_shown_text.py",
        "hostile or nothing_is_left",
    ),
    Break(
        "squeue",
        "who waits for hours asks seldom",
        "_SOON_S, _SELDOM_S = 1.0, 60.0",
        "_SOON_S, _SELDOM_S = 1.0, 1.0",
        "test_slurm_watch.py",
        "for_hours or day_in_the_queue",
    ),
    Break(
        "cards",
        "a card is not taken for another",
        '"GH200 96GB", 96,',
        '"GH200 96GB", 141,',
        "test_cards.py",
    ),
    Break(
        "re-entry",
        "a file that starts a run when it is imported starts none",
        "    if file is not None:\n        raise ReentryError(",
        "    if False:\n        raise ReentryError(",
        "test_reentry.py",
    ),
    Break(
        "claims",
        "a result for an older claim is not recorded",
        "if task is None or task.token != token:",
        "if task is None:",
        "test_decide.py",
        "late_results",
    ),
    Break(
        "ledger-claims",
        "the ledger accepts a task's result once",
        "WHERE task_id BETWEEN ? AND ? AND token = ? AND state = 1",
        "WHERE task_id BETWEEN ? AND ? AND token >= ? - 9 AND state = 1",
        "test_ledger.py",
        "old_token",
    ),
    Break(
        "lease",
        "a lease outlives what clears old files away",
        "told = self._keep_lock()",
        'told = ""',
        "test_leases.py",
        "outlives or said_to_be_lost",
    ),
    Break(
        "other-frame",
        "a worker that does not understand its coordinator says so",
        "            case _:  # of a coordinator",
        '            case "no such frame":  # of a coordinator',
        "test_other_wire.py",
    ),
    Break(
        "agent-buffers",
        "what a policy keeps of its own rank's data is rank 0's in each update",
        "        run.replica.settle()  # what the policy keeps",
        "        # what the policy keeps",
        "test_agent_on_ranks.py",
        "same_bits and remembering",
    ),
    Break(
        "extra-state",
        "what modules keep beside their tensors is rank 0's in each step",
        "        share_extra_states(self._with_extra_state, self.gang)",
        "        pass",
        "test_unusual_models.py",
        "resumed and (centred or remembering)",
    ),
    Break(
        "long-integers",
        "an integer beyond 64 bits keeps its digits in a map's output",
        "        if self.least < -_MAX_INT64 - 1 or self.most > _MAX_INT64:",
        "        if False:",
        "test_sink_formats.py",
        "keep_their_digits",
    ),
    Break(
        "patched-block",
        "in a block that is read as a whole, each task has its own attempt",
        '"AND token = ? AND outcome',
        '"AND ? IS NOT NULL AND outcome',
        "test_plain_blocks.py",
        "not_alike",
    ),
    Break(
        "forwarded-port",
        "a port that goes through SSH is held before it leads anywhere",
        "            if port not in self._places:",
        "            if place and port not in self._places:",
        "test_far_relay.py",
        "leads_to",
    ),
    Break(
        "memory-blame",
        "only the first task of a worker is blamed for memory",
        "        if outcome is Outcome.MEMORY_LIMIT and worker.has_worked:",
        "        if False:",
        "test_decide.py",
        "memory_limit or earlier_tasks",
    ),
]


class Copy:
    """The source and the tests in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def holders(self, text: str) -> list[Path]:
        """The modules in which ``text`` stands, one entry for each time."""
        return [
            path
            for path in sorted((self.folder / "src").rglob("*.py"))
            for _ in range(path.read_text(encoding="utf-8").count(text))
        ]

    def is_green(self, broken: Break) -> bool:
        [tests] = (self.folder / "tests").rglob(broken.tests)
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        words += [str(tests), "-m", "not slow and not gpu", "--timeout", "900"]
        if broken.only:
            words += ["-k", broken.only]
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "src")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        # A break may let a signal of the test end pytest itself.
        is_ended = done.returncode == 2 and "Interrupted: SIG" in done.stdout
        if done.returncode not in (0, 1) and not is_ended:
            raise SystemExit(f"{broken.name}: pytest could not run\n{done.stdout[-2000:]}")
        return done.returncode == 0

    def apply(self, broken: Break) -> bool:
        """Whether the tests stay green with this break; the copy is whole again afterwards."""
        [path] = self.holders(broken.text)
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(broken.text, broken.instead), encoding="utf-8")
        try:
            return self.is_green(broken)
        finally:
            path.write_text(source, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Break promises and see that a test goes red.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true", help="only look for the texts")
    flags = parser.parse_args(argv)
    chosen = [each for each in BREAKS if not flags.names or each.name in flags.names]
    if unknown := set(flags.names) - {each.name for each in BREAKS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    unseen = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        lost = [each.name for each in chosen if len(copy.holders(each.text)) != 1]
        if lost:
            print(f"their texts are not in the source exactly once: {', '.join(lost)}")
            return 2
        if flags.list:
            return 0
        print("| break | what is promised | tests | outcome | s |\n|---|---|---|---|---|")
        for each in chosen:
            began = time.monotonic()
            if not copy.is_green(each):
                outcome = "RED WITHOUT THE BREAK"
            else:
                outcome = "STAYS GREEN" if copy.apply(each) else "goes red"
            unseen += outcome != "goes red"
            name, seconds = f"`{each.tests}` {each.only}".strip(), time.monotonic() - began
            print(
                f"| {each.name} | {each.promise} | {name} | {outcome} | {seconds:.0f} |", flush=True
            )
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
