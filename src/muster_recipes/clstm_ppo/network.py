"""The cascaded network: an LSTM reads a window of bars, an actor and a critic decide on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from muster import UsageError
from muster.rl.actor_critic import ActorCritic, at_least_float32, lstm
from muster.rl.environment import EnvSpec, Observation
from muster.rl.policy import Policy, PolicyOutput, State
from muster.rl.sequences import SequencePlan
from muster.rl.statistics import Normaliser
from muster_recipes.clstm_ppo.market import Market

#: Windows in one call of the feature LSTM. At 30 bars and 256 units about 2 GiB for its backward.
_WINDOWS_PER_CALL = 8192


class CascadedPolicy(Policy):
    """Features of the bars t - window + 1 .. t -> LSTM from an empty memory -> its last output,
    joined with the portfolio -> recurrent actor and critic (after Zou et al., arXiv 2212.02721).

    An observation has "bar" (int64, which bar of ``market``) and "portfolio"; the features are
    looked up here, so that rollouts keep one number per step and not a window. A window depends
    on its bar only: in training each bar of a minibatch is encoded once however often it occurs,
    and ``refresh`` encodes them all ahead where that is less than is asked for.
    """

    def __init__(
        self,
        spec: EnvSpec,
        market: Market,
        *,
        window: int,
        hidden: int,
        layers: tuple[int, ...] = (64, 64),
    ) -> None:
        """Raises UsageError where a window would reach before the first bar of a symbol."""
        super().__init__()
        self.window, self.hidden = window, hidden
        # No buffers: they are the data, not the model; nothing saves or broadcasts them.
        self._features = market.features
        self._bars = _bars_with_window(market, window)
        self._encoded: Tensor | None = None
        self._is_encoded = False

        (portfolio,) = spec.observation["portfolio"].shape
        num_features = market.features.shape[1]
        self.normaliser = Normaliser({"portfolio": (portfolio,), "market": (num_features,)})
        self.feature_lstm = lstm(num_features, hidden)
        self.net = ActorCritic(hidden + portfolio, spec.actions, hidden=hidden, layers=layers)
        self.register_load_state_dict_post_hook(_forget_encoded)

    def initial_state(self, num_envs: int, device: torch.device) -> State:
        return self.net.initial_state(num_envs, device)

    def watched(self, observation: Observation) -> dict[str, Tensor]:
        bar = observation["bar"]
        return {"portfolio": observation["portfolio"], "market": self._features_on(bar)[bar]}

    @torch.no_grad()
    def refresh(self, num_envs: int, num_steps: int) -> None:
        self._is_encoded = num_envs * num_steps >= len(self._bars)
        if not self._is_encoded:
            return
        bars = self._bars.to(self.feature_lstm.weight_ih_l0.device)
        encoded = self.encode(bars)
        if self._encoded is None or self._encoded.device != encoded.device:
            self._encoded = encoded.new_zeros(len(self._features), self.hidden)
        self._encoded[bars] = encoded.to(self._encoded.dtype)  # in place: a CUDA graph sees it

    def act(
        self, observation: Observation, state: State, starts: Tensor
    ) -> tuple[PolicyOutput, State]:
        bar = observation["bar"]
        if self._is_encoded and self._encoded is not None:
            seen = self._encoded[bar]
        else:
            seen = self.encode(bar)
        return self.net.act(self._joined(seen, observation), state, starts)

    def forward(
        self, observation: Observation, state: State, starts: Tensor, plan: SequencePlan | None
    ) -> PolicyOutput:
        bars, where = observation["bar"].unique(return_inverse=True)
        # An embedding, because its backward adds in a fixed order on every device.
        seen = F.embedding(where, self.encode(bars))
        output: PolicyOutput = self.net(self._joined(seen, observation), state, starts, plan)
        return output

    def encode(self, bars: Tensor) -> Tensor:
        """The last output of the feature LSTM for each of ``bars`` [n]: [n, hidden].

        With gradients, more than one call's windows are computed again in backward rather than
        kept.
        """
        parts = bars.split(_WINDOWS_PER_CALL)
        if len(parts) == 1:
            return self._encode(bars)
        if not torch.is_grad_enabled():
            return torch.cat([self._encode(part) for part in parts])
        return torch.cat([checkpoint(self._encode, part, use_reentrant=False) for part in parts])

    def _encode(self, bars: Tensor) -> Tensor:
        back = torch.arange(1 - self.window, 1, device=bars.device)
        windows = self._features_on(bars)[bars + back.unsqueeze(1)]  # [window, n, features]
        dtype = self.feature_lstm.weight_ih_l0.dtype
        outputs, _ = self.feature_lstm(self.normaliser("market", windows.to(dtype)))
        return at_least_float32(outputs[-1])

    def _joined(self, seen: Tensor, observation: Observation) -> Tensor:
        portfolio = self.normaliser("portfolio", observation["portfolio"])
        return torch.cat([seen, portfolio.to(seen.dtype)], dim=-1)

    def _features_on(self, like: Tensor) -> Tensor:
        if self._features.device != like.device:
            self._features = self._features.to(like.device)
        return self._features


def _forget_encoded(policy: nn.Module, _: object) -> None:
    assert isinstance(policy, CascadedPolicy)
    policy._is_encoded = False


def _bars_with_window(market: Market, window: int) -> Tensor:
    """Bars whose whole window lies in their symbol, int64 [.]. Checks that every start is one."""
    last = torch.arange(window - 1, len(market.symbol), device=market.symbol.device)
    bars = last[market.symbol[last] == market.symbol[last - window + 1]]
    for split, starts in market.starts.items():
        lone = starts[~torch.isin(starts, bars)]
        if len(lone):
            raise UsageError(
                f"{len(lone)} episodes of the {split} split of {market.source} begin too early for "
                f"a window of {window} bars, the first at bar {int(lone[0])}.",
                hint="load the market with the same --window as the policy.",
            )
    return bars
