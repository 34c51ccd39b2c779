"""One update of the policy from a rollout: what the ranks agree on first, in one sum, and then
minibatches of whole sequences, in several passes.

The errors for values that are no longer numbers, and for memory that runs out, are here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from muster.base.errors import MusterError
from muster.gang.beacon import BEACON
from muster.rank.life import NonFinite
from muster.rank.meter import memory_sentence
from muster.rl import streams
from muster.rl.config import PpoConfig
from muster.rl.distributions import distribution
from muster.rl.environment import ACTION_MASK
from muster.rl.losses import (
    PpoTerms,
    Returns,
    advantage_sums,
    discounted_running,
    explained_variance_sums,
    ppo_terms,
    squared_deviations,
    total,
)
from muster.rl.progress import count_episodes
from muster.rl.rollout import Rollout
from muster.rl.sequences import SequencePlan, plan_sequences
from muster.rl.setup import AgentRun


class Agreed(NamedTuple):
    """Sums over all ranks, on the CPU.

    Attributes
        episode_sums: see ``progress.count_episodes``.
        advantage_sums: count and sum of the advantages; ``advantage_squares``: about their mean.
        variance_sums: of values and targets, for the explained variance.
        observation_deltas, return_deltas: for the running statistics.
        changed: whether some rank's policy trains others of its parameters than before.
    """

    stop: bool
    save: bool
    changed: bool
    is_finite: bool
    episode_sums: list[float]
    advantage_sums: Tensor
    advantage_squares: Tensor
    variance_sums: Tensor
    observation_deltas: Tensor
    return_deltas: Tensor


@torch.no_grad()
def agree(run: AgentRun, rollout: Rollout, returns: Returns, *, stop: bool, save: bool) -> Agreed:
    """Add up what every rank has seen; ``run.running`` and ``run.discounted`` go on."""
    ended, valid = rollout.ended, rollout.valid
    discounted, run.discounted = discounted_running(
        rollout.rewards, run.discounted, ended, valid, gamma=run.config.gamma
    )
    watched = run.policy.watched({k: v.flatten(0, 1) for k, v in rollout.observation.items()})
    if run.progress.updates == 0:
        # The first sums are taken about these means: values far from 0 would lose their digits.
        seen = run.policy.normaliser.deltas(watched, valid.flatten()).cpu()
        mean = run.gang.council.add(seen.tolist()).wait()
        run.policy.normaliser.centre(torch.tensor(mean, dtype=torch.float64).to(run.gang.device))
    parts = [
        count_episodes(run.running, rollout.rewards, ended, valid, rollout.extras),
        advantage_sums(returns.advantages, valid),
        explained_variance_sums(rollout.values, returns.targets, valid),
        run.policy.normaliser.deltas(watched, valid.flatten()),
        run.return_scale.deltas(discounted, valid),
    ]
    flags = (stop, save, run.replica.trains_others)
    own = torch.cat([part.double().flatten() for part in parts]).cpu()
    added = run.gang.council.add([*map(float, flags), *own.tolist()]).wait()
    is_set = [value > 0 for value in added[: len(flags)]]
    all_sums = torch.tensor(added[len(flags) :], dtype=torch.float64)
    sums = torch.split(all_sums, [part.numel() for part in parts])
    # An extra that is NaN is no reason to stop; a NaN in what is learnt from is.
    is_finite = bool(torch.isfinite(torch.cat(sums[1:])).all())
    squares = squared_deviations(returns.advantages, valid, sums[1].to(valid.device))
    all_squares = run.gang.council.add([float(squares)]).wait()
    return Agreed(
        stop=is_set[0],
        save=is_set[1],
        changed=is_set[2],
        is_finite=is_finite,
        episode_sums=sums[0].tolist(),
        advantage_sums=sums[1],
        advantage_squares=torch.tensor(all_squares[0], dtype=torch.float64),
        variance_sums=sums[2],
        observation_deltas=sums[3],
        return_deltas=sums[4],
    )


def end_for_rollout(run: AgentRun, rollout: Rollout) -> NoReturn:
    """Raise NonFinite for a rollout; all ranks must call it together, and all say the same."""
    found = [each for each in run.gang.council.gather(_not_finite(run, rollout)) if each]
    if found:
        end_for_nan(run, found[0], "correct what the environment gives")
    end_for_nan(run, "A return or a value", f"{_LOWER_LR} look at what the environment returns")


def _not_finite(run: AgentRun, rollout: Rollout) -> str | None:
    """The first reward or observation of this rank that is no number, and where it was."""
    named = {f"observation {name!r}": values for name, values in rollout.observation.items()}
    for what, values in {"reward": rollout.rewards, **named}.items():
        bad = ~torch.isfinite(values.flatten(1)).view(*values.shape[:2], -1).all(-1) & rollout.valid
        if bool(bad.any()):
            step, env = bad.nonzero()[0].tolist()
            number = run.place.first_env + env
            return f"The {what} of environment {number} at step {step} of the rollout"
    return None


_LOWER_LR = "a lower --lr helps most often; then"


def end_for_nan(run: AgentRun, what: str, advice: str) -> NoReturn:
    """Raise NonFinite once the last good checkpoint is whole; all ranks must call it together.

    ``what`` is no number; ``advice``: what helps.
    """
    run.state.wait()
    run.gang.council.meet()
    raise NonFinite(
        f"{what} is no longer a number in update {run.progress.updates + 1}, after step "
        f"{run.progress.steps:,}.",
        hint=f"{advice}. The same command goes on from the last checkpoint.",
    )


def no_room_error(config: PpoConfig, device: torch.device, error: BaseException) -> MusterError:
    """The error for memory that ran out, with the settings that take it."""
    free = memory_sentence(device)
    return MusterError(
        f"Memory ran out with {config.num_envs} environments x {config.rollout_steps} steps per "
        f"rank and minibatches of {config.batch_size} sequences ({str(error).splitlines()[0]})."
        + (f" {free}." if free else ""),
        hint="a larger --grad-accum-steps or a smaller --batch-size takes less in learning; fewer "
        "--num-envs or --rollout-steps in collecting.",
    )


_ALL_USED = (
    "the policy's value or its actions have to follow from each of its parameters, in every "
    "minibatch: leave out the others, or freeze them (requires_grad_(False)) when they are made."
)

#: An update ends when the policy has moved further than this times --target-kl.
_KL_MARGIN = 1.5


class Experience(NamedTuple):
    """A rollout with what is to be learnt from it; tensors [T, N]."""

    rollout: Rollout
    advantages: Tensor
    targets: Tensor


@dataclass(kw_only=True)
class Learned:
    """Means over all valid steps of all ranks and minibatches.

    ``first_kl``, of the first minibatch, is 0 but for rounding; otherwise acting and learning have
    not computed the same. ``grad_norm``: mean over the steps that were applied.
    """

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    first_kl: float = 0.0
    clip_share: float = 0.0
    grad_norm: float = 0.0
    minibatches: int = 0
    stopped_early: bool = False


def update(run: AgentRun, experience: Experience, entropy_coef: float) -> Learned:
    """Learn from ``experience``; every rank makes the same number of steps.

    Raises NonFinite, on every rank, when a loss is no longer a number.
    """
    config, first = run.config, run.progress.updates * run.config.update_epochs
    plan = plan_sequences(experience.rollout.starts)
    sums = [0.0] * 6
    norms: list[float] = []
    learned = Learned()
    for epoch in range(config.update_epochs):
        batches = minibatch_rows(run, first + epoch)
        counts = _global_counts(run, experience, batches)
        for rows, count in zip(batches, counts, strict=True):
            if count == 0:
                continue
            BEACON.phase = "backward"
            terms = _accumulate(run, experience, plan, rows, count, entropy_coef)
            agreed = run.gang.council.add(terms).wait()
            _check_finite(run, agreed)
            kl = agreed[3] / count
            if learned.minibatches == 0:
                learned.first_kl = kl
            sums = [a + b for a, b in zip(sums, agreed, strict=True)]
            learned.minibatches += 1
            if config.target_kl is not None and kl > _KL_MARGIN * config.target_kl:
                run.optimizer.zero_grad(set_to_none=False)
                learned.stopped_early = True
                return _means(learned, sums, norms)
            BEACON.phase = "optimizer"
            norm = _step(run)
            if math.isfinite(norm):  # in fp16 a gradient that overflows is not applied
                norms.append(norm)
    return _means(learned, sums, norms)


def minibatch_rows(run: AgentRun, counter: int) -> list[Tensor]:
    """Which environments are in which minibatch, int64 [batch_size] each, in pass ``counter``.

    M consecutive environments, where M is the number of minibatches, go one into each, in an
    order that is a function of (seed, pass, number of the M). So a minibatch over all ranks holds
    the same environments whatever the number of ranks, and every rank has as many.
    """
    place, many = run.place, run.config.num_minibatches
    groups = place.first_env // many + torch.arange(place.num_envs // many)
    keys = streams.uniform(run.config.seed, streams.MINIBATCH, groups, counter, many)
    rows = keys.argsort(dim=1) + many * torch.arange(len(groups)).unsqueeze(1)
    return [column.to(place.device) for column in rows.unbind(1)]


def _global_counts(run: AgentRun, experience: Experience, batches: list[Tensor]) -> list[int]:
    """Valid steps of each minibatch, over all ranks."""
    per_env = experience.rollout.valid.sum(0)
    own = torch.stack([per_env[rows].sum() for rows in batches]).tolist()
    return [round(count) for count in run.gang.council.add([float(n) for n in own]).wait()]


def _accumulate(
    run: AgentRun,
    experience: Experience,
    plan: SequencePlan,
    rows: Tensor,
    count: int,
    entropy_coef: float,
) -> list[float]:
    """Add the gradients of minibatch ``rows`` over the ranks; returns this rank's sums of terms."""
    config, pieces = run.config, rows.chunk(run.config.grad_accum_steps)
    # DDP's buckets are the gradients; alone, nothing is cleared and then added to.
    run.optimizer.zero_grad(set_to_none=run.gang.num_ranks == 1)
    per_piece = []
    for number, piece in enumerate(pieces):
        with run.replica.synchronised(is_last=number == len(pieces) - 1):
            terms = _terms(run, experience, plan.select(piece), piece)
            loss = total(
                terms, value_coef=config.value_coef, entropy_coef=entropy_coef, count=count
            )
            if run.scaler is not None:
                loss = run.scaler.scale(loss)
            loss.backward()  # type: ignore[no-untyped-call]
        if number == len(pieces) - 1:
            run.replica.check_complete(_ALL_USED)
        per_piece.append(torch.stack([term.detach().double() for term in terms]))
    sums: list[float] = torch.stack(per_piece).sum(0).tolist()
    return sums


