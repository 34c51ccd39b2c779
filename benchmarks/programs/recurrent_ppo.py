"""One training with recurrent PPO, by muster or by sb3-contrib, watched from outside.

    python recurrent_ppo.py muster cartpole --steps 30720 --record FILE
    python recurrent_ppo.py sb3 market --num-envs 8 --hidden 64 --record FILE

Time is taken whenever a rollout begins, and the rate is that of whole cycles of collecting and
learning: from the second rollout's begin to the last one's. So what a trainer does between two
rollouts belongs to it, whatever it is; its start, the first cycle and the last update do not. Every
episode that has ended is kept with the step at which it did.

Both have an LSTM each for actor and critic, heads 64-64 with tanh, Adam, and the same numbers of
PPO. In the market both read the window of bars by a feature LSTM, in sb3-contrib as its features
extractor. It masks no actions: impossible ones are a hold there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muster.rl.environment import EnvSpec, Observation, Outcome, Place, Split, VectorEnv
from muster.rl.policy import Policy
from muster.rl.task import AgentTask
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.exchange import Exchange
from muster_recipes.clstm_ppo.load import load_market
from muster_recipes.clstm_ppo.market import Market
from muster_recipes.clstm_ppo.network import CascadedPolicy
from muster_recipes.clstm_ppo.options_env import OptionsEnv
from muster_recipes.clstm_ppo.task import ClstmPpoTask

LAYERS = (64, 64)


class Marks:
    """When rollouts began: the time, and the CPU time so far of all threads."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []

    def note(self) -> None:
        self._times.append((time.perf_counter(), time.process_time()))

    def rates(self, steps_per_rollout: int) -> dict[str, float]:
        if len(self._times) < 3:
            raise SystemExit(f"{len(self._times)} rollouts are too few: give more --steps")
        (first, first_cpu), (last, last_cpu) = self._times[1], self._times[-1]
        steps = (len(self._times) - 2) * steps_per_rollout
        return {
            "steps_per_s": steps / (last - first),
            "cpu_us_per_step": 1e6 * (last_cpu - first_cpu) / steps,
        }


# ---------------------------------------------------------------------- muster


class WatchedEnv:
    """The same environments; notes when a rollout begins, and keeps what they gave."""

    def __init__(self, env: VectorEnv, rollout_steps: int) -> None:
        self._env = env
        self._rollout_steps = rollout_steps
        self.marks = Marks()
        self._steps = 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self) -> Observation:
        return self._env.reset()

    def step(self, actions: Tensor) -> Outcome:
        if self._steps % self._rollout_steps == 0:
            self.marks.note()
        self._steps += 1
        outcome = self._env.step(actions)
        self._kept.append((outcome.reward, outcome.terminated | outcome.truncated))
        return outcome

    def state(self) -> dict[str, Tensor]:
        return self._env.state()

    def restore(self, state: Mapping[str, Tensor]) -> Observation | None:
        return self._env.restore(state)

    def close(self) -> None:
        self._env.close()

    def episodes(self) -> list[tuple[int, float]]:
        rewards, ended = (torch.stack(parts).cpu() for parts in zip(*self._kept, strict=True))
        found = []
        total = torch.zeros(rewards.shape[1], dtype=torch.float64)
        for t in range(len(rewards)):
            total += rewards[t]
            step = (t + 1) * rewards.shape[1]
            found += [(step, value) for value in total[ended[t]].tolist()]
            total[ended[t]] = 0.0
        return found


class WatchedTask(AgentTask):
    """A task without its final evaluation, whose training environments are watched."""

    def __init__(self, task: AgentTask, policy: Callable[[EnvSpec], Policy], rollout: int) -> None:
        self._task = task
        self._make_policy = policy
        self._rollout_steps = rollout
        self.watched: WatchedEnv

    def environments(self, split: Split, place: Place) -> VectorEnv:
        env = self._task.environments(split, place)
        if split != "train":
            return env
        self.watched = WatchedEnv(env, self._rollout_steps)
        return self.watched

    def policy(self, spec: EnvSpec) -> Policy:
        return self._make_policy(spec)


class CountedPolicy(CascadedPolicy):
    """Counts the windows that its feature LSTM reads; forward and backward are three forwards."""

    windows = 0

    def encode(self, bars: Tensor) -> Tensor:
        self.windows += len(bars) * (3 if torch.is_grad_enabled() else 1)
        return super().encode(bars)


