"""``run.json``: the kind of a run, also in folders made before it was written down, and damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.errors import PlanMismatchError, SetupError
from muster.run.folder import RunFolder
from muster.run.record import KIND_NAMES, KINDS, RunRecord, read_run, write_run

RECORD: dict[str, Any] = {
    "run_id": "1",
    "name": "a",
    "created_s": 1.5,
    "targets": [],
    "spec": {},
    "fixed": {},
    "code": {},
    "options": {},
    "argv": ["muster", "sweep"],
    "cwd": "/",
    "environment": {},
    "format": 1,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(folder: Path, record: Any) -> RunRecord:
    (folder / "run.json").write_text(json.dumps(record))
    return read_run(RunFolder(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_is_written_and_read_again(tmp_path: Path, kind: Any) -> None:
    write_run(RunFolder(tmp_path), read(tmp_path, {**RECORD, "kind": kind}))
    assert read_run(RunFolder(tmp_path)).kind == kind


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"target": "a.py:f", "space": {}}, "sweep"),
        ({"recipe": "ssm", "config": {}}, "sweep"),
        ({"input": {}, "stages": [], "output": "x"}, "map"),
        ({"program": {"path": "a.py"}}, "run"),
        ({"program": {"target": "muster.train.entry:run_rank"}, "train": {}}, "train"),
        ({"program": {"target": "muster.rl.entry:run_rank"}, "train": {}}, "agent"),
    ],
)
def test_the_kind_of_an_old_folder_is_inferred(tmp_path: Path, spec: Any, kind: str) -> None:
    assert read(tmp_path, {**RECORD, "spec": spec}).kind == kind


@given(name=st.sampled_from([*RECORD, "kind"]), value=JSON)
def test_any_json_is_read_or_is_said_to_be_damaged(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for record in (value, {**RECORD, name: value}, {k: RECORD[k] for k in RECORD if k != name}):
        try:
            assert read(folder, record).kind in KINDS
        except SetupError as error:
            assert str(folder) in str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_of_one_kind_and_says_of_which(tmp_path: Path, kind: Any) -> None:
    stored = read(tmp_path, {**RECORD, "kind": kind})
    for asked in KINDS:
        if asked == kind:
            stored.check_kind(asked, RunFolder(tmp_path))
            continue
        with pytest.raises(PlanMismatchError) as caught:
            stored.check_kind(asked, RunFolder(tmp_path))
        said = f"{tmp_path} is the folder of {KIND_NAMES[kind]}, not of {KIND_NAMES[asked]}: it is"
        assert str(caught.value).startswith(said)
