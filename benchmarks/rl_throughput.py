"""Environment steps per second of recurrent PPO beside sb3-contrib, and of environments alone.

    python benchmarks/rl_throughput.py                            # muster alone
    python benchmarks/rl_throughput.py --peers /path/to/python    # where sb3-contrib is; an hour
    python benchmarks/rl_throughput.py --quick                    # a few seconds, one seed

CartPole-v1: 8 environments, an LSTM of 256 each for actor and critic, heads 64-64, rollouts of 128
steps, minibatches of 128, 10 epochs, learning rate 3e-4: sb3-contrib's defaults. Every seed is one
training by each, one after the other; the rate, and the returns that were had in training: over
the last quarter of the steps, and the area under the learning curve at equal steps.

Options market: sb3-contrib steps 8 environments through their Gymnasium face; muster the same 8 as
a batch, then many, in --market-minibatches per epoch. The same network and epochs.

Environments alone: random actions, no policy. Gymnasium's sync vector of 8 is the floor of whoever
steps CartPole one by one. With a GPU the market is also trained there, with the share of its peak.

Goals: 4 times sb3-contrib on CartPole at equal return, 20 times on the market.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).parent))
import torch

import muster
from measuring import goal, machine, summary, table, write_json
from muster.devices.cards import Precision
from muster.rank.meter import peak_flops
from muster.rl.environment import Discrete, Place, VectorEnv

PROGRAM = Path(__file__).parent / "programs" / "recurrent_ppo.py"
PEER, OURS = "sb3-contrib", "muster"
GOAL_CARTPOLE, GOAL_MARKET = 6.0, 20.0
INSTALL = "pip install 'muster-gpu[bench]', or name an interpreter that has it by --peers"
_NUM_BINS = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contender: who trains what, with which flags of the program."""

    name: str
    trainer: str
    workload: str
    flags: dict[str, Any]


def train(case: Case, seed: int, peers: str) -> dict[str, Any]:
    """One training in a process of its own; what ``programs/recurrent_ppo.py`` records."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        record = Path(folder) / "record.json"
        flags = [f"--{name}={value}" for name, value in case.flags.items()]
        is_peer = case.trainer == "sb3"
        # The peer steps our market too: its interpreter has to find this package.
        own = {"PYTHONPATH": str(Path(next(iter(muster.__path__))).parent)} if is_peer else {}
        if case.flags.get("device") != "cuda":
            own["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [
                *(peers if is_peer else sys.executable, str(PROGRAM), case.trainer),
                *(case.workload, *flags, f"--seed={seed}", f"--record={record}"),
            ],
            cwd=folder,
            env={**os.environ, **own, "OMP_NUM_THREADS": str(case.flags["threads"])},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{case.name} failed:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(record.read_text())
    print(
        f"  seed {seed}: {case.workload}: {case.name}: {found['steps_per_s']:,.0f} steps/s, "
        f"CPU {found['cpu_us_per_step']:,.0f} µs per step",
        file=sys.stderr,
    )
    return found


def run_cases(cases: list[Case], seeds: int, peers: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for seed in range(seeds):
        # Every other round backwards: whoever always comes after a certain other is not favoured.
        for case in cases if seed % 2 == 0 else cases[::-1]:
            found[case.name].append(train(case, seed, peers))
    return found


def peer_version(python: str) -> str | None:
    """Nothing of it is imported here."""
    program = "import importlib.metadata as m; print(m.version('sb3-contrib'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


# ---------------------------------------------------------------------- returns


def late_return(episodes: list[tuple[int, float]], steps: int) -> float:
    """Mean return of the episodes that ended in the last quarter of the steps."""
    late = [value for step, value in episodes if step > 0.75 * steps]
    return statistics.fmean(late) if late else float("nan")


def area(episodes: list[tuple[int, float]], steps: int) -> float:
    """Mean height of the learning curve: of bins of equal steps, each the mean return of the
    episodes that ended in it (the bin before it where none did)."""
    bins: list[list[float]] = [[] for _ in range(_NUM_BINS)]
    for step, value in episodes:
        bins[min(_NUM_BINS - 1, (step - 1) * _NUM_BINS // steps)].append(value)
    heights, height = [], 0.0
    for values in bins:
        height = statistics.fmean(values) if values else height
        heights.append(height)
    return statistics.fmean(heights)


# ---------------------------------------------------------------------- environments alone


def env_rate(make: Callable[[Place], VectorEnv], num_envs: int, seconds: float) -> float:
    """Steps per second with random actions, drawn before."""
    env = make(Place(num_envs=num_envs, first_env=0, seed=0, device=torch.device("cpu")))
    kind = env.spec.actions
    assert isinstance(kind, Discrete)
    generator = torch.Generator().manual_seed(0)
    actions = torch.randint(kind.num_actions, (64, num_envs), generator=generator)
    env.reset()
    for row in actions[:8]:
        env.step(row)
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        env.step(actions[count % len(actions)])
        count += 1
    env.close()
    return count * num_envs / spent


def bare_gymnasium(seconds: float) -> float:
    """Gymnasium's sync vector of 8 CartPoles by itself: the floor."""
    import gymnasium

    envs = gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    envs.reset(seed=0)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(64)]
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        envs.step(actions[count % len(actions)])
        count += 1
    envs.close()
    return count * 8 / spent