def with_muster(args: Any) -> dict[str, Any]:
    from muster.rl.config import PpoConfig
    from muster.rl.loop import train_agent
    from muster.rl.policy import RecurrentPolicy
    from muster.run.folder import RunFolder
    from muster_recipes.ppo.config import PpoRecipeConfig
    from muster_recipes.ppo.task import PpoTask

    policies: list[Policy] = []

    def cartpole_policy(spec: EnvSpec) -> Policy:
        policies.append(RecurrentPolicy(spec, hidden=args.hidden, layers=LAYERS))
        return policies[-1]

    def market_policy(spec: EnvSpec) -> Policy:
        policies.append(CountedPolicy(spec, market(args), window=args.window, hidden=args.hidden))
        return policies[-1]

    is_market = args.workload == "market"
    inner = ClstmPpoTask(market_config(args)) if is_market else PpoTask(PpoRecipeConfig())
    task = WatchedTask(inner, market_policy if is_market else cartpole_policy, args.rollout_steps)
    config = PpoConfig(
        num_envs=args.num_envs,
        rollout_steps=args.rollout_steps,
        batch_size=args.batch_size,
        update_epochs=args.epochs,
        num_steps=args.steps,
        entropy_coef=args.entropy_coef,
        normalize_observations=is_market,
        normalize_rewards=is_market,
        precision=args.precision,
        compile=args.compile,
        eval_frequency=0,
        eval_episodes=1,
        seed=args.seed,
        tensorboard=False,
    )
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        results = train_agent(
            task, config, RunFolder(Path(folder)), None, lambda _: None, checkpoint_s=None
        )
    assert results is not None
    measured, watched = results["measured"], task.watched
    steps = results["steps"]
    return {
        **watched.marks.rates(args.num_envs * args.rollout_steps),
        "shares": {name: measured[f"{name}_share"] for name in ("acting", "stepping", "learning")},
        "episodes": watched.episodes(),
        "flops_per_step": flops(policies[-1], args, steps),
        "device": torch.cuda.get_device_name() if results["device"] == "cuda" else "cpu",
    }


def flops(policy: Policy, args: Any, steps: int) -> float:
    """Operations of the products of matrices per step: acting once, learning three times (forward
    and backward) in every epoch. What is kept rather than computed again does not count."""

    def per_row(module: nn.Module) -> int:
        return 2 * sum(p.numel() for p in module.parameters() if p.dim() == 2)

    net = policy.net
    assert isinstance(net, nn.Module)
    total = float(per_row(net) * (1 + 3 * args.epochs))
    if isinstance(policy, CountedPolicy):
        total += per_row(policy.feature_lstm) * args.window * policy.windows / steps
    return total


# ---------------------------------------------------------------------- sb3-contrib


def with_sb3(args: Any) -> dict[str, Any]:
    import gymnasium
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.marks = Marks()
            self.episodes: list[tuple[int, float]] = []

        def _on_rollout_start(self) -> None:
            self.marks.note()

        def _on_step(self) -> bool:
            told = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            self.episodes += [(self.num_timesteps, float(value)) for value in told]
            return True

    network: dict[str, Any] = {"net_arch": {"pi": LAYERS, "vf": LAYERS}}
    network["lstm_hidden_size"] = args.hidden
    if args.workload == "market":
        make = market_face(args)
        network["features_extractor_class"] = extractor(args)
    else:
        make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
    envs = DummyVecEnv([lambda: Monitor(make()) for _ in range(args.num_envs)])
    model = RecurrentPPO(
        "MlpLstmPolicy",
        envs,
        n_steps=args.rollout_steps,
        batch_size=args.rollout_steps * args.batch_size,
        n_epochs=args.epochs,
        ent_coef=args.entropy_coef,
        policy_kwargs=network,
        seed=args.seed,
        device=args.device,
    )
    watch = Watch()
    model.learn(args.steps, callback=watch)
    return {
        **watch.marks.rates(args.num_envs * args.rollout_steps),
        "episodes": watch.episodes,
    }


def market_face(args: Any) -> Callable[[], Any]:
    """Makes the options market as a Gymnasium environment, without any wrapper."""
    from muster.rl.gymnasium_envs import EnvFace

    bars, config = market(args), market_config(args)
    shared = Exchange.of(bars, config, torch.device("cpu"))
    return lambda: EnvFace(lambda place: OptionsEnv(bars, "train", config, place, shared))


def extractor(args: Any) -> type[nn.Module]:
    """The feature LSTM over the window that ends at the observed bar, beside the portfolio."""
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    features = market(args).features
    scaled = (features - features.mean(0)) / features.std(0).clamp(min=1e-6)

    class Cascade(BaseFeaturesExtractor):
        def __init__(self, observation_space: Any) -> None:
            super().__init__(observation_space, args.hidden + observation_space.shape[0] - 1)
            self.lstm = nn.LSTM(scaled.shape[1], args.hidden)
            self.register_buffer("scaled", scaled.float(), persistent=False)
            self.register_buffer("back", torch.arange(1 - args.window, 1), persistent=False)

        def forward(self, observations: Tensor) -> Tensor:
            bars = observations[:, 0].long()
            outputs, _ = self.lstm(self.scaled[bars + self.back.unsqueeze(1)])
            return torch.cat([outputs[-1], observations[:, 1:]], dim=1)

    return Cascade


# ---------------------------------------------------------------------- the same for both


def market_config(args: Any) -> ClstmPpoConfig:
    return ClstmPpoConfig(window=args.window, hidden=args.hidden, action_space=args.action_space)


def market(args: Any) -> Market:
    return load_market(market_config(args), lambda _: None)


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=["muster", "sb3"])
    parser.add_argument("workload", choices=["cartpole", "market"])
    parser.add_argument("--steps", type=int, default=30_720)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1, help="sequences")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--window", type=int, default=30)
    parser.add_argument("--action-space", default="31")
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    found = with_muster(args) if args.trainer == "muster" else with_sb3(args)
    args.record.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
