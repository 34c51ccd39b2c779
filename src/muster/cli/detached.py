"""``--detach``: the command goes on in a session of its own, and the shell has its prompt back.

Two processes: ``start`` is what was typed, and ``main`` below does the work. The first returns when
the second has begun, or hands on what it said and its exit code where it ends before that.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from stat import S_ISSOCK
from typing import IO, Any, NamedTuple

from muster.base.errors import EXIT_OK, SetupError, UsageError
from muster.base.flags import own_words, wants_help
from muster.base.settings import child_environment, read_settings
from muster.base.shown_text import shell_word
from muster.base.signals import Interrupted
from muster.cli import output
from muster.devices import waiting
from muster.run import session
from muster.run.folder import EXPERIMENT_FILE, RunFolder

#: A log that has grown to this becomes command.log.1, which takes the place of the one before.
MOST_LOG_BYTES = 8 << 20
_LOOK_EVERY_S = 0.5
_ASK_SYSTEMD_S = 5.0
_GRACE_S = 30.0


def asked(words: Sequence[str]) -> list[str]:
    """The words of a command that are Muster's and not its program's, where they say ``--detach``;
    else none."""
    ours = own_words(words)
    if "--detach" not in ours or wants_help(ours):
        return []
    from muster.cli.main import PROGRAM_FOLLOWS, read_command

    if words[0] in PROGRAM_FOLLOWS:
        ours = [f"--{one.name}" for one in read_command(["muster", *words]).said]
    return ours if "--detach" in ours else []


# --------------------------------------------------------------------- what was typed


def start(words: Sequence[str], ours: Sequence[str]) -> int:
    """Have another process do what ``words`` say, and return once it has begun, or waits for GPUs.
    ``ours``: those that are no program's."""
    if sys.platform == "win32":
        raise SetupError("--detach needs a system with sessions, such as Linux or macOS.")
    if read_settings().is_task:
        raise UsageError(
            "--detach has no effect in a task of another run, which ends with it.",
            hint="leave it out.",
        )
    prefix, survives = place()
    mine, its = socket.socketpair()
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained, mine:
        with its:
            # -P: nothing is imported from the folder in which this was typed.
            process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", "muster.cli.detached", *words],
                stdin=its.fileno(), stdout=said, stderr=complained, start_new_session=True,
                env=child_environment({}),
            )  # fmt: skip
        try:
            begun = _until_begun(mine, process)
        except BaseException as error:
            if isinstance(error, Interrupted) and error.number == signal.SIGHUP:
                process.returncode = EXIT_OK  # a logout, which it outlives
                raise
            process.terminate()
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
            raise
        if begun is None:
            _hand_on(said, output.say)
            _hand_on(complained, output.remark)
            if (code := process.wait()) < 0:
                raise SetupError(f"It was ended by signal {-code} before it had begun.")
            return code
    process.returncode = EXIT_OK  # it is nobody's to wait for
    _tell(ours, process.pid, _from_here(begun), survives)
    return EXIT_OK


def _until_begun(channel: socket.socket, process: subprocess.Popen[bytes]) -> Any:
    """What it says when it has begun, or waits; None where it has ended before that."""
    heard = b""
    while not heard.endswith(b"\n"):
        has_ended = process.poll() is not None
        ready, _, _ = select.select([channel], [], [], 0 if has_ended else 0.2)
        data = channel.recv(1 << 16) if ready else b""
        if not data and has_ended:
            return None
        if ready and not data:
            process.wait()
        heard += data
    return json.loads(heard)


def _from_here(begun: dict[str, Any]) -> dict[str, Any]:
    """With its paths as they are found from here: an experiment's file, or the record of a run that
    is resumed, may say that they begin in another folder."""
    base = Path(begun.pop("cwd", ""))
    if base.samefile(Path()):
        return begun
    paths = {key: str(base / begun[key]) for key in ("path", "log") if begun.get(key)}
    return {**begun, **paths}


def _hand_on(file: IO[bytes], say: Callable[[str], None]) -> None:
    file.seek(0)
    text = file.read().decode("utf-8", "replace")
    if text:
        say(text.removesuffix("\n"))


def _tell(ours: Sequence[str], pid: int, begun: Any, survives: str) -> None:
    if "--json" in ours:
        output.say_json({**begun, "pid": pid, "detached": True, "survives": survives})
        return
    if "--quiet" in ours:
        return
    if "waits" in begun:
        output.say(f"{begun['waits']}. Waiting in the background as process {pid}. {survives}")
        output.say(f"  look:  muster queue\n  stop:  muster cancel {shell_word(begun['path'])}")
        if begun["log"]:
            output.say(f"  until it begins it prints into {begun['log']}")
        return
    path = begun["path"]
    quoted = shell_word(path)
    output.say(f"{path}: running in the background as process {pid}. {survives}")
    has_phases = (Path(path) / EXPERIMENT_FILE).is_file()
    screen = f"muster attach {quoted}    or: muster logs {quoted} -f"
    output.say(f"  look:  {f'muster status {quoted}' if has_phases else screen}")
    output.say(f"  wait:  muster wait {quoted}")
    output.say(
        f"  stop:  muster cancel {quoted}    or, to go on later: kill {pid}, then the same command"
    )
    if begun["log"]:
        output.say(f"  what it prints: {begun['log']}")


