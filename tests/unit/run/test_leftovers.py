"""What a kill has left beside the files of a run goes with its next start."""

from __future__ import annotations

import os
import time
from pathlib import Path

from muster.api.gangs.work import GangWork, Script
from muster.api.start.options import GangOptions
from muster.run.folder import RunFolder
from muster.run.session import open_run


def test_the_next_start_takes_away_what_a_kill_has_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    renew = GangWork(folder=folder, program=Script(path="p.py")).renewal(GangOptions(), ())
    with open_run(folder, renew):
        pass
    folder.checkpoints.mkdir()
    places = folder.run_json, folder.published_json, folder.checkpoints / "latest.json"
    left = [path.with_name(f".{path.name}.0123abcd.tmp") for path in places]
    in_work = folder.path / ".status.json.89ef0123.tmp"
    for path in (*left, in_work):
        path.touch()
    for path in left:
        os.utime(path, (time.time() - 7200,) * 2)
    with open_run(folder):  # such as a command that only collects: the run does not go on
        assert all(path.exists() for path in left)
    with open_run(folder, renew):
        assert not any(path.exists() for path in left) and in_work.exists()
    assert {path.name for path in folder.path.iterdir() if path.is_file()} == {
        "run.json", "run.lock", in_work.name,
    }  # fmt: skip
