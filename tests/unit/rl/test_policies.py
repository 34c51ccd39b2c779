"""Acting step by step and learning over whole sequences are the same function."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from muster.base.errors import UsageError
from muster.rl.distributions import distribution, draw
from muster.rl.environment import ACTION_MASK, Actions, Continuous, Discrete, Entry, EnvSpec
from muster.rl.policy import ActorCritic, Policy, RecurrentPolicy, State
from muster.rl.sequences import plan_sequences

DISCRETE, CONTINUOUS = Discrete(4), Continuous((-1.0, -1.0), (1.0, 1.0))
CPU = torch.device("cpu")


def spec_of(actions: Actions = DISCRETE, width: int = 3) -> EnvSpec:
    return EnvSpec(
        name="t", num_envs=5, observation={"observation": Entry((width,))}, actions=actions
    )


def policy_of(actions: Actions = DISCRETE, seed: int = 0, **options: object) -> RecurrentPolicy:
    torch.manual_seed(seed)
    policy = RecurrentPolicy(spec_of(actions), hidden=8, **options)  # type: ignore[arg-type]
    with torch.no_grad():  # nothing at 0, so that nothing is equal by chance
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def random_state(policy: Policy, num_envs: int) -> State:
    empty = policy.initial_state(num_envs, CPU)
    return {name: 0.5 * torch.randn_like(values) for name, values in empty.items()}


def acted(
    policy: Policy, seen: Tensor, state: State, starts: Tensor
) -> tuple[Tensor, Tensor, list[State]]:
    """Parameters [T, N, .], values [T, N] and the memory after each step."""
    parameters, values, memories = [], [], []
    with torch.no_grad():
        for t in range(len(seen)):
            output, state = policy.act({"observation": seen[t]}, state, starts[t])
            parameters.append(output.parameters)
            values.append(output.value)
            memories.append(state)
    return torch.stack(parameters), torch.stack(values), memories


@examples(25)
@given(
    steps=st.integers(1, 9),
    num_envs=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    shared_core=st.booleans(),
    encoder=st.sampled_from([(), (6,)]),
    actions=st.sampled_from([DISCRETE, CONTINUOUS]),
    has_plan=st.booleans(),
    is_double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_ratio_is_one_before_the_first_update(
    steps: int,
    num_envs: int,
    share: float,
    shared_core: bool,
    encoder: tuple[int, ...],
    actions: Actions,
    has_plan: bool,
    is_double: bool,
    seed: int,
) -> None:
    policy = policy_of(actions, seed, shared_core=shared_core, encoder=encoder)
    dtype, tolerance = (torch.float64, 1e-10) if is_double else (torch.float32, 1e-5)
    policy.to(dtype)
    seen = torch.randn(steps, num_envs, 3, dtype=dtype)
    starts = torch.rand(steps, num_envs) < share
    state = random_state(policy, num_envs)
    parameters, values, _ = acted(policy, seen, state, starts)
    plan = plan_sequences(starts) if has_plan else None
    output = policy({"observation": seen}, state, starts, plan)
    index = torch.arange(num_envs).expand(steps, -1)
    random = draw(actions, seed, 1, index, torch.arange(steps).unsqueeze(1))
    chosen = distribution(actions, parameters).sample(random)
    old = distribution(actions, parameters).log_prob(chosen)
    new = distribution(actions, output.parameters).log_prob(chosen)
    assert output.value.shape == new.shape == (steps, num_envs)
    assert (new - old).abs().max() < tolerance
    assert (output.value - values).abs().max() < tolerance


def test_a_start_forgets_everything_and_nothing_else_does() -> None:
    policy = policy_of()
    seen, starts = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.bool)
    starts[3, 0] = True
    one = acted(policy, seen, random_state(policy, 2), starts)
    # Another past: before step 3 everything of environment 0 is different, the rest is the same.
    other = seen.clone()
    other[:3, 0] = torch.randn(3, 3)
    two = acted(policy, other, random_state(policy, 2), starts)
    assert torch.equal(one[0][3:, 0], two[0][3:, 0])
    assert torch.equal(one[1][3:, 0], two[1][3:, 0])
    assert not torch.isclose(one[0][2, 0], two[0][2, 0]).all()
    # Environment 1 never starts anew: its initial memory is felt to the end.
    assert not torch.equal(one[1][5, 1], two[1][5, 1])


def test_an_empty_memory_is_what_a_start_leaves() -> None:
    policy = policy_of()
    seen = torch.randn(4, 2, 3)
    starts = torch.zeros(4, 2, dtype=torch.bool)
    from_empty, *_ = acted(policy, seen, policy.initial_state(2, CPU), starts)
    starts[0] = True
    after_start, *_ = acted(policy, seen, random_state(policy, 2), starts)
    assert torch.equal(from_empty, after_start)


def test_no_gradient_crosses_a_start() -> None:
    policy = policy_of()
    seen = torch.randn(5, 2, 3, requires_grad=True)
    starts = torch.zeros(5, 2, dtype=torch.bool)
    starts[3, 0] = True
    output = policy({"observation": seen}, policy.initial_state(2, CPU), starts, None)
    (output.value[3:].sum() + output.parameters[3:].square().sum()).backward()
    assert seen.grad is not None
    assert (seen.grad[:3, 0] == 0).all()
    assert (seen.grad[:3, 1] != 0).all()


@pytest.mark.parametrize(
    ("actions", "memory", "shared_core"),
    list(product([DISCRETE, CONTINUOUS], ["lstm", "none"], [False, True])),
)
def test_gradients_reach_every_parameter(actions: Actions, memory: str, shared_core: bool) -> None:
    policy = policy_of(actions, memory=memory, shared_core=shared_core, encoder=(6,))
    starts = torch.zeros(4, 3, dtype=torch.bool)
    starts[2, 1] = True
    output = policy({"observation": torch.randn(4, 3, 3)}, random_state(policy, 3), starts, None)
    (output.value.square().sum() + output.parameters.square().sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad != 0).any(), name


def test_without_a_memory_only_the_present_counts() -> None:
    policy = policy_of(memory="none")
    assert policy.initial_state(2, CPU) == {}
    seen, starts = torch.randn(1, 2, 3).expand(4, -1, -1), torch.zeros(4, 2, dtype=torch.bool)
    parameters, values, _ = acted(policy, seen, {}, starts)
    assert (parameters == parameters[0]).all()
    assert (values == values[0]).all()


def test_the_memoryless_network_is_two_tanh_perceptrons() -> None:
    """The default network of Stable-Baselines3's PPO, written out."""
    policy = policy_of(memory="none")
    seen = torch.randn(7, 3)
    output, _ = policy.act({"observation": seen}, {}, torch.ones(7, dtype=torch.bool))

    def perceptron(net: torch.nn.Sequential) -> Tensor:
        linear = [part for part in net if isinstance(part, torch.nn.Linear)]
        assert [layer.out_features for layer in linear[:2]] == [64, 64]
        x = seen
        for layer in linear[:-1]:
            x = torch.tanh(x @ layer.weight.T + layer.bias)
        return x @ linear[-1].weight.T + linear[-1].bias

    assert torch.allclose(output.parameters, perceptron(policy.net.actor), atol=1e-6)
    assert torch.allclose(output.value, perceptron(policy.net.critic)[:, 0], atol=1e-6)


