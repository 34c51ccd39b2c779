"""Types of Parquet through a real run: two workers, chunks that are shared, a folder of parts."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.conftest import MusterCli
from tests.unit.pipeline.test_types_kept import check_same, every_type


@pytest.mark.thorough
def test_an_identity_gives_the_file_that_it_was_given(
    tmp_path: Path, muster_cli: MusterCli
) -> None:
    (tmp_path / "stage.py").write_text("def same(record):\n    return record\n")
    pq.write_table(every_type(240), tmp_path / "in.parquet", row_group_size=90)
    words = ["map", "stage.py:same", "--input", "in.parquet", "--no-ids", "--devices", "cpu:2",
             "--chunk-rows", "60", "--quiet"]  # fmt: skip
    expected = pq.read_table(tmp_path / "in.parquet")
    done = muster_cli(*words, "--output", "out.parquet", timeout_s=200)
    assert done.returncode == 0, done.stderr
    check_same(pq.read_table(tmp_path / "out.parquet"), expected)
    done = muster_cli(*words, "--output", "parts/", "--format", "parquet", timeout_s=200)
    assert done.returncode == 0, done.stderr
    parts = sorted((tmp_path / "parts").glob("part-*.parquet"))
    assert len(parts) > 1
    check_same(pa.concat_tables(map(pq.read_table, parts)), expected)
