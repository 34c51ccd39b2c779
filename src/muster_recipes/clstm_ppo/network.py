"""The cascaded network: an LSTM reads a window of bars, an actor and a critic decide on it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from muster import UsageError
from muster.agents import (
    ActorCritic,
    EnvSpec,
    Normaliser,
    Observation,
    Policy,
    PolicyOutput,
    SequencePlan,
    State,
    bytes_to_keep,
    orthogonal_lstm,
)
from muster_recipes.clstm_ppo.market import Market

#: Activations of one call of the feature LSTM on a CPU. In calls of 55 MB a third of the time went
#: to pages that the system gave and took back; calls of 16 MiB get theirs from the heap.
_BYTES_PER_CALL = 16 << 20
#: Windows in one call elsewhere.
_WINDOWS_PER_CALL = 8192
#: Activations of more than this, or on a CPU of more than the rank's part of the memory, are
#: computed again in backward rather than kept.
_BYTES_KEPT = 2 << 30


class CascadedPolicy(Policy):
    """Features of the bars t - window + 1 .. t -> LSTM from an empty memory -> its last output,
    joined with the portfolio -> recurrent actor and critic (after Zou et al., arXiv 2212.02721).

    An observation has "bar" (int64, which bar of ``market``) and "portfolio"; the features are
    looked up here, so that rollouts keep one number per step and not a window. A window depends
    on its bar only: in training each bar of a minibatch is encoded once however often it occurs,
    and ``refresh`` encodes them all ahead where that is less than is asked for.
    """

    def __init__(self, spec: EnvSpec, market: Market, *, window: int, hidden: int) -> None:
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
        self.feature_lstm = orthogonal_lstm(num_features, hidden)
        self.net = ActorCritic(hidden + portfolio, spec.actions, hidden=hidden)
        self.register_load_state_dict_post_hook(_forget_encoded)  # type: ignore[no-untyped-call]

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
        weight = self._weight
        bars = self._bars.to(weight.device)
        kept = self._encoded
        if kept is None or (kept.device, kept.dtype) != (weight.device, weight.dtype):
            kept = self._encoded = weight.new_zeros(len(self._features), self.hidden)
        # In place: a CUDA graph reads this very memory.
        kept[bars] = self.encode(bars).to(weight.dtype)

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
        bars, where = torch.unique(observation["bar"], return_inverse=True)
        # An embedding, because its backward adds in a fixed order on every device.
        seen = F.embedding(where, self.encode(bars))
        output: PolicyOutput = self.net(self._joined(seen, observation), state, starts, plan)
        return output

    def encode(self, bars: Tensor) -> Tensor:
        """The last output of the feature LSTM for each of ``bars`` [n]: [n, hidden].

        In calls of bounded size; with gradients, very many are computed again in backward. The
        bits are the same either way.
        """
        is_cpu = bars.device.type == "cpu"
        at_once = max(1, _BYTES_PER_CALL // self._bytes_per_window) if is_cpu else _WINDOWS_PER_CALL
        parts = torch.split(bars, at_once)
        if torch.is_grad_enabled() and self._is_much(len(bars), is_cpu=is_cpu):
            encoded = [checkpoint(self._encode, part, use_reentrant=False) for part in parts]
        else:
            encoded = [self._encode(part) for part in parts]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded)

    def _encode(self, bars: Tensor) -> Tensor:
        back = torch.arange(1 - self.window, 1, device=bars.device)
        windows = self._features_on(bars)[bars + back.unsqueeze(1)]  # [window, n, features]
        normalised = self.normaliser("market", windows.to(self._weight.dtype))
        # The final state and not outputs[-1], a view that would keep all outputs in memory.
        _, (last, _) = self.feature_lstm(normalised)
        encoded: Tensor = last.squeeze(0)
        return encoded

    def _is_much(self, num_windows: int, *, is_cpu: bool) -> bool:
        most = min(_BYTES_KEPT, self._part) if is_cpu else _BYTES_KEPT
        return num_windows * self._bytes_per_window > most

    @cached_property
    def _part(self) -> int:
        """Bytes of the host's memory for this rank; asked once, before any activations are kept."""
        part = bytes_to_keep()
        return _BYTES_KEPT if part is None else part

    @property
    def _bytes_per_window(self) -> int:
        """What backward needs: per bar and unit four gates, h, c and tanh(c)."""
        return 7 * self.window * self.hidden * self._weight.element_size()

    @property
    def _weight(self) -> Tensor:
        weight = self.feature_lstm.weight_ih_l0
        assert isinstance(weight, Tensor)
        return weight

    def _joined(self, seen: Tensor, observation: Observation) -> Tensor:
        portfolio = self.normaliser("portfolio", observation["portfolio"])
        return torch.cat([seen, portfolio], dim=-1)

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
