"""Embeddings of a batch are those of its texts one by one, and bad texts harm nobody else."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster import UsageError
from muster.base.errors import SetupError, TargetError
from muster.pipeline.stages import Reject
from muster_recipes.embed.recipe import EmbedConfig, stages
from muster_recipes.embed.stage import Embed

_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "one", "two", "three")
_TEXTS = ["a", "b c one two three a b c a", "", "two", "a b", "c " * 60, "three two one", "b b b b"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder with random weights, as transformers saves it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    ids = {word: number for number, word in enumerate(_WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=32,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(_WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=48, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    BertModel(shape).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_gives_what_the_texts_give_alone(bert: Path, pooling: Any, normalize: bool) -> None:
    stage = Embed(model=str(bert), pooling=pooling, normalize=normalize)
    stage.setup("cpu")
    together = _vectors(stage, _TEXTS)
    alone = np.concatenate([_vectors(stage, [text]) for text in _TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    expected = np.stack([_by_hand(bert, text, pooling, normalize) for text in _TEXTS])
    np.testing.assert_allclose(together, expected, atol=1e-5)
    assert len({vector.tobytes() for vector in np.round(expected, 3)}) == len(_TEXTS)
    assert stage.columns() == {"embedding": "float32[24]"}
    stage.close()


def _by_hand(bert: Path, text: str, pooling: str, normalize: bool) -> Any:
    """From the model's own outputs for one text without padding."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(bert)(text)["input_ids"][:31]
    if len(tokens) == 31 and tokens[-1] != 3:
        tokens = [*tokens, 3]  # a long text is cut and still ends in [SEP]
    with torch.no_grad():
        model = AutoModel.from_pretrained(bert)
        hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


def test_padding_on_the_left_changes_nothing(bert: Path) -> None:
    import torch

    from muster_recipes.embed.encoder import pool

    hidden = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    moved, left = hidden.clone(), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    moved[0] = hidden[0].roll(1, 0)
    for pooling in ("mean", "cls", "last"):
        assert torch.allclose(pool(hidden, right, pooling), pool(moved, left, pooling))


def test_max_length_cuts_and_no_more_than_the_model_takes(bert: Path) -> None:
    short = Embed(model=str(bert), max_length=3)
    short.setup("cpu")
    first, second = _vectors(short, ["a b c", "a two"])
    np.testing.assert_allclose(first, second, atol=1e-6)
    with pytest.raises(SetupError, match="--max-length 33 is more than the 32 tokens"):
        Embed(model=str(bert), max_length=33).setup("cpu")


def test_half_precision_gives_float32_close_to_full(bert: Path) -> None:
    full, half = Embed(model=str(bert)), Embed(model=str(bert), dtype="bfloat16")
    full.setup("cpu")
    half.setup("cpu")
    np.testing.assert_allclose(_vectors(half, _TEXTS), _vectors(full, _TEXTS), atol=0.05)


def test_a_record_without_text_is_rejected_alone(bert: Path) -> None:
    stage = Embed(model=str(bert), column="body")
    stage.setup("cpu")
    made = stage.process([{"id": 1, "text": "a"}, {"id": 2, "body": "a"}, {"id": 3, "body": None}])
    assert [isinstance(one, Reject) for one in made] == [True, False, True]
    assert str(made[0]) == "there is no column 'body'; there are: id, text"
    assert str(made[2]) == "the column 'body' holds no text but NoneType"
    assert isinstance(made[1], dict)
    assert list(made[1]) == ["id", "body", "embedding"]
    assert [str(one) for one in stage.process([{"x": 1}])] == [
        "there is no column 'body'; there are: x"
    ]


def test_a_function_of_the_user(tmp_path: Path) -> None:
    stage = _function(tmp_path, "return [[len(t), 1, 1e99 if t == 'bad' else 0] for t in x]")
    stage.setup("cpu")
    assert stage.columns() == {"embedding": "float32[3]"}
    made = stage.process([{"text": "abc"}, {"text": "bad"}, {"text": "a"}])
    assert isinstance(made[0], dict) and isinstance(made[1], Reject) and isinstance(made[2], dict)
    np.testing.assert_allclose(made[0]["embedding"], [3, 1, 0])
    assert made[0]["embedding"].dtype == np.float32
    assert "not finite" in str(made[1])


def test_vectors_of_a_function_are_normalised_when_asked(tmp_path: Path) -> None:
    stage = _function(tmp_path, "return [[3.0, 4.0] if t else [0.0, 0.0] for t in x]", True)
    stage.setup("cpu")
    np.testing.assert_allclose(_vectors(stage, ["a", ""]), [[0.6, 0.8], [0, 0]], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0] * len(x)", r"an array of the shape \[1\] for 1 texts"),
        ("return [[1.0]] * (len(x) + 1)", r"the shape \[2, 1\] for 1 texts"),
        ("return ['a'] * len(x)", "a list that is not an array"),
        ("return None", r"the shape \[\] for 1 texts"),
    ],
)
def test_a_function_that_returns_something_else_is_told(
    tmp_path: Path, body: str, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        _function(tmp_path, body).setup("cpu")


def test_a_model_that_is_not_there_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Cannot load the encoder"):
        Embed(model=str(tmp_path / "none")).setup("cpu")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "either --model or --function"),
        ({"model": "m", "function": "f.py:f"}, "and has m and f.py:f"),
        ({"function": "f.py:f", "pooling": "cls"}, "--pooling cls has no effect"),
        ({"model": "m", "batch_size": 0}, "--batch-size 0"),
        ({"model": "m", "max_length": -1}, "--max-length -1"),
        ({"model": "m", "column": ""}, "--column is empty"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EmbedConfig(**values).check()


def test_the_recipe_finds_the_function_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vectors.py").write_text("def of(x):\n    return [[1.0, 0.0] for _ in x]\n")
    monkeypatch.chdir(tmp_path)
    config = EmbedConfig(function="vectors.py:of")
    config.check()
    [stage] = stages(config)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    stage.setup("cpu")
    assert _vectors(stage, ["a"]).tolist() == [[1.0, 0.0]]


def test_vectors_can_be_written_as_json(tmp_path: Path) -> None:
    import orjson

    stage = _function(tmp_path, "return [[0.1, 1e-9] for _ in x]")
    stage.setup("cpu")
    [made] = stage.process([{"text": "a"}])
    line = orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY)
    assert np.float32(json.loads(line)["embedding"]).tolist() == np.float32([0.1, 1e-9]).tolist()


def _function(folder: Path, body: str, normalize: bool = False) -> Embed:
    code = textwrap.dedent(f"def vectors(x):\n    {body}\n")
    (folder / "mine.py").write_text(code)
    return Embed(function=f"{folder / 'mine.py'}:vectors", normalize=normalize)


def _vectors(stage: Embed, texts: list[str]) -> np.ndarray[Any, Any]:
    made = stage.process([{"text": text} for text in texts])
    return np.stack([one["embedding"] for one in made if isinstance(one, dict)])
