"""What an output path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.errors import UnknownNameError, UsageError
from muster.pipeline.sinks.formats import SinkSpec, spec_of

GOOD: list[tuple[str, str | None, str, bool]] = [
    ("out.jsonl", None, "jsonl", False),
    ("a/out.ndjson", None, "jsonl", False),
    ("OUT.PARQUET", "parquet", "parquet", False),
    ("out.csv", "csv", "csv", False),
    ("out", None, "jsonl", True),
    ("out/", "parquet", "parquet", True),
    ("v1.2/", "csv", "csv", True),
]


@pytest.mark.parametrize(("text", "asked", "format", "is_folder"), GOOD)
def test_suffix_and_slash_decide(
    text: str, asked: str | None, format: str, is_folder: bool
) -> None:
    spec = spec_of(text, asked)
    assert (spec.path, spec.format, spec.is_folder) == (Path(text), format, is_folder)
    assert isinstance(spec, SinkSpec)


BAD = [
    ("", None, "empty path"),
    ("./", None, "no name of its own"),
    ("..", None, "no name of its own"),
    ("out.xlsx", None, "'.xlsx' is not a format of an output"),
    ("out.csv", "parquet", "--output out.parquet"),
]


@pytest.mark.parametrize(("text", "asked", "message"), BAD)
def test_what_does_not_fit_is_said(text: str, asked: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        spec_of(text, asked)
    assert "\nHint: " in str(caught.value)


def test_an_unknown_format_proposes_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'parquet'"):
        spec_of("out/", "parket")


def test_files_and_folders_that_exist_are_not_confused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "b").write_text("")
    with pytest.raises(UsageError, match="there is a folder of that name"):
        spec_of(str(tmp_path / "a.jsonl"))
    with pytest.raises(UsageError, match="there is a file of that name"):
        spec_of(str(tmp_path / "b"))
    with pytest.raises(UsageError, match="there is a file of that name"):
        spec_of(f"{tmp_path}/b/")
