"""What every rank runs first: ``python -m muster.gang.rank FOLDER PARENT KIND PROGRAM ARGS…``.

KIND is ``script``, ``module``, ``command`` or ``entry`` (whose only argument is a JSON object).
Standard output and error already go to the rank's log. The program then finds what it would find
under ``python PROGRAM ARGS…``: its own ``sys.argv``, ``sys.path`` and ``__main__``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from muster.base.forked import flush_and_exit, run_and_leave
from muster.base.reaper import die_with_parent
from muster.gang.account import give_account
from muster.gang.beacon import HeartbeatSender
from muster.gang.topology import Topology, read_topology
from muster.run.folder import RunFolder

#: Seconds that a rank may take to leave, with what its own threads have still to write or to send.
_LEAVING_S = 30.0
#: Kept, because the interpreter empties a module that nothing refers to.
_REPLACED_MAIN: list[ModuleType] = []


def stack_signal() -> int | None:
    """The signal that makes a rank write its stacks: a real-time one, which hardly anybody uses."""
    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 11


def main(argv: list[str]) -> int:
    folder, parent, kind, program, *args = argv
    die_with_parent(int(parent))
    return run(RunFolder(Path(folder)), kind, program, args)


def become_and_leave(argv: list[str]) -> NoReturn:
    """Be a rank, in a process that was forked for it and already ends with its parent."""
    folder, _, kind, program, *args = argv
    run_and_leave(lambda: run(RunFolder(Path(folder)), kind, program, args))


def run(folder: RunFolder, kind: str, program: str, args: list[str]) -> int:
    """Become the rank: run the program to its end; returns the exit code."""
    if kind == "command":
        os.execvp(program, [program, *args])
    topology = read_topology()
    assert topology is not None, "a rank is started with its variables set"
    _watch_over(folder, topology)
    try:
        if kind == "entry":
            _run_entry(program, json.loads(args[0]))
        elif kind == "module":
            _run_module(program, args)
        else:
            _run_script(program, args)
    except SystemExit as end:
        if end.code:
            _leave_soon(end.code if isinstance(end.code, int) else 1, kind, topology)
        raise
    except BaseException as error:
        give_account(error, folder, topology.rank)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _leave_soon(code, kind, topology)
        return code
    return 0


def _leave_soon(code: int, kind: str, topology: Topology) -> None:
    """Have a training that has failed end also where a thread of the task goes on: the other ranks
    wait for this one, and cannot see that it has ended.
    """
    if kind != "entry" or topology.world_size == 1:
        return
    timer = threading.Timer(_LEAVING_S, _cut, [code])
    timer.daemon = True
    timer.start()


def _cut(code: int) -> None:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    with contextlib.suppress(OSError):  # past sys.stderr, which the program may hold
        said = f"muster: this rank has failed and not ended for {_LEAVING_S:.0f} s; it is ended"
        os.write(2, f"{said} (threads: {', '.join(names)})\n".encode(errors="replace"))
    flush_and_exit(code)


def _watch_over(folder: RunFolder, topology: Topology) -> None:
    # A segmentation fault leaves the Python stacks in the log, from where they are reported.
    faulthandler.enable()
    number = stack_signal()
    if number is not None:
        # Held open for the life of the process: a handler can only write to what is open.
        stack = folder.rank_stack(topology.rank).open("w")
        faulthandler.register(number, file=stack, all_threads=True)
        _REPLACED_MAIN.append(stack)  # type: ignore[arg-type]
    HeartbeatSender(topology).start()


def _run_entry(target: str, params: dict[str, Any]) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module, _, name = target.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function(**params)


def _run_script(path: str, args: list[str]) -> None:
    sys.argv[:] = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    if Path(path).is_dir() or _is_zip(path):
        runpy.run_path(path, run_name="__main__")
        return
    code = compile(Path(path).read_bytes(), path, "exec")
    _run_code(code, path, SourceFileLoader("__main__", path), None)


def _run_module(name: str, args: list[str]) -> None:
    """As ``python -m``: a package is run through its ``__main__``."""
    sys.argv[:] = ["-m", *args]
    sys.path.insert(0, str(Path.cwd()))
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    sys.argv[0] = spec.origin or name
    _run_code(code, spec.origin or name, spec.loader, spec)


def _run_code(code: CodeType, path: str, loader: Any, spec: Any) -> None:
    """Run as ``__main__``, so that pickle and multiprocessing's spawn find it by that name."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __loader__=loader,
        __spec__=spec,
        __package__=spec.parent if spec is not None else None,
        __cached__=None,
        __builtins__=__builtins__,
        __annotations__={},
    )
    _REPLACED_MAIN.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _is_zip(path: str) -> bool:
    return not path.endswith((".py", ".pyw")) and zipfile.is_zipfile(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
