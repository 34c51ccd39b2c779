"""Characters to numbers and back, and the files for Transformers."""

from __future__ import annotations

import json
import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.arith import tokenizer
from muster_recipes.arith.tokenizer import (
    BOS,
    EOS,
    PAD,
    UNKNOWN,
    VOCABULARY,
    decode,
    encode,
)

_KNOWN = string.digits + string.ascii_letters + string.punctuation + " \n"


@given(st.text(alphabet=_KNOWN))
def test_known_text_comes_back_unchanged(text: str) -> None:
    assert decode(encode(text)) == text
    assert len(encode(text)) == len(text)


@given(st.text())
def test_any_text_has_one_token_per_character(text: str) -> None:
    tokens = encode(text)
    assert len(tokens) == len(text)
    assert all(0 <= token < len(VOCABULARY) for token in tokens)
    assert decode(tokens) == "".join(c for c in text if c in _KNOWN)


def test_special_tokens_cannot_be_written_as_text() -> None:
    assert not {PAD, BOS, EOS, UNKNOWN} & set(encode("<pad><s></s><unk>"))
    assert decode([BOS, *encode("1"), EOS, PAD]) == "1"


def test_the_files_name_the_same_vocabulary(tmp_path: Path) -> None:
    tokenizer.save(tmp_path, 512)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert [saved["model"]["vocab"][token] for token in VOCABULARY] == list(range(len(VOCABULARY)))
    assert [token["id"] for token in saved["added_tokens"]] == [PAD, BOS, EOS, UNKNOWN]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert VOCABULARY[EOS] == settings["eos_token"]
    assert settings["model_max_length"] == 512
