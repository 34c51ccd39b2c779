"""The trained model in Hugging Face format, written without their packages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from muster_recipes.arith import tokenizer
from muster_recipes.arith.config import MAX_POSITIONS
from muster_recipes.arith.llama import NORM_EPS, ROPE_BASE, Llama, LlamaShape
from muster_recipes.arith.tokenizer import BOS, EOS, PAD

_ALIGNMENT = 8  # of the numbers in the file, as the format asks for


def save(model: Llama, folder: Path, solved: Mapping[int, float]) -> None:
    """Write config.json, generation_config.json, model.safetensors, the tokenizer's files and
    ``solved.json`` (number of operations → share of held-out problems solved) into ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _config(model.shape))
    _write(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False},
    )
    tokenizer.save(folder, MAX_POSITIONS)
    _write(folder / "solved.json", {str(difficulty): share for difficulty, share in solved.items()})
    write_safetensors(folder / "model.safetensors", model.state_dict())


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format: header length, JSON header, raw little-endian float32 numbers."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    chunks, offset = [], 0
    for name, tensor in tensors.items():
        data = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(chunks)


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "max_position_embeddings": MAX_POSITIONS,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
