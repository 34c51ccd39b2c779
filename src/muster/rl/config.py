"""How an agent is trained: one frozen value. Its fields are the flags of ``muster train``.

No torch here: the command line reads this before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from muster.base.codec import check_types
from muster.base.errors import UsageError, check_names, check_ranges, flag_of

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """Every setting of proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347)."""

    num_envs: int = 8
    """Environments per rank."""
    rollout_steps: int = 128
    """Steps of every environment between two updates."""
    batch_size: int = 2
    """Sequences per minibatch on each rank; a sequence is one environment's rollout."""
    update_epochs: int = 4
    """Passes over a rollout."""
    num_episodes: int | None = None
    """Stop when so many episodes have been finished, over all ranks."""
    num_steps: int | None = None
    """Stop after so many steps of environments, over all ranks."""
    lr: float = 3e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """linear: down to 0 at the end."""
    gamma: float = 0.99
    """Discount per step."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation."""
    clip: float = 0.2
    """How far the ratio of probabilities may move."""
    value_clip: float | None = None
    """How far values may move in one update; not limited when not given."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus at the start."""
    entropy_coef_end: float | None = None
    """Weight at the end, approached linearly; the same as at the start when not given."""
    max_grad_norm: float = 0.5
    """Clip the norm of the global gradient to this."""
    target_kl: float | None = None
    """All ranks end an update together when the policy has moved further than 1.5 times this."""
    grad_accum_steps: int = 1
    """Forwards and backwards per minibatch, with one all-reduce."""
    normalize_observations: bool = True
    """Running mean and variance of what is observed, over all ranks."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    precision: Precision = "fp32"
    """Precision of acting and learning, whose probabilities agree to its rounding: 1e-5 in
    fp32, 3e-3 in bf16."""
    eval_frequency: int = 10
    """Evaluate every so many updates; 0 only at the end."""
    eval_episodes: int = 20
    """Episodes per evaluation, over all ranks."""
    patience: int | None = None
    """Stop when the smoothed validation return has not improved in so many training episodes, and
    not in five evaluations."""
    compile: bool = False
    """torch.compile the acting step; on a GPU as a CUDA graph."""
    seed: int = 0
    """Environments, actions and minibatches."""
    model_seed: int | None = None
    """Initial weights; --seed when not given."""
    deterministic: bool = False
    """Only deterministic kernels; needed on GPUs for bit-identical resumes."""
    keep: int = 3
    """How many checkpoints are kept, beside the best."""
    tensorboard: bool = True
    """Write TensorBoard files when the tensorboard package is installed."""

    def __post_init__(self) -> None:
        """Raise UsageError for values that make no sense, before anything is started."""
        check_types(self)
        check_ranges(self, positive=_POSITIVE, not_negative=_NOT_NEGATIVE)
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UsageError(f"--{flag_of(name)} must be between 0 and 1, not {value}.")
        if self.patience is not None and self.eval_frequency == 0:
            raise UsageError(
                f"--patience {self.patience} looks at evaluations; --eval-frequency 0 makes none.",
                hint="leave one of them out.",
            )
        if self.num_envs % self.batch_size:
            raise UsageError(
                f"--num-envs {self.num_envs} must be divisible by --batch-size "
                f"{self.batch_size}: a minibatch is so many whole sequences, one per environment.",
                hint=f"use --batch-size {_near_divisor(self.num_envs, self.batch_size)}.",
            )
        if self.batch_size % self.grad_accum_steps:
            raise UsageError(
                f"--batch-size {self.batch_size} must be divisible by --grad-accum-steps "
                f"{self.grad_accum_steps}."
            )

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is learnt.

        The others (how long, how often something is written, how many environments each rank has)
        may change from start to start of one run.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name not in _FREE]
        return {name: getattr(self, name) for name in names}

    @property
    def num_minibatches(self) -> int:
        return self.num_envs // self.batch_size

    @staticmethod
    def of(defaults: Mapping[str, Any], **given: Any) -> PpoConfig:
        """A task's own ``defaults`` with what is ``given`` on top."""
        check_names(PpoConfig, (*defaults, *given))
        return PpoConfig(**{**defaults, **given})


_FREE = frozenset({
    "num_envs", "batch_size", "num_episodes", "num_steps", "grad_accum_steps", "eval_frequency",
    "eval_episodes", "patience", "compile", "deterministic", "keep", "tensorboard",
})  # fmt: skip
_POSITIVE = ("num_envs", "rollout_steps", "batch_size", "update_epochs", "num_episodes",
             "num_steps", "lr", "clip", "value_clip", "max_grad_norm", "target_kl",
             "grad_accum_steps", "eval_episodes", "patience", "keep")  # fmt: skip
_NOT_NEGATIVE = ("value_coef", "entropy_coef", "entropy_coef_end", "eval_frequency")


def _near_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
