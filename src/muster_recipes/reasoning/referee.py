"""Comparing two answers as mathematics, in a process that may be killed.

``math-verify`` limits its time by signals, which work in the main thread only, and an answer such
as ``9^{9^{9^9}}`` fills the memory. So it runs in a process of its own, with limits of its own.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from muster import MissingPackageError

_TIMEOUT_S = 10.0
_PROGRAM = Path(__file__).with_name("referee_process.py")
#: How the process ends by its own time limit; Windows has no such signal, and no such limit.
_OUT_OF_TIME = -getattr(signal, "SIGPROF", 0) or None
#: Longer ones are no final answers, and take the parser minutes.
_LONGEST = 2000


class Referee:
    """Starts its process at the first question. Threads may ask at the same time.

    A question that takes more than ``timeout_s`` of processor time has no answer (None): that does
    not depend on what else the machine is doing, as a limit on the time that passes would.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    @staticmethod
    def check_installed() -> None:
        """SetupError unless the library is there."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackageError("Comparing answers", "math-verify", "reasoning")

    def compare(self, answer: str, reference: str) -> bool | None:
        """Whether both are the same; None if one cannot be read or it takes too long."""
        if max(len(answer), len(reference)) > _LONGEST:
            return None
        with self._lock:
            for _ in range(2):  # someone else may have killed the process: then ask once more
                try:
                    return self._ask(answer, reference)
                except (BrokenPipeError, EOFError):
                    if self._end() == _OUT_OF_TIME:
                        break
            return None

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, answer: str, reference: str) -> bool | None:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([self._timeout_s, answer, reference]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise EOFError
        verdict: bool | None = json.loads(line)
        return verdict

    def _start(self) -> subprocess.Popen[str]:
        self.check_installed()
        # -P: the recipe's folder would come first on the path, and has modules named like others.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self._process

    def _end(self) -> int:
        """End the process, if there is one; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


_shared = Referee()
_num_users = 0


def borrow() -> Referee:
    """The referee that all stages of this process share; call ``give_back`` when done with it."""
    global _num_users
    Referee.check_installed()
    _num_users += 1
    return _shared


def give_back() -> None:
    """Release the shared referee; the last call ends its process."""
    global _num_users
    _num_users -= 1
    if _num_users == 0:
        _shared.close()
