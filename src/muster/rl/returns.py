"""Advantages and returns of a rollout, as pure functions of tensors [T, N]: steps by environments.

A step is *valid* where it belongs to an episode; what stands at an invalid step is never looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Returns(NamedTuple):
    """Both [T, N], in the dtype of the values, 0 at invalid steps, without gradients.

    Attributes
        advantages: how much better an action was than the policy's average.
        targets: what the value should have been: advantage + value.
    """

    advantages: Tensor
    targets: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    last_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Returns:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V(s_(t+1)) - V(s_t). A terminated
    step has V(s_(t+1)) = 0; a truncated one takes it from ``bootstrap``, the value of the final
    observation; both end the sum. Where a step is both, terminated wins. The last step of the
    rollout takes ``last_value`` [N], the value of what comes next.

    ``rewards``, ``values``, ``bootstrap`` float [T, N], ``bootstrap`` read only where truncated;
    ``terminated``, ``truncated``, ``valid`` bool [T, N]. Invalid steps are passed over, as if they
    were not there.
    """
    ended = terminated | truncated
    next_values = torch.cat([values, last_value.unsqueeze(0)]).gather(0, _next_valid(valid))
    next_values = torch.where(truncated, bootstrap, next_values).masked_fill(terminated, 0.0)
    deltas = (rewards + gamma * next_values - values).masked_fill(~valid, 0.0)
    decay = torch.where(valid, (gamma * gae_lambda) * (~ended).to(values.dtype), 1.0)
    advantages = torch.empty_like(deltas)
    carry = torch.zeros_like(last_value)
    for step in range(len(deltas) - 1, -1, -1):
        carry = torch.addcmul(deltas[step], decay[step], carry)
        advantages[step] = carry
    advantages.masked_fill_(~valid, 0.0)
    return Returns(advantages, (advantages + values).masked_fill_(~valid, 0.0))


def _next_valid(valid: Tensor) -> Tensor:
    """The first valid step after each one, T where there is none: int64 [T, N]."""
    num_steps = len(valid)
    steps = torch.arange(num_steps, device=valid.device).unsqueeze(-1)
    own = torch.where(valid, steps, num_steps)
    own_or_later = own.flip(0).cummin(0).values.flip(0)
    return torch.cat([own_or_later[1:], torch.full_like(own[:1], num_steps)])


@torch.no_grad()
def discounted_running(
    rewards: Tensor, carry: Tensor, ended: Tensor, valid: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """The discounted sum of an episode's rewards so far: R_t = r_t + gamma R_(t-1).

    ``rewards``, ``ended``, ``valid`` [T, N]; ``carry`` [N] is what the last call gave, zeros at
    first. Begins anew after a step with ``ended``; an invalid step changes nothing. Gives R [T, N],
    which ``ReturnScale`` keeps statistics of, and the next ``carry``.
    """
    earned = rewards.masked_fill(~valid, 0.0)
    ended = ended & valid
    decay = torch.ones_like(rewards).masked_fill(valid, gamma)
    decay[1:].masked_fill_(ended[:-1], 0.0)
    running = torch.empty_like(rewards)
    for step in range(len(rewards)):
        carry = torch.addcmul(earned[step], decay[step], carry)
        running[step] = carry
    return running, carry if len(ended) == 0 else carry.masked_fill(ended[-1], 0.0)


@torch.no_grad()
def explained_variance_sums(values: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Sums over valid steps that ranks add before ``explained_variance``: float64 [5]."""
    known = torch.where(valid, targets, 0.0).to(torch.float64)
    missed = torch.where(valid, targets - values, 0.0).to(torch.float64)
    count = valid.sum(dtype=torch.float64)
    return torch.stack([count, known.sum(), known.square().sum(), missed.sum(),
                        missed.square().sum()])  # fmt: skip


def explained_variance(total: Tensor) -> Tensor:
    """1 - Var(targets - values) / Var(targets), a float64 scalar; NaN where targets are constant.

    1 is a perfect critic, 0 one that is no better than a constant, negative a worse one.
    """
    count, known, known_squares, missed, missed_squares = total.unbind()
    spread = known_squares - known.square() / count
    # What rounding leaves of a spread of zero is not a spread.
    spread = torch.where(spread > 1e-13 * known_squares, spread, torch.nan)
    return 1 - (missed_squares - missed.square() / count) / spread
