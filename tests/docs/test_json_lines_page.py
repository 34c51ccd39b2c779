"""The model of the page on JSON lines, made here instead of downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.conftest import MusterCli

PAGE = Path(__file__).parents[2] / "docs/howto/json-lines.md"


@pytest.mark.thorough
def test_the_stage_of_the_page_labels_records(tmp_path: Path, muster_cli: MusterCli) -> None:
    transformers = pytest.importorskip("transformers")
    block = r"<!-- file: sentiment.py -->\n```python\n(.*?)```"
    (stage,) = re.findall(block, PAGE.read_text(), re.S)
    (tmp_path / "sentiment.py").write_text(stage)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "model/vocab.txt")).save_pretrained(
        tmp_path / "model"
    )
    transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=2,
        )
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    (tmp_path / "reviews").mkdir()
    lines = [json.dumps({"text": text}) for text in ("good film", "bad film", "good " * 500)]
    (tmp_path / "reviews/a.jsonl").write_text("\n".join(lines) + "\n")
    done = muster_cli("map", "sentiment.py:Sentiment", "--model", "model", "--max-length", "64",
                      "--input", "reviews/*.jsonl", "--output", "labelled.jsonl",
                      "--batch-size", "2", "--devices", "cpu:1", "--run-dir", "r")  # fmt: skip
    assert done.returncode == 0, (done.stderr, (tmp_path / "r/errors.jsonl").read_text())
    found = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    assert [record["text"] for record in found] == [json.loads(line)["text"] for line in lines]
    assert all(record["label"].startswith("LABEL_") for record in found)
    assert all(0.5 <= record["probability"] <= 1 for record in found)
