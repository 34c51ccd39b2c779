"""What the ranks agree on after a rollout: one sum, before a rank acts on what it alone knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muster.rl.losses import (
    Returns,
    advantage_sums,
    discounted_running,
    explained_variance_sums,
    squared_deviations,
)
from muster.rl.progress import count_episodes
from muster.rl.rollout import Rollout
from muster.rl.setup import AgentRun


class Agreed(NamedTuple):
    """Sums over all ranks, on the CPU.

    Attributes
        episode_sums: see ``progress.count_episodes``.
        advantage_sums: count and sum of the advantages; ``advantage_squares``: about their mean.
        variance_sums: of values and targets, for the explained variance.
        observation_deltas, return_deltas: for the running statistics.
    """

    stop: bool
    save: bool
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
    own = torch.cat([part.double().flatten() for part in parts]).cpu()
    total = torch.tensor(
        run.gang.council.add([float(stop), float(save), *own.tolist()]).wait(),
        dtype=torch.float64,
    )
    sums = torch.split(total[2:], [part.numel() for part in parts])
    # An extra that is NaN is no reason to stop; a NaN in what is learnt from is.
    is_finite = bool(torch.isfinite(torch.cat(sums[1:])).all())
    squares = squared_deviations(returns.advantages, valid, sums[1].to(valid.device))
    return Agreed(
        stop=bool(total[0] > 0),
        save=bool(total[1] > 0),
        is_finite=is_finite,
        episode_sums=sums[0].tolist(),
        advantage_sums=sums[1],
        advantage_squares=torch.tensor(run.gang.council.add([float(squares)]).wait()).double()[0],
        variance_sums=sums[2],
        observation_deltas=sums[3],
        return_deltas=sums[4],
    )