def _terms(run: AgentRun, experience: Experience, plan: SequencePlan, rows: Tensor) -> PpoTerms:
    config, rollout = run.config, experience.rollout
    observation = {name: value[:, rows] for name, value in rollout.observation.items()}
    state = {name: value[rows] for name, value in rollout.state.items()}
    starts, actions = rollout.starts[:, rows], rollout.actions[:, rows]
    BEACON.phase = "forward"
    with run.precision.autocast():
        output = run.replica.wrapped(observation, state, starts, plan)
    chances = distribution(run.env.spec.actions, output.parameters, observation.get(ACTION_MASK))
    return ppo_terms(
        log_probs=chances.log_prob(actions),
        old_log_probs=rollout.log_probs[:, rows],
        advantages=experience.advantages[:, rows],
        values=output.value,
        old_values=rollout.values[:, rows],
        targets=experience.targets[:, rows],
        entropies=chances.entropy(),
        valid=rollout.valid[:, rows],
        clip=config.clip,
        value_clip=config.value_clip,
    )


def _step(run: AgentRun) -> float:
    """Clip the gradient and apply it; returns its norm, which is the same on all ranks."""
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    norm = float(run.replica.clip(run.config.max_grad_norm))
    if run.scaler is not None:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    elif math.isfinite(norm):
        run.optimizer.step()
    else:
        advice = f"{_LOWER_LR} look at the policy's own functions"
        end_for_nan(run, f"The gradient, of norm {norm},", advice)
    return norm


def _check_finite(run: AgentRun, sums: list[float]) -> None:
    if all(map(math.isfinite, sums)):
        return
    names = ("policy loss", "value loss", "entropy", "divergence", "clipped", "count")
    shown = ", ".join(f"{n} {v}" for n, v in zip(names, sums, strict=True))
    end_for_nan(run, f"A loss (sums: {shown})", f"{_LOWER_LR} a lower --max-grad-norm")


def _means(learned: Learned, sums: list[float], norms: list[float]) -> Learned:
    count = sums[5] or 1.0
    learned.policy_loss, learned.value_loss = sums[0] / count, sums[1] / count
    learned.entropy, learned.kl = sums[2] / count, sums[3] / count
    learned.clip_share = sums[4] / count
    learned.grad_norm = sum(norms) / len(norms) if norms else 0.0
    return learned