def market_faces(seconds: float) -> float:
    """Eight options markets one by one through their Gymnasium face."""
    from muster.rl.gymnasium_envs import EnvFace
    from muster_recipes.clstm_ppo.options_env import OptionsEnv

    market, config, exchange = _market()
    faces = [
        EnvFace(lambda place: OptionsEnv(market, "train", config, place, exchange))
        for _ in range(8)
    ]
    for seed, face in enumerate(faces):
        face.reset(seed=seed)
        face.action_space.seed(seed)
    actions = [int(faces[0].action_space.sample()) for _ in range(64)]
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        for face in faces:
            *_, terminated, truncated, _ = face.step(actions[count % len(actions)])
            if terminated or truncated:
                face.reset()
        count += 1
    return count * 8 / spent


def _market() -> tuple[Any, Any, Any]:
    from muster_recipes.clstm_ppo.config import ClstmPpoConfig
    from muster_recipes.clstm_ppo.exchange import Exchange
    from muster_recipes.clstm_ppo.load import load_market

    config = ClstmPpoConfig()
    market = load_market(config, lambda _: None)
    return market, config, Exchange.of(market, config, torch.device("cpu"))


def environments(sizes: list[int], seconds: float, repeats: int) -> dict[str, Any]:
    from muster.rl.gymnasium_envs import make_gymnasium
    from muster_recipes.clstm_ppo.options_env import OptionsEnv

    market, config, exchange = _market()

    def options(place: Place) -> VectorEnv:
        return OptionsEnv(market, "train", config, place, exchange)

    def cartpole(how: Any) -> Callable[[Place], VectorEnv]:
        return lambda place: make_gymnasium("CartPole-v1", place, vectorization=how)

    measured: dict[str, Callable[[], float]] = {
        "CartPole, gymnasium sync, 8": lambda: bare_gymnasium(seconds),
        "CartPole, sync, 8": lambda: env_rate(cartpole("sync"), 8, seconds),
        "market, gymnasium face, 8": lambda: market_faces(seconds),
    }
    for size in sizes:
        measured |= {
            f"CartPole, native, {size:,}": partial(env_rate, cartpole("native"), size, seconds),
            f"market, {size:,}": partial(env_rate, options, size, seconds),
        }
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats):
        for name, run in measured.items():
            found[name].append(run())
    return {name: summary(values) for name, values in found.items()}


# ---------------------------------------------------------------------- reports


def ranged(values: dict[str, float], digits: int = 0) -> list[str]:
    low, high = f"{values['low']:,.{digits}f}", f"{values['high']:,.{digits}f}"
    return [f"{values['median']:,.{digits}f}", f"[{low}–{high}]"]