def test_actor_and_critic_have_a_memory_each_or_share_one() -> None:
    assert set(policy_of().initial_state(2, CPU)) == {"actor_h", "actor_c", "critic_h", "critic_c"}
    shared = policy_of(shared_core=True).initial_state(2, CPU)
    assert set(shared) == {"shared_h", "shared_c"}
    assert all(values.shape == (2, 8) and not values.any() for values in shared.values())


@pytest.mark.parametrize("actions", [DISCRETE, CONTINUOUS])
def test_weights_begin_orthogonal(actions: Actions) -> None:
    net = ActorCritic(5, actions, hidden=8, layers=(16, 4))
    for heads, last_gain in ((net.actor, 0.01), (net.critic, 1.0)):
        linear = [part for part in heads if isinstance(part, torch.nn.Linear)]
        for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
            assert torch.allclose(torch.linalg.svdvals(layer.weight), torch.tensor(gain), rtol=1e-4)
            assert not layer.bias.any()
    for core in net.cores.values():
        for name, parameter in core.named_parameters():
            if name.startswith("bias"):
                assert not parameter.any()
            else:
                assert torch.allclose(torch.linalg.svdvals(parameter), torch.tensor(1.0), rtol=1e-4)
    if net.log_std is not None:
        assert not net.log_std.any()


def test_the_spread_of_a_continuous_action_is_the_parameter() -> None:
    policy = policy_of(CONTINUOUS)
    output, _ = policy.act(
        {"observation": torch.randn(6, 3)},
        policy.initial_state(6, CPU),
        torch.ones(6, dtype=torch.bool),
    )
    assert policy.net.log_std is not None
    assert output.parameters.shape == (6, 4)
    assert torch.equal(output.parameters[:, 2:], policy.net.log_std.detach().expand(6, 2))


def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = (policy_of(seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_weights_and_statistics_survive_a_save() -> None:
    policy, other = policy_of(seed=1), policy_of(seed=2)
    rows = 5 + 3 * torch.randn(50, 3)
    seen = policy.watched({"observation": rows, ACTION_MASK: torch.ones(50, 4, dtype=torch.bool)})
    assert set(seen) == {"observation"}
    policy.normaliser.absorb(policy.normaliser.deltas(seen, torch.ones(50, dtype=torch.bool)))
    other.load_state_dict(policy.state_dict())
    starts, state = torch.ones(1, 50, dtype=torch.bool), policy.initial_state(50, CPU)
    one = acted(policy, rows[None], state, starts)
    two = acted(other, rows[None], state, starts)
    assert torch.equal(one[0], two[0])
    other.normaliser.enabled = False
    assert not torch.equal(one[0], acted(other, rows[None], state, starts)[0])


def test_half_precision_gives_float32_outputs_and_memories() -> None:
    policy = policy_of()
    seen, starts = torch.randn(3, 2, 3), torch.zeros(3, 2, dtype=torch.bool)
    state = policy.initial_state(2, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        output, after = policy.act({"observation": seen[0]}, state, starts[0])
        whole = policy({"observation": seen}, state, starts, None)
    for values in (*output, *whole, *after.values()):
        assert values.dtype == torch.float32


@pytest.mark.parametrize(
    "observation",
    [
        {"image": Entry((8, 8, 3), torch.uint8)},
        {"observation": Entry((2, 3))},
        {"observation": Entry((2,), torch.int64)},
        {"observation": Entry((2,)), "other": Entry((1,))},
        {},
    ],
)
def test_what_it_cannot_see_is_refused(observation: dict[str, Entry]) -> None:
    spec = EnvSpec(name="Odd-v0", num_envs=1, observation=observation, actions=DISCRETE)
    with pytest.raises(UsageError, match=r"(?s)Odd-v0 is observed as .*AgentTask\.policy"):
        RecurrentPolicy(spec)
