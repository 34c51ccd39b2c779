"""The cascade: every bar encoded once, equal to encoding every sample from its own window."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster import UsageError
from muster.rl.distributions import distribution, draw
from muster.rl.environment import ACTION_MASK, Discrete, Entry, EnvSpec, Observation
from muster_recipes.clstm_ppo import network
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.network import CascadedPolicy

CPU = torch.device("cpu")
BARS, FEATURES, WINDOW, PORTFOLIO, ACTIONS = 20, 3, 4, 5, 6
SPEC = EnvSpec(
    name="options",
    num_envs=1,
    observation={
        "bar": Entry((), torch.int64),
        "portfolio": Entry((PORTFOLIO,)),
        ACTION_MASK: Entry((ACTIONS,), torch.bool),
    },
    actions=Discrete(ACTIONS),
)


def market_of(starts: tuple[int, ...] = (3, 5, 23, 30)) -> Market:
    """Two symbols of 20 bars each."""
    generator = torch.Generator().manual_seed(5)
    ones = torch.ones(2 * BARS, dtype=torch.float64)
    return Market(
        source="simulated",
        symbols=("A", "B"),
        symbol=torch.arange(2).repeat_interleave(BARS),
        time=torch.arange(BARS).repeat(2) * 86_400,
        open=ones,
        high=ones,
        low=ones,
        close=ones,
        volume=ones,
        volatility=0.2 * ones,
        features=3 + 2 * torch.randn(2 * BARS, FEATURES, generator=generator),
        feature_names=("a", "b", "c"),
        bars_per_year=252,
        starts={"train": torch.tensor(starts)},
        truth={},
    )


def policy_of(seed: int = 0, *, window: int = WINDOW, is_double: bool = False) -> CascadedPolicy:
    torch.manual_seed(seed)
    policy = CascadedPolicy(SPEC, market_of(), window=window, hidden=7)
    seen = policy.watched({"bar": torch.arange(40), "portfolio": torch.randn(40, PORTFOLIO)})
    policy.normaliser.absorb(policy.normaliser.deltas(seen, torch.ones(40, dtype=torch.bool)))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy.double() if is_double else policy


def sequences(steps: int, num_envs: int, dtype: torch.dtype = torch.float32) -> Observation:
    """Environments that walk along bars which have a whole window, some of them the same ones."""
    first = torch.tensor([3, 4, 23, 23, 27])[torch.randint(0, 5, (num_envs,))]
    mask = torch.rand(steps, num_envs, ACTIONS) < 0.7
    mask[..., 0] = True
    return {
        "bar": first + torch.arange(steps).unsqueeze(1) % 10,
        "portfolio": torch.randn(steps, num_envs, PORTFOLIO, dtype=dtype),
        ACTION_MASK: mask,
    }


def encoded_slowly(policy: CascadedPolicy, bar: int) -> Tensor:
    """One window, step by step, from the equations of an LSTM (Hochreiter and Schmidhuber 1997)."""
    core = policy.feature_lstm
    h = c = torch.zeros(7, dtype=core.weight_ih_l0.dtype)
    for b in range(bar - policy.window + 1, bar + 1):
        raw = market_of().features[b].to(h.dtype)
        x = policy.normaliser("market", raw)
        gates = core.weight_ih_l0 @ x + core.bias_ih_l0 + core.weight_hh_l0 @ h + core.bias_hh_l0
        i, f, g, o = gates.split(7)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_is_read_from_an_empty_memory(window: int) -> None:
    policy = policy_of(window=window, is_double=True)
    bars = torch.tensor([3, 3, 7, 19, 23, 39])
    expected = torch.stack([encoded_slowly(policy, int(bar)) for bar in bars])
    assert torch.allclose(policy.encode(bars), expected, atol=1e-12)


def test_a_bar_encoded_once_has_the_gradient_of_encoding_every_sample() -> None:
    policy = policy_of(is_double=True)
    slow = copy.deepcopy(policy)
    observation = sequences(6, 5, torch.float64)
    starts = torch.rand(6, 5) < 0.3
    state = policy.initial_state(5, CPU)
    weight = torch.randn(6, 5, ACTIONS, dtype=torch.float64)

    output = policy(observation, state, starts, None)
    (output.value.square().sum() + (output.parameters * weight).sum()).backward()

    each = [encoded_slowly(slow, int(bar)) for bar in observation["bar"].flatten()]
    seen = torch.stack(each).view(6, 5, 7)
    portfolio = slow.normaliser("portfolio", observation["portfolio"])
    expected = slow.net(torch.cat([seen, portfolio], -1), state, starts, None)
    (expected.value.square().sum() + (expected.parameters * weight).sum()).backward()

    assert torch.allclose(output.value, expected.value, atol=1e-12)
    for (name, one), two in zip(policy.named_parameters(), slow.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, atol=1e-10), name
        assert (one.grad != 0).any(), name


@examples(15)
@given(
    steps=st.integers(1, 9),
    num_envs=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    is_refreshed=st.booleans(),
    is_double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_ratio_is_one_before_the_first_update(
    steps: int, num_envs: int, share: float, is_refreshed: bool, is_double: bool, seed: int
) -> None:
    policy = policy_of(seed, is_double=is_double)
    dtype, tolerance = (torch.float64, 1e-10) if is_double else (torch.float32, 1e-5)
    observation = sequences(steps, num_envs, dtype)
    starts = torch.rand(steps, num_envs) < share
    empty = policy.initial_state(num_envs, CPU)
    state = before = {name: torch.randn_like(values) for name, values in empty.items()}
    policy.refresh(num_envs, 1000 if is_refreshed else 0)
    parameters, values = [], []
    with torch.no_grad():
        for t in range(steps):
            now = {name: entry[t] for name, entry in observation.items()}
            output, state = policy.act(now, state, starts[t])
            parameters.append(output.parameters)
            values.append(output.value)
    whole = policy(observation, before, starts, None)
    index = torch.arange(num_envs).expand(steps, -1)
    random = draw(SPEC.actions, seed, 1, index, torch.arange(steps).unsqueeze(1))
    mask = observation[ACTION_MASK]
    old = distribution(SPEC.actions, torch.stack(parameters), mask)
    chosen = old.sample(random)
    new = distribution(SPEC.actions, whole.parameters, mask)
    assert mask.gather(-1, chosen.unsqueeze(-1)).all()
    assert (new.log_prob(chosen) - old.log_prob(chosen)).abs().max() < tolerance
    assert (whole.value - torch.stack(values)).abs().max() < tolerance


def test_refreshing_encodes_ahead_only_where_that_is_less_work() -> None:
    policy = policy_of()
    calls: list[int] = []
    encode = policy.encode

    def counted(bars: Tensor) -> Tensor:
        calls.append(len(bars))
        return encode(bars)

    policy.encode = counted  # type: ignore[method-assign]
    whole = 2 * (BARS - WINDOW + 1)
    now = {name: entry[0] for name, entry in sequences(1, 3).items()}
    starts = torch.ones(3, dtype=torch.bool)
    state = policy.initial_state(3, CPU)

    policy.refresh(3, whole // 3 - 1)
    one, _ = policy.act(now, state, starts)
    assert calls == [3]
    policy.refresh(3, whole // 3 + 1)
    two, _ = policy.act(now, state, starts)
    assert calls == [3, whole]
    assert torch.allclose(one.parameters, two.parameters, atol=1e-6)
    policy.refresh(1, 1)
    policy.act(now, state, starts)
    assert calls == [3, whole, 3]


def test_what_was_encoded_ahead_follows_the_weights() -> None:
    policy, other = policy_of(1), policy_of(2)
    now = {name: entry[0] for name, entry in sequences(1, 3).items()}
    starts, state = torch.ones(3, dtype=torch.bool), policy.initial_state(3, CPU)
    policy.refresh(3, 1000)
    policy.load_state_dict(other.state_dict())  # forgets
    expected, _ = other.act(now, state, starts)
    found, _ = policy.act(now, state, starts)
    assert torch.allclose(found.parameters, expected.parameters, atol=1e-6)
    policy.refresh(3, 1000)
    with torch.no_grad():
        for parameter in policy.feature_lstm.parameters():
            parameter.mul_(2.0)
    policy.refresh(3, 1000)
    ahead, _ = policy.act(now, state, starts)
    policy.refresh(1, 1)
    anew, _ = policy.act(now, state, starts)
    assert torch.allclose(ahead.parameters, anew.parameters, atol=1e-6)


@pytest.mark.parametrize(("at_once", "kept"), [(5, 1000), (5, 6), (1000, 6)])
def test_many_windows_go_in_calls_of_bounded_size(
    at_once: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(is_double=True)
    bars = torch.arange(3, 20)
    core = policy.feature_lstm
    sizes: list[int] = []
    core.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))

    def encoded() -> tuple[Tensor, Tensor]:
        policy.zero_grad()
        found = policy.encode(bars)
        found.square().sum().backward()
        assert core.weight_hh_l0.grad is not None
        return found.detach(), core.weight_hh_l0.grad.clone()

    expected = encoded()
    assert sizes == [17]
    sizes.clear()
    each = 7 * WINDOW * 7 * 8  # gates, h, c and tanh(c) of 7 units, in float64
    monkeypatch.setattr(network, "_BYTES_PER_CALL", at_once * each)
    monkeypatch.setattr(network, "_BYTES_KEPT", kept * each)
    for one, two in zip(encoded(), expected, strict=True):
        assert torch.allclose(one, two, atol=1e-12)
    calls = 4 if at_once == 5 else 1
    # Twice as often where backward computes them again.
    assert len(sizes) == (calls if kept > 17 else 2 * calls)
    assert max(sizes) <= at_once
    with torch.no_grad():
        assert torch.allclose(policy.encode(bars), expected[0], atol=1e-12)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_what_a_small_host_computes_again_has_the_same_bits(is_bf16: bool) -> None:
    policy = policy_of()
    bars = torch.arange(3, 20)
    core = policy.feature_lstm
    sizes: list[int] = []
    core.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))

    def encoded() -> list[Tensor]:
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            found = policy.encode(bars)
        found.float().square().sum().backward()
        return [found.detach(), *(p.grad.clone() for p in core.parameters() if p.grad is not None)]

    kept = encoded()
    assert sizes == [17]
    assert len(kept) == 5
    policy._part = 16 * 7 * WINDOW * 7 * 4  # room for 16 windows in float32
    again = encoded()
    assert sizes == [17] * 3
    for one, two in zip(again, kept, strict=True):
        assert torch.equal(one, two)


def test_a_window_that_reaches_into_another_symbol_is_refused() -> None:
    for starts in ((2,), (3, 22)):  # before the first bar; into symbol A
        with pytest.raises(UsageError, match=rf"(?s)1 episodes of the train .*bar {starts[-1]}\."):
            CascadedPolicy(SPEC, market_of(starts), window=WINDOW, hidden=7)


def test_statistics_are_kept_of_the_portfolio_and_of_the_bars_seen() -> None:
    policy = policy_of()
    bars = torch.tensor([4, 4, 30])
    seen = policy.watched({"bar": bars, "portfolio": torch.zeros(3, PORTFOLIO)})
    assert set(seen) == {"portfolio", "market"}
    assert torch.equal(seen["market"], market_of().features[bars])


def test_no_later_bar_and_no_other_symbol_is_seen() -> None:
    policy = policy_of()
    before = policy.encode(torch.tensor([10, 30]))
    features = market_of().features.clone()
    keep = torch.zeros(40, dtype=torch.bool)
    keep[7:11] = True
    keep[27:31] = True
    features[~keep] = 1e6
    policy._features = features
    assert torch.equal(policy.encode(torch.tensor([10, 30])), before)


def test_the_market_is_not_part_of_the_model() -> None:
    policy = policy_of()
    policy.refresh(3, 1000)
    shapes = {tuple(values.shape) for values in policy.state_dict().values()}
    assert (2 * BARS, FEATURES) not in shapes and (2 * BARS, 7) not in shapes
    assert all(len(buffer.shape) == 0 or len(buffer) < 2 * BARS for buffer in policy.buffers())


def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = (policy_of(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_market_without_the_split_is_no_matter() -> None:
    market = dataclasses.replace(market_of(), starts={"test": torch.tensor([], dtype=torch.int64)})
    CascadedPolicy(SPEC, market, window=WINDOW, hidden=7)
