"""The objective of proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347).

Everything is a sum over valid steps, so that ranks and micro-batches add up to the mean over all
globally valid steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster.base.errors import UsageError

#: Keeps advantages that are all the same from being divided by 0.
_EPSILON = 1e-8


class PpoTerms(NamedTuple):
    """Sums over valid steps: scalars in float32 at least.

    Attributes
        policy: the loss, minus the clipped surrogate objective (eq. 7). Has gradients.
        value: squared error of the value, not halved (eq. 9). Has gradients.
        entropy: entropies of the policy. Has gradients.
        approx_kl: estimates of KL(old | new): (r - 1) - log r, never negative, with the ratio r of
            new to old probability (Schulman 2020, "Approximating KL divergence", k3).
        clipped: number of steps whose ratio is outside 1 +- clip.
        num_valid: number of valid steps.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clipped: Tensor
    num_valid: Tensor


def ppo_terms(
    *,
    log_probs: Tensor,
    entropies: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    targets: Tensor,
    valid: Tensor,
    clip: float,
    value_clip: float | None = None,
) -> PpoTerms:
    """The terms of one minibatch. All tensors have the same shape, of any rank; ``valid`` is bool.

    ``log_probs``, ``entropies`` and ``values`` are of the policy in training, the old ones of the
    policy that acted. ``value_clip``: the value's error is the larger one of the value and of the
    value held within ``value_clip`` of the old one (as in the reference implementation, PPO2).

    Raises UsageError where shapes differ: [T, N] against [T x N, 1] would broadcast to a matrix.
    """
    _require_same_shapes(
        log_probs=log_probs, entropies=entropies, values=values, old_log_probs=old_log_probs,
        old_values=old_values, advantages=advantages, targets=targets, valid=valid,
    )  # fmt: skip
    # Invalid steps are replaced before any function whose gradient could be infinite there.
    log_ratio = _where(valid, log_probs - old_log_probs)
    advantages = _where(valid, advantages)
    ratio = log_ratio.exp()
    surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))
    error = _where(valid, values - targets).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, _where(valid, near - targets).square())
    with torch.no_grad():
        approx_kl = (log_ratio.expm1() - log_ratio).sum()
        clipped = ((ratio - 1).abs() > clip).sum()
    return PpoTerms(
        policy=-surrogate.sum(),
        value=error.sum(),
        entropy=_where(valid, entropies).sum(),
        approx_kl=approx_kl,
        clipped=clipped.to(approx_kl.dtype),
        num_valid=valid.sum().to(approx_kl.dtype),
    )


def total(terms: PpoTerms, *, value_coef: float, entropy_coef: float, count: float) -> Tensor:
    """The loss: the terms combined, divided by ``count``, the valid steps of all ranks together.

    The sum of this loss over all ranks and micro-batches is the mean over all those steps, as is
    the sum of its gradients. It is 0 where there is no step at all.
    """
    combined = terms.policy + value_coef * terms.value - entropy_coef * terms.entropy
    return combined / max(count, 1)


def advantage_sums(advantages: Tensor, valid: Tensor) -> Tensor:
    """Count and sum over valid steps: float64 [2], which ranks add."""
    _require_same_shapes(advantages=advantages, valid=valid)
    kept = torch.where(valid, advantages.detach().to(torch.float64), 0.0)
    return torch.stack([valid.sum(dtype=torch.float64), kept.sum()])


def squared_deviations(advantages: Tensor, valid: Tensor, global_sums: Tensor) -> Tensor:
    """Sum of squares about the mean of all ranks: a float64 scalar, which ranks add.

    A second sum, because squares about 0 lose a small spread about a large mean.
    """
    return _deviations(advantages, valid, global_sums).square().sum()


def normalise_advantages(
    advantages: Tensor, valid: Tensor, global_sums: Tensor, global_squares: Tensor
) -> Tensor:
    """(advantage - mean) / (sample standard deviation + 1e-8), 0 at invalid steps; same dtype.

    ``global_sums``, ``global_squares``: ``advantage_sums`` and ``squared_deviations`` of all
    ranks, added. One step, or advantages that are all the same, become 0.
    """
    deviations = _deviations(advantages, valid, global_sums)
    variance = global_squares / (global_sums[0] - 1).clamp(min=1)
    return (deviations / (variance.sqrt() + _EPSILON)).to(advantages.dtype)


def _deviations(advantages: Tensor, valid: Tensor, global_sums: Tensor) -> Tensor:
    _require_same_shapes(advantages=advantages, valid=valid)
    count, added = global_sums.unbind()
    mean = added / count.clamp(min=1)
    return torch.where(valid, advantages.detach().to(torch.float64) - mean, 0.0)


def _where(valid: Tensor, entries: Tensor) -> Tensor:
    return torch.where(valid, entries, 0.0)


def _require_same_shapes(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise UsageError(
            f"Tensors of one minibatch have different shapes, which would broadcast: {shapes}.",
            hint="one number per step and environment each: [steps, environments].",
        )


class Returns(NamedTuple):
    """Two tensors [T, N] in the dtype of the values, 0 at invalid steps, without gradients.

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
    backwards = _accumulated(deltas.flip(0), decay.flip(0), torch.zeros_like(last_value))
    advantages = torch.stack(backwards[::-1]).masked_fill_(~valid, 0.0)
    return Returns(advantages, (advantages + values).masked_fill_(~valid, 0.0))


def _accumulated(terms: Tensor, decay: Tensor, carry: Tensor) -> list[Tensor]:
    """The sums S_t = terms_t + decay_t S_(t-1) of [T, N], row by row; S_(-1) is ``carry``."""
    sums = []
    for term, factor in zip(terms.unbind(), decay.unbind(), strict=True):
        carry = torch.addcmul(term, factor, carry)
        sums.append(carry)
    return sums


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

    ``rewards``, ``ended``, ``valid`` [T, N]; ``carry`` [N] is what the last call returned, zeros at
    first. The sum begins anew after a step with ``ended``; an invalid step changes nothing. Returns
    R [T, N], which ``ReturnScale`` keeps statistics of, and the next ``carry``.
    """
    if len(rewards) == 0:
        return rewards, carry
    earned = rewards.masked_fill(~valid, 0.0)
    ended = ended & valid
    decay = torch.ones_like(rewards).masked_fill(valid, gamma)
    decay[1:].masked_fill_(ended[:-1], 0.0)
    sums = _accumulated(earned, decay, carry)
    return torch.stack(sums).to(rewards.dtype), sums[-1].masked_fill(ended[-1], 0.0)


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
    # A variance this small is what rounding leaves of zero.
    spread = torch.where(spread > 1e-13 * known_squares, spread, torch.nan)
    return 1 - (missed_squares - missed.square() / count) / spread