def shares(runs: list[dict[str, Any]]) -> dict[str, float]:
    if "shares" not in runs[0]:
        return {}
    return {
        name: statistics.median(run["shares"][name] for run in runs) for name in runs[0]["shares"]
    }


def rates(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    record: dict[str, dict[str, Any]] = {}
    for name, runs in found.items():
        record[name] = {
            "steps_per_s": summary([run["steps_per_s"] for run in runs]),
            "cpu_us_per_step": summary([run["cpu_us_per_step"] for run in runs]),
            "shares": shares(runs),
        }
        if PEER in found:
            pairs = zip(runs, found[PEER], strict=True)
            record[name]["times_peer"] = summary(
                [run["steps_per_s"] / peer["steps_per_s"] for run, peer in pairs]
            )
    return record


def show_rates(record: dict[str, dict[str, Any]]) -> None:
    rows = []
    for name, values in record.items():
        ratio = ranged(values["times_peer"], 1) if "times_peer" in values else ["", ""]
        parts = " ".join(f"{part} {share:.0%}" for part, share in values["shares"].items())
        cpu = f"{values['cpu_us_per_step']['median']:,.0f}"
        rows.append([name, *ranged(values["steps_per_s"]), *ratio, cpu, parts])
    headers = ["", "steps/s", "range", f"× {PEER}", "range", "CPU µs per step", "time"]
    table(headers, rows)


def report_cartpole(found: dict[str, list[dict[str, Any]]], steps: int) -> dict[str, Any]:
    record = rates(found)
    print(
        f"\nCartPole-v1, 8 environments, {len(next(iter(found.values())))} seeds, {steps:,} steps"
    )
    show_rates(record)
    rows = []
    for name, runs in found.items():
        late = summary([late_return(run["episodes"], steps) for run in runs])
        under = summary([area(run["episodes"], steps) for run in runs])
        record[name] |= {"late_return": late, "area": under}
        rows.append([name, *ranged(late, 1), *ranged(under, 1)])
    table(["", "return, last quarter", "range", "mean of the curve", "range"], rows)
    if PEER in found:
        ratio = record[OURS]["times_peer"]["median"]
        goal(f"CartPole, × {PEER}", f"≥ {GOAL_CARTPOLE:g}", f"{ratio:.2f}", ratio >= GOAL_CARTPOLE)
    return record


def report_market(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    record = rates(found)
    print(f"\nOptions market, {len(next(iter(found.values())))} seeds")
    show_rates(record)
    if PEER in found:
        ratio = max(r["times_peer"]["median"] for name, r in record.items() if name != PEER)
        goal(
            f"options market, × {PEER}", f"≥ {GOAL_MARKET:g}", f"{ratio:.1f}", ratio >= GOAL_MARKET
        )
    return record


def report_gpu(found: dict[str, list[dict[str, Any]]], precision: Precision) -> dict[str, Any]:
    record = rates(found)
    card = next(iter(found.values()))[0]["device"]
    print(f"\nOptions market on one {card}")
    show_rates(record)
    peak = peak_flops(card, precision)
    for name, runs in found.items():
        done = statistics.median(run["flops_per_step"] * run["steps_per_s"] for run in runs)
        record[name] |= {"flops_per_s": done, "share_of_peak": done / peak if peak else None}
        share = "of a peak that is not known" if peak is None else f"{done / peak:.2%} of its peak"
        print(f"{name}: {done / 1e12:.3f} TFLOP/s, {share}")
    return record


# ---------------------------------------------------------------------- what is run


def cartpole_cases(args: Any) -> list[Case]:
    flags = {
        "steps": args.steps, "num-envs": 8, "rollout-steps": args.rollout_steps, "batch-size": 1,
        "epochs": args.epochs, "hidden": args.hidden, "threads": args.threads,
    }  # fmt: skip
    cases = [Case(name=OURS, trainer="muster", workload="cartpole", flags=flags)]
    if args.has_peer:
        cases.append(Case(name=PEER, trainer="sb3", workload="cartpole", flags=flags))
    return cases


def market_cases(args: Any) -> list[Case]:
    shared = {
        "epochs": args.market_epochs, "hidden": args.market_hidden, "threads": args.threads,
    }  # fmt: skip
    eight = {
        **shared, "num-envs": 8, "rollout-steps": 128, "batch-size": 1,
        "steps": args.market_cycles * 1024,
    }  # fmt: skip
    cases = []
    if args.has_peer:
        cases.append(Case(name=PEER, trainer="sb3", workload="market", flags=eight))
    if not args.quick:
        cases.append(Case(name=f"{OURS}, 8", trainer="muster", workload="market", flags=eight))
    cases += [many_case(args, size, shared) for size in args.market_envs]
    return cases


def many_case(args: Any, size: int, flags: dict[str, Any]) -> Case:
    steps = args.market_rollout_steps
    return Case(
        name=f"{OURS}, {size:,}",
        trainer="muster",
        workload="market",
        flags={
            **flags, "num-envs": size, "rollout-steps": steps,
            "batch-size": size // args.market_minibatches,
            "steps": args.market_cycles * size * steps,
        },
    )  # fmt: skip


def gpu_cases(args: Any) -> list[Case]:
    cases = []
    for size in args.gpu_envs:
        flags = {
            "device": "cuda", "epochs": args.market_epochs, "hidden": args.hidden,
            "threads": args.threads, "precision": args.gpu_precision,
        }  # fmt: skip
        case = many_case(args, size, flags)
        case.flags["batch-size"] = size // 4
        cases.append(case)
    return cases


def parsed() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--market-seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30_720, help="of a CartPole training")
    parser.add_argument("--rollout-steps", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--market-envs", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--market-hidden", type=int, default=64)
    parser.add_argument("--market-epochs", type=int, default=4)
    parser.add_argument("--market-rollout-steps", type=int, default=64)
    parser.add_argument("--market-minibatches", type=int, default=2, help="of many environments")
    parser.add_argument("--market-cycles", type=int, default=5, help="of collecting and learning")
    parser.add_argument("--gpu-envs", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--gpu-precision", default="bf16")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=2.0, help="of environments alone, each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=["cartpole", "market", "environments", "gpu"])
    parser.add_argument("--peers", default=sys.executable, help="an interpreter with sb3-contrib")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.only = args.only or ["cartpole", "market", "environments", "gpu"]
    if args.quick:
        args.seeds = args.market_seeds = args.threads = 1
        args.steps, args.rollout_steps, args.epochs, args.hidden = 768, 32, 2, 64
        args.market_envs, args.market_rollout_steps, args.market_cycles = [64], 16, 3
        args.sizes, args.seconds, args.gpu_envs = [1, 64], 0.1, [256]
    return args


def main() -> None:
    args = parsed()
    torch.set_num_threads(args.threads)
    about = machine("gymnasium")
    print(f"{about['processor']}, {about['cores']} cores, {args.threads} threads, {about['date']}")
    version = peer_version(args.peers)
    args.has_peer = version is not None
    print(f"{PEER} {version}" if version else f"{PEER} is not installed: {INSTALL}")
    record: dict[str, Any] = {"machine": about, "peer": version}
    if "cartpole" in args.only:
        found = run_cases(cartpole_cases(args), args.seeds, args.peers)
        record["cartpole"] = report_cartpole(found, args.steps)
    if "market" in args.only:
        found = run_cases(market_cases(args), args.market_seeds, args.peers)
        record["market"] = report_market(found)
    if "environments" in args.only:
        record["environments"] = environments(args.sizes, args.seconds, 1 if args.quick else 3)
        print("\nEnvironments alone")
        rows = [[name, *ranged(values)] for name, values in record["environments"].items()]
        table(["", "steps/s", "range"], rows)
    if "gpu" in args.only and torch.cuda.is_available():
        found = run_cases(gpu_cases(args), args.market_seeds, args.peers)
        record["gpu"] = report_gpu(found, args.gpu_precision)
    write_json(args.json, record)


if __name__ == "__main__":
    main()
