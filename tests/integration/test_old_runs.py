"""Run folders of earlier versions are looked at and resumed as the version that made them would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import MusterCli
from tests.fixtures.old_runs.old_runs import looked_at, resumed, unpack

OLD = Path(__file__).parents[1] / "fixtures" / "old_runs"
RUNS = sorted(OLD.glob("*/*.tar.xz"))


def _name(archive: Path) -> str:
    return f"{archive.parent.name}-{archive.name.removesuffix('.tar.xz')}"


def _kind(archive: Path) -> str:
    return archive.name.removesuffix(".tar.xz")


def _as_far_as(said: Any, now: Any) -> Any:
    """``now`` without the fields of ``--json`` that were not there at the time."""
    if isinstance(said, dict) and isinstance(now, dict):
        return {k: _as_far_as(said[k], v) for k, v in now.items() if k in said}
    if isinstance(said, list) and isinstance(now, list) and len(said) == len(now):
        return [_as_far_as(was, v) for was, v in zip(said, now, strict=True)]
    return now


def _said(archive: Path, what: str) -> Any:
    return json.loads((archive.with_name(f"{_kind(archive)}.json")).read_text())[what]


@pytest.mark.quick
@pytest.mark.parametrize("archive", RUNS, ids=_name)
def test_an_old_run_looks_as_it_did(archive: Path, tmp_path: Path, muster_main: MusterCli) -> None:
    unpack(archive, tmp_path)

    def main(*words: str, folder: Path) -> tuple[int, str]:
        done = muster_main(*words)
        return done.returncode, done.stdout

    said = _said(archive, "looked at")
    assert _as_far_as(said, looked_at(main, _kind(archive), tmp_path)) == said


@pytest.mark.parametrize("archive", RUNS, ids=_name)
def test_an_old_run_is_resumed(
    archive: Path, tmp_path: Path, muster_cli: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its state: what is finished stays, and what was stopped ends as it would have."""
    unpack(archive, tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MUSTER_LEASE_DIR", str(tmp_path / "leases"))

    def main(*words: str, folder: Path) -> tuple[int, str]:
        done = muster_cli(*words)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    said = _said(archive, "resumed")
    found = _as_far_as(said, resumed(main, _kind(archive), tmp_path))
    assert _rounded(found) == _rounded(said)


def test_there_are_old_runs_of_every_kind() -> None:
    kinds = {_kind(archive).partition("-")[0] for archive in RUNS}
    assert kinds == {"agent", "array", "map", "recipe", "run", "sweep", "train"}
    assert sum(path.stat().st_size for path in OLD.rglob("*") if path.is_file()) < 300_000


def _rounded(value: Any) -> Any:
    """Floats to four places: kernels of another machine add in another order."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
