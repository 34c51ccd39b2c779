"""Text files that are not comma-separated UTF-8: said by a flag, or refused with the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pipeline.chunks_here import run_chunks

from muster.base.errors import UsageError
from muster.pipeline.sources.files import recode
from muster.pipeline.sources.source import BadRow, Selection
from muster.pipeline.sources.table import InputOptions, changes, open_input, reopen
from muster.pipeline.sources.text import has_long_number


def rows(path: Path, folder: Path, **options: Any) -> list[Any]:
    source = open_input(path, Selection(), InputOptions(**options), folder)
    again = reopen(json.loads(json.dumps(source.describe())))
    return [row for shard in source.shards(2) for _, row in again.read(shard, 0, shard.count)]


@pytest.mark.parametrize(
    ("name", "delimiter", "flag"),
    [("a.csv", ";", ";"), ("a.csv", "\t", "tab"), ("a.csv", "|", "|"), ("a.tsv", ",", ",")],
)
def test_another_delimiter_is_refused_with_its_flag_and_read_with_it(
    tmp_path: Path, name: str, delimiter: str, flag: str
) -> None:
    lines = [["id", "text"], ["1", "a,b;c"], ["2", "d"], ["3", 'e"f']]
    text = "".join(delimiter.join(f'"{c.replace(chr(34), chr(34) * 2)}"' for c in line) + "\n"
                   for line in lines[1:])  # fmt: skip
    path = tmp_path / name
    path.write_text(delimiter.join(lines[0]) + "\n" + text)
    with pytest.raises(UsageError, match="has one column") as refused:
        rows(path, tmp_path / "input")
    assert f"--delimiter '{flag}'" in str(refused.value)
    found = rows(path, tmp_path / "input", delimiter=flag)
    assert found == [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_a_single_column_is_no_mistake_where_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a;b\n1\n")
    assert rows(path, tmp_path / "input", delimiter=",") == [{"a;b": "1"}]
    path.write_text("text\n1;2\n")
    assert rows(path, tmp_path / "input") == [{"text": "1;2"}]


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n"])
def test_what_cannot_separate_is_refused(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="cannot separate columns"):
        rows(path, tmp_path / "input", delimiter=delimiter)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "shift_jis"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_encoding_that_is_named_is_read(tmp_path: Path, encoding: str, kind: str) -> None:
    word = "ラン" if encoding == "shift_jis" else "café"
    text = {"csv": f"n,t\r\n1,{word}\r\n2,x\r\n", "jsonl": f'{{"n":"1","t":"{word}"}}\n'}[kind]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(text.encode(encoding))
    found = rows(path, tmp_path / "input", encoding=encoding)
    assert found[0] == {"n": "1", "t": word}


def test_a_byte_that_is_no_utf_8_is_named_with_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfn,t\n1,caf\xe9\n2,x\n")
    first, second = rows(path, tmp_path / "input")
    assert isinstance(first, BadRow)
    assert first.where == "a.csv, line 2"
    assert first.reason.startswith("not UTF-8: byte 6 of the line is 0xe9")
    assert "--encoding" in first.reason
    assert second == {"n": "2", "t": "x"}


def test_a_byte_that_the_named_encoding_lacks_is_refused_with_byte_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,t\n1,a\n2,\x81\n")
    with pytest.raises(UsageError, match=r"a.csv is not cp1252: byte 11 is 0x81, in line 3"):
        rows(path, tmp_path / "input", encoding="cp1252")
    with pytest.raises(UsageError, match="There is no encoding 'klingon'"):
        rows(path, tmp_path / "input", encoding="klingon")
    assert not list((tmp_path / "input").glob("a-*"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), st.booleans())
def test_a_copy_in_utf_8_holds_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, is_wide: bool
) -> None:
    place = tmp_path_factory.mktemp("text")
    path = place / "a.csv"
    encoding = "utf-16" if is_wide else "utf-32"
    path.write_bytes(text.encode(encoding))
    copy = recode(path, "a.csv", place / "input", encoding)
    assert copy.read_bytes().decode() == text.removeprefix("\ufeff")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("a.jsonl", {"delimiter": ";"}, "--delimiter has no effect"),
        ("a.parquet", {"encoding": "latin-1"}, "--encoding has no effect"),
        ("hf:x", {"delimiter": ";"}, "--delimiter has no effect"),
        ("a.jsonl", {"split": "train"}, "--split has no effect"),
    ],
)
def test_a_flag_without_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}\n")
    with pytest.raises(UsageError, match=text):
        open_input(name, Selection(), InputOptions(**options), tmp_path / "input")


def test_another_delimiter_is_another_input(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b;c\n1,2;3\n")
    one = open_input(path, Selection(), folder=tmp_path).describe()
    two = open_input(path, Selection(), InputOptions(delimiter=";"), tmp_path).describe()
    assert "delimiter: the default -> ;" in changes(one, two)


def test_blank_lines_are_counted_apart_from_what_a_stage_drops(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n\n  \n' for n in range(20)))
    source = open_input(path, Selection(), folder=tmp_path / "input")
    for _ in range(2):  # the second time every row is in the journal
        done = run_chunks(source, tmp_path, "copied")
        counts = {name: sum(result[name] for result in done.results)
                  for name in ("rows_in", "rows_out", "dropped", "rejected", "blank")}  # fmt: skip
        assert counts == {"rows_in": 60, "rows_out": 20, "dropped": 7, "rejected": 0, "blank": 40}


@pytest.mark.parametrize("between", [b" ", b"1 ", b'{"a": 12345.678}, '])
def test_a_long_number_is_found_wherever_it_stands(between: bytes) -> None:
    for place in range(40):
        around = (between * 40)[:place], b" " + between * 40
        for digits in range(12, 25):
            number = b"1234567890123456789012345"[:digits]
            assert has_long_number(b" ".join((around[0], number)) + around[1]) == (digits >= 19)
