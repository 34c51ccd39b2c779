"""An environment of Gymnasium: walk to the end that a sign at the start has named."""

import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = 1 if self.np_random.random() < 0.5 else -1
        self.place, self.steps = 0, 0
        return self._seen(), {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        self.steps += 1
        is_there = abs(self.place) == 3
        reward = float(self.place == 3 * self.goal) - 0.02
        return self._seen(), reward, is_there, self.steps == 20, {}

    def _seen(self):
        sign = self.goal if self.steps == 0 else 0  # seen once: a policy has to remember it
        return np.array([sign, self.place / 3], np.float32)


gym.register("Corridor-v0", entry_point=Corridor)
