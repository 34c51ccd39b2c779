"""The figure: the portfolios of all players over time, and their returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muster import plotting
from muster.agents import Episodes, interval
from muster_recipes.clstm_ppo.clusters import Clusters, cluster_means, clustered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAYERS = {
    "agent": ("agent, likeliest action", plotting.BLUE, "-"),
    "agent_sampled": ("agent, sampled actions", plotting.SKY, "--"),
    "hold": ("hold (no trades)", plotting.BLACK, ":"),
    "buy_and_hold": ("calls at the money, rolled", plotting.GREEN, "-"),
    "buy_stock": ("the stock itself, no costs", plotting.YELLOW, "-"),
    "always_sell": ("puts at the money, rolled", plotting.ORANGE, "-"),
    "random": ("random legal actions", plotting.PINK, "-"),
}


def draw(
    played: Mapping[str, Episodes], clusters: Clusters, title: str, notes: str, path: Path
) -> None:
    """Write the figure as a PNG to ``path``, with ``notes`` below it.

    On the left it shows the mean value of the portfolio by bar with a band of its 95 % interval, on
    the right every episode's return and the mean with its interval, both over ``clusters``.
    """
    figure, (left, right) = plotting.panels(1, 2, (12, 5), width_ratios=(3, 2))
    _curves(left, played, clusters)
    _returns(right, played, clusters)
    figure.supxlabel(notes, x=0.01, ha="left", fontsize=8, color="#444444")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    plotting.save(figure, path)


def curves(episodes: Episodes) -> Tensor:
    """Portfolio value / initial capital, [steps + 1, num_episodes]; flat after an early end."""
    start = torch.zeros(1, len(episodes.index), dtype=torch.float64)
    return 1 + torch.cat([start, episodes.rewards]).cumsum(0)


def _curves(axis: Axes, played: Mapping[str, Episodes], clusters: Clusters) -> None:
    for name, episodes in played.items():
        label, colour, style = _PLAYERS[name]
        changes = cluster_means(100 * (curves(episodes) - 1), clusters)
        means = [interval(row) for row in changes]
        bars = range(len(means))
        is_agent = name == "agent"
        axis.plot(bars, [mean.middle for mean in means], style, color=colour, label=label,
                  linewidth=2.2 if is_agent else 1.3, zorder=4 if is_agent else 3)  # fmt: skip
        if means[0].num > 1:
            ends = [mean.low for mean in means], [mean.high for mean in means]
            axis.fill_between(bars, *ends, color=colour, alpha=0.13, linewidth=0)
    known = f"95 % interval over {clusters.num} clusters"
    if clusters.num < 2:
        known = "unknown interval (one cluster)"
    axis.margins(x=0)
    plotting.dress(
        axis,
        title=f"mean and its {known}",
        x="bars since the start of the episode",
        y="change of the portfolio's value, %",
    )
    plotting.legend(axis, loc="best")


def _returns(axis: Axes, played: Mapping[str, Episodes], clusters: Clusters) -> None:
    for row, (name, episodes) in enumerate(played.items()):
        _, colour, _ = _PLAYERS[name]
        returns = 100 * episodes.returns
        # Dots of one row are spread a little, always in the same way.
        spread = row + 0.12 + 0.22 * torch.linspace(0, 1, len(returns)).mul(7.0).frac()
        axis.scatter(returns, spread, s=7, color=colour, alpha=0.35, linewidths=0)
        mean = clustered(returns, clusters)
        if mean.num > 1:
            axis.plot([mean.low, mean.high], [row - 0.08] * 2, color=colour, linewidth=2.2)
        axis.plot([mean.middle], [row - 0.08], "o", color=colour, markersize=5)
        axis.text(1, row - 0.2, f"{mean.middle:+.1f} %", ha="right", fontsize=8,
                  transform=axis.get_yaxis_transform())  # fmt: skip
    axis.set_yticks(range(len(played)), [_PLAYERS[name][0] for name in played])
    axis.set_ylim(len(played) - 0.5, -0.6)
    axis.axvline(0, color="#888888", linewidth=0.8, zorder=0)
    known = ", mean, 95 % interval" if clusters.num > 1 else ", mean"
    plotting.dress(axis, title=f"each episode (dots){known}", x="return of an episode, %")
