"""One token per printable ASCII character, and the files that make Transformers read it so."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_CHARACTERS = "\n" + "".join(
    sorted(string.digits + string.ascii_letters + string.punctuation + " ")
)
VOCABULARY: tuple[str, ...] = (*_SPECIAL, *_CHARACTERS)
_ID_OF = {token: number for number, token in enumerate(VOCABULARY)}
#: The last message is the problem; what came before is not seen.
_CHAT_TEMPLATE = "{{ bos_token }}Q: {{ messages[-1]['content'] }}\nA: "


def encode(text: str) -> list[int]:
    """One number per character; the start and end tokens are the caller's to add."""
    return [_ID_OF.get(character, UNKNOWN) for character in text]


def decode(tokens: Iterable[int]) -> str:
    """The characters of ``tokens``; special tokens have none."""
    return "".join(VOCABULARY[token] for token in tokens if token >= len(_SPECIAL))


def save(folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``AutoTokenizer``."""
    specials = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for number, token in enumerate(_SPECIAL)
    ]  # fmt: skip
    start = {"SpecialToken": {"id": _SPECIAL[BOS], "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                start,
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                _SPECIAL[BOS]: {"id": _SPECIAL[BOS], "ids": [BOS], "tokens": [_SPECIAL[BOS]]}
            },
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": _ID_OF, "unk_token": _SPECIAL[UNKNOWN]},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[BOS],
        "eos_token": _SPECIAL[EOS],
        "unk_token": _SPECIAL[UNKNOWN],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
