"""The decoder against its textbook form, its cache, and the saved files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from muster_recipes.arith.config import MAX_POSITIONS
from muster_recipes.arith.llama import Cache, Llama, LlamaShape
from muster_recipes.arith.problems import prompt
from muster_recipes.arith.save import save, write_safetensors
from muster_recipes.arith.tokenizer import BOS, VOCABULARY, encode

SHAPE = LlamaShape(
    vocab_size=len(VOCABULARY), hidden_size=24, intermediate_size=40, num_layers=2, num_heads=3
)


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    model = Llama(SHAPE).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def textbook(model: Llama, tokens: list[int]) -> Tensor:
    """One sequence, position by position and head by head, from the equations."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    size, head = SHAPE.hidden_size, SHAPE.head_size

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x)
        for i in range(head // 2):
            angle = position * 10000.0 ** (-2 * i / head)
            a, b = x[i], x[i + head // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + head // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    hidden = [state["model.embed_tokens.weight"][token] for token in tokens]
    for layer in range(SHAPE.num_layers):
        at = f"model.layers.{layer}."
        normed = [norm(h, state[at + "input_layernorm.weight"]) for h in hidden]
        q, k, v = (
            [state[f"{at}self_attn.{name}_proj.weight"] @ x for x in normed] for name in "qkv"
        )
        for position in range(len(tokens)):
            mixed = torch.empty(size, dtype=torch.float64)
            for number in range(SHAPE.num_heads):
                part = slice(number * head, (number + 1) * head)
                query = turn(q[position][part], position)
                scores = torch.stack(
                    [query @ turn(k[j][part], j) / math.sqrt(head) for j in range(position + 1)]
                )
                weights = scores.softmax(0)
                mixed[part] = torch.stack([w * v[j][part] for j, w in enumerate(weights)]).sum(0)
            hidden[position] = hidden[position] + state[at + "self_attn.o_proj.weight"] @ mixed
        for position, h in enumerate(hidden):
            x = norm(h, state[at + "post_attention_layernorm.weight"])
            gate = state[at + "mlp.gate_proj.weight"] @ x
            up = state[at + "mlp.up_proj.weight"] @ x
            hidden[position] = h + state[at + "mlp.down_proj.weight"] @ (
                gate * torch.sigmoid(gate) * up
            )
    return torch.stack(
        [state["lm_head.weight"] @ norm(h, state["model.norm.weight"]) for h in hidden]
    )


@torch.no_grad()
def test_logits_are_the_textbooks(model: Llama) -> None:
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 9))
    for row, logits in zip(tokens, model(tokens), strict=True):
        # Rotations are in float32.
        torch.testing.assert_close(logits, textbook(model, row.tolist()), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_cache_changes_nothing(model: Llama) -> None:
    tokens = torch.randint(0, SHAPE.vocab_size, (3, 12))
    cache = Cache()
    parts = [model(tokens[:, :5], cache)]
    parts += [model(tokens[:, i : i + 1], cache) for i in range(5, 12)]
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


@torch.no_grad()
def test_a_cache_takes_one_token_at_a_time(model: Llama) -> None:
    cache = Cache()
    model(torch.zeros(1, 3, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="one token at a time, not 2"):
        model(torch.zeros(1, 2, dtype=torch.long), cache)


@torch.no_grad()
def test_a_token_does_not_see_the_future(model: Llama) -> None:
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 8))
    other = tokens.clone()
    other[0, 5:] = 3
    torch.testing.assert_close(model(tokens)[:, :5], model(other)[:, :5])


def test_the_saved_files_hold_the_parameters(tmp_path: Path, model: Llama) -> None:
    save(model, tmp_path, {1: 0.5})
    found = read_safetensors(tmp_path / "model.safetensors")
    state = model.state_dict()
    assert list(found) == list(state)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor.float(), atol=0, rtol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == SHAPE.num_layers
    assert config["max_position_embeddings"] == MAX_POSITIONS
    assert json.loads((tmp_path / "solved.json").read_text()) == {"1": 0.5}


def test_the_header_of_safetensors_is_aligned_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.tensor(2.5)})
    size = int.from_bytes(path.read_bytes()[:8], "little")
    assert size % 8 == 0
    assert path.stat().st_size == 8 + size + 4 * 7
    found = read_safetensors(path)
    assert found["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["b"].item() == 2.5


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """By the format's description, apart from what wrote it."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[8 + size + begin : 8 + size + end], "<f4")
        found[name] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    return found


def test_transformers_loads_the_folder_and_agrees(tmp_path: Path, model: Llama) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    save(model.float(), tmp_path, {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=1e-5)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Q: 1+2\nA: 1 ~"
    assert reader(text)["input_ids"] == [BOS, *encode(text)]
    assert reader.decode(reader(text)["input_ids"], skip_special_tokens=True) == text
    asked = reader.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False)
    assert asked == "<s>" + prompt("1+2")
