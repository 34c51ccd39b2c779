"""Distributions over actions, made of what a policy puts out. They draw no random numbers: these
are given, so that an action is a function of a counter (``rl.streams``).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl import streams
from muster.rl.environment import Actions, Continuous, Discrete

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """A distribution of one action per row; rows have any leading shape [...]."""

    def log_prob(self, actions: Tensor) -> Tensor:
        """The log-probabilities [...] of ``actions`` as ``sample`` gives them."""
        ...

    def entropy(self) -> Tensor:
        """The entropies [...] in nats."""
        ...

    def sample(self, randoms: Tensor) -> Tensor:
        """Actions from random numbers as ``draw`` gives them; no gradient."""
        ...

    def mode(self) -> Tensor:
        """The most probable actions; no gradient."""
        ...


def distribution(actions: Actions, parameters: Tensor, mask: Tensor | None = None) -> Distribution:
    """What ``parameters`` [..., P] mean for these actions; computed in float32 at least.

    Discrete: P = num_actions logits; ``mask`` bool, like them, at least one True per row: the
    others have probability 0. Continuous: P = 2 x dimensions, means and then logs of standard
    deviations; no mask. Raises UsageError where P or the mask do not fit.
    """
    if parameters.dtype in (torch.float16, torch.bfloat16):
        parameters = parameters.float()
    match actions:
        case Discrete(num_actions):
            _require_size(parameters, num_actions, f"logits of {num_actions} actions")
            if mask is None:
                return Categorical(parameters.log_softmax(-1))
            if mask.shape != parameters.shape:
                raise UsageError(
                    f"An action mask {list(mask.shape)} does not fit logits "
                    f"{list(parameters.shape)}: one bool per row and action is needed."
                )
            return Categorical(parameters.masked_fill(~mask, -torch.inf).log_softmax(-1))
        case Continuous(low):
            size = len(low)
            _require_size(parameters, 2 * size, f"mean and log std of {size} numbers")
            if mask is not None:
                raise UsageError("An action mask has no meaning for continuous actions.")
            return DiagonalNormal(parameters[..., :size], parameters[..., size:])


def num_randoms(actions: Actions) -> int:
    """Random numbers per row: one uniform for a discrete action, else a normal per dimension."""
    return 1 if isinstance(actions, Discrete) else len(actions.low)


def draw(actions: Actions, seed: int, purpose: int, index: Tensor, counter: Tensor | int) -> Tensor:
    """What ``sample`` needs: float64 [..., num_randoms], a function of the arguments only.

    ``index`` int64 [...]: which environment; ``counter``: which step; see ``streams``.
    """
    kind = streams.uniform if isinstance(actions, Discrete) else streams.normal
    return kind(seed, purpose, index, counter, num_randoms(actions))


class Categorical(NamedTuple):
    """``log_probs`` [..., num_actions], normalised; -inf for what is impossible."""

    log_probs: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """``actions`` int64 [...]; -inf for a masked one."""
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        # 0 log 0 = 0, and its gradient too: -inf must not meet the product.
        finite = self.log_probs.masked_fill(self.log_probs == -torch.inf, 0.0)
        return -(self.log_probs.exp() * finite).sum(-1)

    def sample(self, randoms: Tensor) -> Tensor:
        """Invert the cumulative distribution at ``randoms``, float64 [..., 1] in [0, 1).

        An action of probability 0 is never drawn, whatever rounding does to the sums (a parallel
        cumulative sum need not even be monotonic): it is no candidate. Some other always is one:
        a random is at most 1 - 2^-53, and its product with the largest sum is rounded to less.
        """
        probs = self.log_probs.detach().to(torch.float64).exp()
        sums = torch.where(probs > 0, probs.cumsum(-1), 0.0)
        drawn = randoms * sums.amax(-1, keepdim=True)
        return (sums > drawn).to(torch.uint8).argmax(-1)

    def mode(self) -> Tensor:
        return self.log_probs.argmax(-1)


class DiagonalNormal(NamedTuple):
    """Independent normals: ``mean`` and ``log_std`` [..., dimensions]. Not squashed, not clipped:
    environments clip what they are given, and the probability is that of what was given."""

    mean: Tensor
    log_std: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        scaled = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * scaled.square() - self.log_std - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def sample(self, randoms: Tensor) -> Tensor:
        """``randoms``: standard normals [..., dimensions]; gives the dtype of the mean."""
        mean, std = self.mean.detach(), self.log_std.detach().exp()
        return mean + std * randoms.to(mean.dtype)

    def mode(self) -> Tensor:
        return self.mean.detach()


def _require_size(parameters: Tensor, size: int, what: str) -> None:
    if parameters.shape[-1:] != (size,):
        raise UsageError(
            f"A policy put out parameters {list(parameters.shape)}, but {what} are {size} per row."
        )
