"""What NCCL writes down before it gives up lands in the run folder, unless the user said where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from muster.run.folder import RunFolder
from muster.supervisor import elastic
from muster.supervisor.elastic import flight_recorder

FOLDER = RunFolder(Path("/runs/x"))


@pytest.mark.parametrize(
    ("is_old", "size", "file"),
    [
        (False, "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
        (True, "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ],
)
def test_by_the_names_that_this_torch_has(
    is_old: bool, size: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_IS_OLD", is_old)
    assert flight_recorder({}, FOLDER) == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        size: "2000",
        file: "/runs/x/logs/nccl-rank-",
    }


def test_what_the_user_has_set_stays_under_either_name() -> None:
    said = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/here/r"}
    assert flight_recorder(said, FOLDER) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_this_torch_has_the_new_names() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
    assert not elastic._IS_OLD
    assert "TORCH_FR_BUFFER_SIZE" in header.read_text()
