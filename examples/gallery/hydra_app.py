"""A Hydra app. It knows nothing of Muster but a folder in which to leave its numbers."""

import json
import os
from dataclasses import dataclass, field

import hydra
from hydra.core.config_store import ConfigStore


@dataclass
class Model:
    lr: float = 0.1
    momentum: float = 0.0


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    steps: int = 30


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config):
    x, speed = [4.0, 1.0], [0.0, 0.0]
    for _ in range(config.steps):  # down a narrow valley
        slope = [0.2 * x[0], 4.0 * x[1]]
        speed = [
            config.model.momentum * v - config.model.lr * g
            for v, g in zip(speed, slope, strict=True)
        ]
        x = [a + v for a, v in zip(x, speed, strict=True)]
    loss = 0.1 * x[0] ** 2 + 2 * x[1] ** 2
    folder = os.environ.get("MUSTER_TASK_DIR", ".")
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"loss": loss}, file)


main()
