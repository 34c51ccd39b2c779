"""The training task ``arith``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from muster import Loss, Task
from muster_recipes.arith.config import MAX_DIFFICULTY, RECIPE, ArithConfig
from muster_recipes.arith.llama import Llama, LlamaShape, solved_share
from muster_recipes.arith.problems import Problem, make, prompt
from muster_recipes.arith.save import save
from muster_recipes.arith.tokenizer import BOS, EOS, PAD, VOCABULARY, encode

_IGNORED = -100
#: One training problem in so many has one operation more than asked for: without them the model
#: solves next to none of the problems that are one step longer.
_HARDER_EVERY = 16
_HARDER = 2  # solved.json goes this many operations beyond the training difficulty


class ArithTask(Task):
    """Next-token prediction on the solutions of generated problems.

    Metrics: ``loss`` (nats) and ``token_accuracy`` per solution token, given the right ones before
    it, and ``exact``: the share of problems of which every token is predicted, which are exactly
    those that greedy decoding answers with the reference's steps.
    """

    defaults: ClassVar[Mapping[str, Any]] = RECIPE.defaults
    monitor: ClassVar[str] = "exact"
    better: ClassVar[Literal["lower", "higher"]] = "higher"

    def __init__(self, config: ArithConfig) -> None:
        self.config = config

    def model(self) -> nn.Module:
        return Llama(
            LlamaShape(
                vocab_size=len(VOCABULARY),
                hidden_size=self.config.hidden_size,
                intermediate_size=self.config.intermediate_size,
                num_layers=self.config.num_layers,
                num_heads=self.config.num_heads,
            )
        )

    def dataset(self, split: Literal["train", "val", "test"]) -> ProblemSet:
        return ProblemSet(self.config, split)

    def collate(self, samples: Sequence[tuple[list[int], int]]) -> dict[str, Tensor]:
        """Inputs and targets [n, t], padded to the right; prompt and padding are not targets."""
        width = max(len(tokens) for tokens, _ in samples) - 1
        inputs = torch.full((len(samples), width), PAD)
        targets = torch.full((len(samples), width), _IGNORED)
        for row, (tokens, prompt_length) in enumerate(samples):
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            targets[row, prompt_length - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt_length:])
        return {"inputs": inputs, "targets": targets}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        losses = _token_losses(model(batch["inputs"]), batch["targets"])
        return Loss(losses.sum(), (batch["targets"] != _IGNORED).sum())

    def score(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, targets = model(batch["inputs"]), batch["targets"]
        is_target = targets != _IGNORED
        num_right = ((logits.argmax(-1) == targets) & is_target).sum(1)
        return {
            "nll": _token_losses(logits, targets).sum(1),
            "right": num_right,
            "tokens": is_target.sum(1),
        }

    def summarise(self, columns: dict[str, Tensor]) -> dict[str, Any]:
        nll, right, tokens = (columns[name].double() for name in ("nll", "right", "tokens"))
        total = float(tokens.sum())
        return {
            "loss": float(nll.sum()) / total,
            "token_accuracy": float(right.sum()) / total,
            "exact": float((right == tokens).double().mean()),
        }

    def finish(self, model: nn.Module, folder: str) -> None:
        """Save for Transformers, with the share solved per difficulty in ``solved.json``."""
        assert isinstance(model, Llama)
        solved = self.solved(model, 1, hardest=1) if self.rehearsing else self.solved(model)
        save(model, Path(folder), solved)

    def solved(
        self, model: Llama, num_problems: int = 200, *, hardest: int | None = None
    ) -> dict[int, float]:
        """The share of held-out problems solved by greedy decoding, per number of operations."""
        config = self.config
        if hardest is None:
            hardest = min(config.difficulty + _HARDER, MAX_DIFFICULTY)
        shares = {}
        for difficulty in range(1, hardest + 1):
            held_out = [
                make(config.data_seed, "test", i, difficulty, config.max_value)
                for i in range(num_problems)
            ]
            shares[difficulty] = solved_share(model, held_out)
        return shares


class ProblemSet(Dataset[tuple[list[int], int]]):
    """Items: the tokens of start, prompt, solution and end, and how many are the prompt's.

    Held-out problems have ``difficulty`` operations. Half of the training problems have 1 to that
    many, one in 16 has one more, and the others have that many.
    """

    def __init__(self, config: ArithConfig, split: Literal["train", "val", "test"]) -> None:
        self._config, self._split = config, split
        lengths = {"train": config.num_train, "val": config.num_val, "test": config.num_test}
        self._length = lengths[split]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        problem = self.problem(index)
        before = [BOS, *encode(prompt(problem.text))]
        return [*before, *encode(problem.solution), EOS], len(before)

    def problem(self, index: int) -> Problem:
        """Problem ``index``, always the same."""
        difficulty = self._config.difficulty
        if self._split == "train":
            if index % _HARDER_EVERY == 0:
                difficulty += 1
            elif index % 2:
                difficulty = 1 + (index // 2) % difficulty
        return make(self._config.data_seed, self._split, index, difficulty, self._config.max_value)


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """[n, t], zero where there is no target; in float32 whatever the model ran in."""
    return F.cross_entropy(
        logits.float().transpose(1, 2), targets, ignore_index=_IGNORED, reduction="none"
    )
