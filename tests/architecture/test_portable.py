"""Every module imports where Linux's modules and calls are missing.

Not a run on Windows or macOS: it catches imports and names that exist on Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="both platforms begin with one process"),
]

SOURCE = Path(__file__).parents[2] / "src"

#: What is imported from elsewhere keeps the platform it was built for, and is imported once: each
#: platform is pretended in a fork of this process.
SCRIPT = """
import importlib, json, os, pkgutil, signal, sys

for name in ("selectors", "socket", "subprocess", "asyncio", "multiprocessing", "tempfile",
             "shutil", "orjson", "filelock", "tyro", "rich.console", "rich.live", "pyarrow",
             "pyarrow.csv", "pyarrow.parquet", "pyarrow.compute", "pyarrow.ipc", "numpy",
             "matplotlib", "gymnasium.vector", "gymnasium.wrappers",
             "transformers.cache_utils", "torch", "logging", "ctypes",
             "concurrent.futures", "faulthandler", "importlib.metadata", "platform", "uuid",
             "torch.distributed.elastic.agent.server.api", "torch.distributed.checkpoint"):
    importlib.import_module(name)

def imports_on(platform, missing):
    sys.platform = platform
    for name in missing:
        sys.modules[name] = None
    if sys.platform == "win32":
        for name in ("SIGKILL", "SIGHUP", "SIGUSR1"):
            delattr(signal, name)
        for name in ("killpg", "getpgrp", "fork", "WNOHANG", "pidfd_open", "sched_getaffinity",
                     "posix_spawn", "posix_spawnp", "getppid", "waitid"):
            if hasattr(os, name):
                delattr(os, name)
    import muster, muster_recipes
    for package in (muster, muster_recipes):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__") and not module.name.endswith("_triton"):
                importlib.import_module(module.name)
    from muster.cli.main import main
    sys.exit(main(["--help"]))

codes = {}
for platform, missing in json.loads(sys.argv[1]).items():
    if not (pid := os.fork()):
        imports_on(platform, missing)
    codes[platform] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""
MISSING = {
    "win32": ["resource", "fcntl", "pwd", "grp", "termios"],
    "darwin": ["_winapi", "winreg"],
}


def test_every_module_imports_on_every_platform() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(MISSING)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == dict.fromkeys(MISSING, 0), done.stderr[-2000:]
