"""Greedy decoding with a key-value cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from muster_recipes.arith.config import MAX_POSITIONS
from muster_recipes.arith.llama import Cache, Llama
from muster_recipes.arith.problems import prompt, read_answer
from muster_recipes.arith.tokenizer import BOS, EOS, PAD, decode, encode

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


def solved_share(model: Llama, texts: Sequence[str], answers: Sequence[int]) -> float:
    """The share of problems whose final answer is right."""
    found = [read_answer(solution) for solution in solve(model, texts)]
    return sum(a == b for a, b in zip(found, answers, strict=True)) / len(answers)


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
