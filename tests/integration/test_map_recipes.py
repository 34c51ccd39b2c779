"""The recipes of ``muster map`` as typed: on the arith data and model, and on a small encoder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.conftest import MusterCli


def run(*words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muster", "map", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


ARITH = ("--dataset", "arith", "--limit", "24", "--devices", "cpu:2")


@pytest.mark.parametrize(
    "words",
    [
        ("--force-download", "--batch-size", "4", "--optimize-gpu", "--no-warnings"),
        pytest.param(
            ("--batch-size", "1", "--max-tokens", "4096", "--cleanup-delay", "2.0",
             "--optimize-gpu", "--no-warnings", "--low-memory"), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_command_lines_of_the_specification_run(place: Path, words: tuple[str, ...]) -> None:
    done = run("reasoning", *ARITH, *words)
    assert done.returncode == 0, done.stderr
    found = rows(place / "reasoning.jsonl")
    assert [row["id"] for row in found] == list(range(24))
    assert sum(row["verification"] == "correct" for row in found) >= 22
    if "--cleanup-delay" in words:
        assert "--cleanup-delay 2 does nothing" in done.stderr
    if "--force-download" in words:
        assert "Nothing to fetch for the data set arith" in done.stderr


def test_the_examples_with_other_words_for_limit_and_skip(place: Path) -> None:
    words = ("--num-examples", "6", "--start-from", "50", "--max-iterations", "2", "--seed", "0")
    done = run("reasoning", "--dataset", "arith", *words, "--output", "out.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["id"] for row in rows(place / "out.jsonl")] == list(range(50, 56))
    outcome = json.loads(done.stdout)
    assert outcome["summary"]["records"] == 6
    assert outcome["numbers"]["tokens"] > 0
    [figure] = outcome["made"]
    assert (place / figure).stat().st_size > 10_000


@pytest.mark.slow
def test_the_number_of_workers_changes_no_byte(place: Path) -> None:
    for devices, name in (("cpu:1", "a"), ("cpu:2", "b")):
        words = ("--devices", devices, "--difficulty", "5", "--output", f"{name}.jsonl")
        done = run("reasoning", "--dataset", "arith", "--limit", "12", *words, "--batch-size", "3")
        assert done.returncode == 0, done.stderr
    assert (place / "a.jsonl").read_bytes() == (place / "b.jsonl").read_bytes()
    versions = [len(row["versions"]) for row in rows(place / "a.jsonl")]
    assert max(versions) == 3  # two rounds of improvement were needed


def test_data_sets_are_listed_and_described(muster_main: MusterCli) -> None:
    listed = muster_main("map", "reasoning", "--list-datasets", "--json")
    assert listed.returncode == 0, listed.stderr
    names = {row["key"] for row in json.loads(listed.stdout)}
    assert names >= {"gsm8k", "math_qa", "math", "asdiv", "aqua", "numina_math", "arith"}
    told = muster_main("map", "reasoning", "--dataset-info", "numina_math")
    assert told.returncode == 0, told.stderr
    assert "AI-MO/NuminaMath-1.5" in told.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--dataset", "gsm9k"), "gsm8k"),
        (("--dataset-info", "gsm9k"), "gsm8k"),
        (("--dataset", "mine.jsonl"), "mine.jsonl"),
        (("--dataset", "there.jsonl"), "problem"),
        (("--input", "there.jsonl"), "--dataset there.jsonl"),
        (("--temperature", "3"), "--temperature 3"),
        (("--engine", "openai", "--model", "m"), "--base-url"),
        (("--base-url", "http://127.0.0.1:1"), "--base-url"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(
    place: Path, muster_main: MusterCli, words: tuple[str, ...], text: str
) -> None:
    (place / "there.jsonl").write_text('{"question": "1+1"}\n')
    done = muster_main("map", "reasoning", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_local_file_with_columns_of_its_own(place: Path) -> None:
    lines = [{"q": f"{n}+2", "a": str(n + 2)} for n in range(10, 20)]
    (place / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    weights = Path(__file__).parents[2] / "src" / "muster_recipes" / "arith" / "weights"
    words = ("--problem-column", "q", "--answer-column", "a", "--model", str(weights))
    done = run("reasoning", "--dataset", "mine.jsonl", *words, "--output", "o.parquet")
    assert done.returncode == 0, done.stderr
    table = pq.read_table(place / "o.parquet")
    assert table.num_rows == 10
    assert table.column("verification").to_pylist().count("correct") >= 8


def test_a_missing_model_is_told(place: Path) -> None:
    done = run("reasoning", *ARITH, "--model", "./nowhere")
    assert done.returncode in (1, 2, 3)
    assert "nowhere" in done.stdout + done.stderr
    assert not (place / "reasoning.jsonl").exists()


ENCODER = """
import torch
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers

torch.manual_seed(0)
words = {w: n for n, w in enumerate(["[PAD]", "[UNK]", "row", *map(str, range(100))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
).save_pretrained("encoder")
BertModel(BertConfig(
    vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=32,
)).save_pretrained("encoder")
"""


def test_texts_become_a_column_of_fixed_size_lists(place: Path) -> None:
    subprocess.run([sys.executable, "-c", ENCODER], check=True, capture_output=True, timeout=300)
    (place / "in.csv").write_text("n,text\n" + "".join(f"{n},row {n}\n" for n in range(40)))
    done = run("embed", "--model", "encoder", "--input", "in.csv", "--devices", "cpu:2")
    assert done.returncode == 0, done.stderr
    table = pq.read_table(place / "embeddings.parquet")
    assert str(table.schema.field("embedding").type).startswith("fixed_size_list<")
    assert table.schema.field("embedding").type.list_size == 16
    assert str(table.schema.field("embedding").type.value_type) == "float"
    assert table.column("n").to_pylist() == [str(n) for n in range(40)]


def test_a_function_of_the_users_makes_the_vectors(place: Path) -> None:
    (place / "mine.py").write_text(
        "def lengths(texts):\n    return [[len(text), text.count('o')] for text in texts]\n"
    )
    (place / "in.jsonl").write_text('{"text": "row one"}\n{"text": 3}\n{"text": "oo"}\n')
    words = ("--function", "mine.py:lengths", "--input", "in.jsonl", "--output", "v.jsonl")
    done = run("embed", *words)
    assert done.returncode == 1, done.stderr  # one record has no text
    assert [row["embedding"] for row in rows(place / "v.jsonl")] == [[7.0, 2.0], [2.0, 2.0]]
