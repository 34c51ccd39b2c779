"""A Llama-architecture decoder whose parameters have the names of Transformers' LlamaForCausalLM.

RMSNorm before each block, rotary positions (half-split layout, base 10000), SwiGLU, no biases
(Touvron et al. 2023, arXiv 2302.13971). Decoding is greedy, with a key-value cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster_recipes.arith.config import MAX_POSITIONS
from muster_recipes.arith.problems import Problem, prompt, read_answer
from muster_recipes.arith.tokenizer import BOS, EOS, PAD, decode, encode

ROPE_BASE = 10_000.0
NORM_EPS = 1e-6
_INITIAL_STD = 0.02  # initializer_range of Transformers' LlamaConfig


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The sizes of a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int

    @property
    def head_size(self) -> int:
        """Numbers per head."""
        return self.hidden_size // self.num_heads


class Cache:
    """Keys and values of the positions so far, one pair per layer: [n, heads, length, head]."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of positions in it."""
        return self._pairs[0][0].shape[2] if self._pairs else 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a layer; returns all of its keys and values."""
        if layer in self._pairs:
            old_keys, old_values = self._pairs[layer]
            keys, values = torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
        self._pairs[layer] = (keys, values)
        return keys, values


class Llama(nn.Module):
    """Tokens [n, t] to logits [n, t, vocabulary]. Padding goes to the right."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=_INITIAL_STD)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute logits. With a cache, ``tokens`` follow those in it; else they are the start.

        A first call may have any length; further calls with the same cache take one token each.
        """
        logits: Tensor = self.lm_head(self.model(tokens, cache))
        return logits


class _Decoder(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self._head_size = shape.head_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape, layer) for layer in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)

    def forward(self, tokens: Tensor, cache: Cache | None) -> Tensor:
        begin = 0 if cache is None else cache.length
        if begin and tokens.shape[1] != 1:
            raise ValueError(f"A cache takes one token at a time, not {tokens.shape[1]}.")
        rotation = _rotation(begin, begin + tokens.shape[1], self._head_size, tokens.device)
        hidden: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotation, cache)
        normed: Tensor = self.norm(hidden)
        return normed


class _Layer(nn.Module):
    def __init__(self, shape: LlamaShape, number: int) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, number)
        self.mlp = _FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=NORM_EPS)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, cache)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape, layer: int) -> None:
        super().__init__()
        self._layer, self._shape = layer, shape
        size = shape.hidden_size
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Tensor:
        n, length, size = hidden.shape
        queries = _rotate(self._heads(self.q_proj(hidden)), rotation)
        keys = _rotate(self._heads(self.k_proj(hidden)), rotation)
        values = self._heads(self.v_proj(hidden))
        if cache is not None:
            keys, values = cache.extend(self._layer, keys, values)
        is_start = keys.shape[2] == length
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=is_start)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(n, length, size))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        return x.view(n, length, self._shape.num_heads, self._shape.head_size).transpose(1, 2)


class _FeedForward(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotation(begin: int, end: int, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [end - begin, head] of the positions from ``begin``."""
    exponents = torch.arange(0, head, 2, device=device, dtype=torch.float32) / head
    positions = torch.arange(begin, end, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROPE_BASE**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + head/2) of [n, heads, t, head] by their positions' angles."""
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


_BATCH = 256


def solve(model: Llama, problems: Sequence[str], max_new_tokens: int = 192) -> list[str]:
    """What the model writes for each problem text, up to its end token.

    Prompts of one length are decoded together, so there is no padding and a solution does not
    depend on its neighbours beyond the order of float additions.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    prompts = [[BOS, *encode(prompt(text))] for text in problems]
    for number, tokens in enumerate(prompts):
        by_length[len(tokens)].append(number)
    solutions = [""] * len(prompts)
    for length, numbers in by_length.items():
        room = min(max_new_tokens, MAX_POSITIONS - length)
        for begin in range(0, len(numbers), _BATCH):
            chunk = numbers[begin : begin + _BATCH]
            written = _decode(model, [prompts[number] for number in chunk], room)
            for number, tokens in zip(chunk, written, strict=True):
                solutions[number] = decode(tokens)
    return solutions


def solved_share(model: Llama, problems: Sequence[Problem]) -> float:
    """The share of problems whose final answer is right."""
    solutions = solve(model, [problem.text for problem in problems])
    found = map(read_answer, solutions)
    return sum(a == p.answer for a, p in zip(found, problems, strict=True)) / len(problems)


@torch.no_grad()
def _decode(model: Llama, prompts: list[list[int]], room: int) -> list[list[int]]:
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    cache, step = Cache(), torch.tensor(prompts, device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    columns: list[Tensor] = []
    for _ in range(room):
        chosen = model(step, cache)[:, -1].argmax(-1).masked_fill(is_done, PAD)
        columns.append(chosen)
        is_done |= chosen == EOS
        if is_done.all():
            break
        step = chosen[:, None]
    model.train(was_training)
    if not columns:
        return [[] for _ in prompts]
    rows: list[list[int]] = torch.stack(columns, 1).tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in rows]
