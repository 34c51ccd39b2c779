"""CartPole-v1 on tensors: the published dynamics (Barto, Sutton, Anderson 1983), for tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muster.rl.environment import BatchedEnv, Change, Discrete, Entry, EnvSpec, Observation, Place
from muster.rl.streams import EPISODE, uniform

GRAVITY, CART_KG, POLE_KG, HALF_POLE_M = 9.8, 1.0, 0.1, 0.5
FORCE_N, TICK_S = 10.0, 0.02
MAX_POSITION_M, MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360
MAX_START = 0.05

#: Components without the two velocities: what is hidden has to be remembered.
MASKED = (0, 2)


class BatchedCartPole(BatchedEnv):
    """Position, velocity, angle, angular velocity; ``observe`` keeps only these components.

    Reward 1 per step; terminated when the cart or the pole is too far off; truncated after
    ``max_steps``. Extras: ``steps``, the length of the episode.
    """

    def __init__(
        self, place: Place, observe: tuple[int, ...] = (0, 1, 2, 3), max_steps: int = 500
    ) -> None:
        spec = EnvSpec(
            name="batched CartPole",
            num_envs=place.num_envs,
            observation={"observation": Entry((len(observe),))},
            actions=Discrete(2),
            extras=("steps",),
            min_truncation_steps=max_steps,
        )
        super().__init__(spec, place)
        self.max_steps = max_steps
        self.components = torch.tensor(observe, device=place.device)

    def fresh(self) -> dict[str, Tensor]:
        drawn = uniform(self.place.seed, EPISODE, self.index, self.episode, 4)
        return {"state": (2 * drawn - 1) * MAX_START, "steps": torch.zeros_like(self.index)}

    def advance(self, actions: Tensor) -> Change:
        steps = self.rows["steps"] + 1
        state = moved(self.rows["state"], actions)
        self.rows = {"state": state, "steps": steps}
        return Change(
            reward=torch.ones_like(state[:, 0], dtype=torch.float32),
            terminated=(state[:, 0].abs() > MAX_POSITION_M) | (state[:, 2].abs() > MAX_ANGLE),
            truncated=steps >= self.max_steps,
            extras={"steps": steps.to(torch.float32)},
        )

    def observe(self) -> Observation:
        seen = self.rows["state"].index_select(1, self.components)
        return {"observation": seen.to(torch.float32)}


def moved(state: Tensor, actions: Tensor) -> Tensor:
    """One tick of [num_envs, 4] float64 under a push to the left (0) or to the right (1).

    The frictionless equations of https://coneural.org/florian/papers/05_cart_pole.pdf, (23) and
    (24), integrated by the explicit Euler method.
    """
    position, speed, angle, turn = state.unbind(1)
    force = FORCE_N * (2.0 * actions - 1.0)
    mass = CART_KG + POLE_KG
    sine, cosine = torch.sin(angle), torch.cos(angle)
    push = (force + POLE_KG * HALF_POLE_M * turn.square() * sine) / mass
    turn_rate = (GRAVITY * sine - cosine * push) / (
        HALF_POLE_M * (4.0 / 3.0 - POLE_KG * cosine.square() / mass)
    )
    speed_rate = push - POLE_KG * HALF_POLE_M * turn_rate * cosine / mass
    return torch.stack(
        [
            position + TICK_S * speed,
            speed + TICK_S * speed_rate,
            angle + TICK_S * turn,
            turn + TICK_S * turn_rate,
        ],
        dim=1,
    )
