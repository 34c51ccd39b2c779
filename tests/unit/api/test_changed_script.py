"""``muster run`` in a folder whose program has changed since: refused, and the file is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from muster.api.gangs.program import code_of_script
from muster.api.gangs.work import GangWork, Script
from muster.api.start.options import GangOptions
from muster.run.folder import RunFolder
from muster.run.session import open_run

Main = Callable[..., CompletedProcess[str]]


def ran(script: Script) -> RunFolder:
    """A folder in which the program has been run: its ranks have printed something."""
    folder = RunFolder(Path("r"))
    work = GangWork(folder=folder, program=script, code=code_of_script(script))
    with open_run(folder, work.renewal(GangOptions(), ()), node=0):
        folder.rank_log(0).write_text("hello\n")
    return folder


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(path="p.py", args=("--lr", "1")), ("p.py", "--lr", "1")),
        (Script(path="pack.prog", is_module=True), ("-m", "pack.prog")),
        (Script(path="./p.sh", is_python=False), ("--no-python", "./p.sh")),
    ],
)
def test_changed_code_is_refused_until_it_is_allowed(
    script: Script,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    muster_main: Main,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("k = 1\n")
    (tmp_path / "p.sh").write_text("#!/bin/sh\necho 1\n")
    if not script.is_python:
        refused = muster_main("run", "--dry-run", *words)
        assert refused.returncode == 2 and "chmod +x ./p.sh" in refused.stderr
    (tmp_path / "p.sh").chmod(0o755)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/prog.py").write_text("import helper\n")
    changed = tmp_path / ("helper.py" if script.is_python else "p.sh")
    folder = ran(script)
    flags = ("run", "--devices", "cpu:1", "--run-dir", "r", "--dry-run")
    assert muster_main(*flags, *words).returncode == 0
    before = folder.run_json.read_bytes()
    changed.write_text(changed.read_text() + "# edited\n")
    refused = muster_main(*flags, *words)
    assert refused.returncode == 2
    assert changed.name in refused.stderr and "--allow-changed-code" in refused.stderr
    assert folder.run_json.read_bytes() == before
    for allowed in ("--allow-changed-code", "--restart"):
        assert muster_main(*flags, allowed, *words).returncode == 0
    folder.rank_log(0).unlink()  # nothing was done by the old code
    assert muster_main(*flags, *words).returncode == 0