# --------------------------------------------------------------------- where it lives


class Place(NamedTuple):
    """``prefix``: the words in front of the command; ``survives``: what it outlives, a sentence."""

    prefix: tuple[str, ...]
    survives: str


def place() -> Place:
    """A scope of the user's own systemd where that goes on after a logout, else a plain session."""
    job = read_settings().slurm_job_id
    if job is not None:
        return Place((), f"It ends with SLURM job {job}, in which it was started.")
    if shutil.which("loginctl") is None:
        return Place((), "It goes on after a logout, not after a restart of the machine.")
    if _systemd("loginctl", "show-user", str(os.getuid()), "--property=Linger") == "Linger=yes":
        # Delegate: the scope's control group is ours to divide, which --memory makes use of.
        scope = ("systemd-run", "--user", "--scope", "--quiet", "--collect",
                 "--property=Delegate=yes")  # fmt: skip
        if _systemd(*scope, "true") is not None:
            after = "It goes on after a logout, in a scope of systemd, as lingering is on."
            return Place((*scope, "--"), after)
    if _systemd("loginctl", "show-user", "--property=KillUserProcesses") == "KillUserProcesses=yes":
        return Place(
            (),
            "A LOGOUT ENDS IT: this machine ends what its users leave behind "
            "(KillUserProcesses=yes). Once `loginctl enable-linger` was run, --detach outlives it.",
        )
    return Place((), "It goes on after a logout, not after a restart of the machine.")


def _systemd(*command: str) -> str | None:
    """What a program of systemd answers; None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=_ASK_SYSTEMD_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


# --------------------------------------------------------------------- what does the work


def main(words: Sequence[str]) -> int:
    """Do what ``words`` say, with nothing of the terminal left."""
    from muster.cli.main import main as command

    channel = os.dup(0)  # standard input alone is sure to pass through systemd-run
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    session.on_begin.append(partial(_begin, channel))
    waiting.on_wait.append(partial(_queue, channel))
    return command(words, may_detach=False)


def _queue(channel: int, how: str, wait: waiting.Wait) -> None:
    """Print into a file of the user's own until there is a run folder, and tell that it waits."""
    log = read_settings().state_folder / "muster" / f"waiting-{os.getpid()}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # of a killed process that had this number
        _print_into(log)
        session.on_begin[:] = [partial(_begin, os.dup(channel), before=log)]
    except OSError:  # as it is, nobody reads it before it begins
        log = Path()
        session.on_begin[:] = [partial(_begin, os.dup(channel))]
    about = {
        "waits": how, "path": str(wait.folder or ""), "log": str(log) if log.name else "",
        "cwd": str(Path.cwd()),
    }  # fmt: skip
    with suppress(OSError):
        os.write(channel, (json.dumps(about) + "\n").encode())
    os.close(channel)


def _begin(channel: int, folder: RunFolder, *, before: Path | None = None) -> None:
    """Print into the run's folder from here on, and tell that it has begun. ``before``: the log of
    the time in the queue."""
    session.on_begin.clear()
    waiting.on_wait.clear()
    from muster.api.experiments.experiment import ExperimentFolder

    whole = RunFolder(folder.whole)
    log = whole.command_log
    around = ExperimentFolder(whole.path.parent)
    if around.exists() and around.is_held():  # this is a phase, and others follow
        whole, log = RunFolder(around.path), around.path / log.name
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        _print_into(log)
        threading.Thread(
            target=_keep_small, args=(log.absolute(),), daemon=True, name="muster-log"
        ).start()
        where = str(log)
        if before is not None:
            before.unlink(missing_ok=True)
    except OSError:  # the disk is full, which the run itself meets as well: it goes on unheard
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        where = ""
    known = {"run": whole.name, "path": str(whole.path), "log": where, "cwd": str(Path.cwd())}
    with suppress(OSError):  # whoever started it is gone
        os.write(channel, (json.dumps(known) + "\n").encode())
    os.close(channel)


def _print_into(log: Path) -> None:
    """What was said so far goes ahead."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        copied = -1  # in the queue both are one file
        for number in (1, 2):
            about = os.fstat(number)
            if about.st_ino != copied:
                os.write(descriptor, os.pread(number, about.st_size, 0))
            copied = about.st_ino
            os.dup2(descriptor, number)
    finally:
        os.close(descriptor)


def _keep_small(log: Path) -> None:
    """Move what was printed aside, while others have the file open for appending: what comes
    between the copy and the cut is lost."""
    while True:
        time.sleep(_LOOK_EVERY_S)
        with suppress(OSError):
            cut(log, MOST_LOG_BYTES)


def cut(log: Path, most: int) -> None:
    """By its name: a task in this process may have turned our output to a file of its own."""
    if log.stat().st_size > most:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


if __name__ == "__main__":
    if not S_ISSOCK(os.fstat(0).st_mode):
        raise SetupError("This is started by `muster … --detach`.")
    sys.exit(main(sys.argv[1:]))
