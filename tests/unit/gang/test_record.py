"""What rank 0 writes down is JSON, whatever the numbers are."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from muster.rank.record import Record, StepLine, read_metrics
from muster.run.folder import RunFolder

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    lines=st.lists(
        st.builds(
            StepLine, step=st.integers(0, 2**40), epoch=st.integers(0, 999),
            samples=st.integers(0, 2**50), loss=FINITE, lr=FINITE, seconds=FINITE,
            grad_norm=st.none() | st.floats(),
        ),
        max_size=5,
    )
)  # fmt: skip
def test_every_line_comes_back(tmp_path_factory: object, lines: list[StepLine]) -> None:
    folder = RunFolder(Path(tmp_path_factory.mktemp("run")))  # type: ignore[attr-defined]
    record = Record(folder, 0, with_tensorboard=False)
    for line in lines:
        record.step(line)
    record.close()
    found = read_metrics(folder.metrics)
    assert json.dumps(found) == json.dumps([line.record() for line in lines])
