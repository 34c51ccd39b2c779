"""Let the best policy of a finished clstm-ppo run play the test part of another market.

python scripts/judge_agent.py runs/options --sim-symbols 128

A simulated market with more symbols begins with the smaller one, so the further symbols are ones
that the policy has never seen. Writes comparison.json, comparison.csv and equity.png to RUN/judged.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from muster.base.codec import decode
from muster.rank.checkpoint import intact_best
from muster.rank.checkpoint_files import load_state, step_folder
from muster.rl.environment import Place
from muster.run.folder import RunFolder
from muster.run.record import read_run
from muster_recipes.clstm_ppo.config import ClstmPpoConfig
from muster_recipes.clstm_ppo.task import ClstmPpoTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sim-symbols", type=int, required=True)
    given = parser.parse_args()
    folder = RunFolder(given.run)
    settings = read_run(folder).spec["train"]["settings"]
    config = decode(ClstmPpoConfig, settings, ignore_unknown=True)
    task = ClstmPpoTask(dataclasses.replace(config, sim_symbols=given.sim_symbols))
    device = torch.device("cpu")
    place = Place(num_envs=1, first_env=0, seed=0, device=device)
    policy = task.policy(task.environments("test", place).spec)
    step = intact_best(folder.checkpoints, print)
    assert step is not None, "no best checkpoint"
    load_state(step_folder(folder.checkpoints, step), policy, None, {}, None)
    policy.normaliser.renew()
    figures = given.run / "judged"
    figures.mkdir(exist_ok=True)
    told = task.finish(policy.eval(), device, 0, figures)
    for name, numbers in told["players"].items():
        found = numbers["return"]
        print(
            f"{name:<14} return {found['middle']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
            f"  sharpe {numbers['sharpe']['middle']:+.2f}  trades {numbers['trades']['middle']:.0f}"
        )
    for name, found in told["differences"]["agent"].items():
        shown = f"{found['middle']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
        print(f"agent - {name:<14} {shown} over {found['clusters']} symbols")


if __name__ == "__main__":
    main()
