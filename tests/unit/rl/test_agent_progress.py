"""When a training of an agent is over, and how finished episodes are counted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.rl.config import PpoConfig
from muster.rl.progress import AgentProgress, Running, Window, count_episodes

CONFIG = PpoConfig(num_episodes=5000, patience=500, eval_frequency=2)


def test_a_burst_of_episodes_is_no_evidence() -> None:
    """256 environments that end together jump over a patience of 500 in two evaluations."""
    progress = AgentProgress(episodes=256)
    assert progress.judge(1.0, 1.0, higher_is_better=True)
    for count in range(5):
        assert progress.over(CONFIG) is None, count
        progress.episodes += 512
        progress.judge(0.5, 0.5, higher_is_better=True)
    assert "5 evaluations" in (progress.over(CONFIG) or "")


def test_what_improves_is_not_stopped() -> None:
    progress = AgentProgress()
    for total in range(20):
        progress.episodes += 200
        progress.judge(0.0, float(total), higher_is_better=True)
        assert progress.over(CONFIG) is None


def test_what_is_not_a_number_is_never_the_best() -> None:
    progress = AgentProgress()
    assert not progress.judge(float("nan"), float("nan"), higher_is_better=True)
    assert progress.best is None and progress.smoothed is None


def test_schedules_follow_what_is_nearer_to_its_end() -> None:
    config = PpoConfig(num_steps=1000, num_episodes=10)
    assert AgentProgress(steps=500, episodes=2).fraction(config) == 0.5
    assert AgentProgress(steps=500, episodes=8).fraction(config) == 0.8
    assert AgentProgress(steps=5000).fraction(config) == 1.0


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_episodes_are_counted_as_one_by_one(seed: int, num_rollouts: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    running, total = Running.fresh(3, torch.device("cpu")), torch.zeros(5, dtype=torch.float64)
    sums, counts = [0.0] * 3, [0] * 3
    expected = [0.0, 0.0, 0.0, 0.0]  # episodes, returns, lengths, extra
    finished = set()
    for _ in range(num_rollouts):
        rewards = torch.randn(7, 3, generator=stream)
        ended = torch.rand(7, 3, generator=stream) < 0.3
        valid = torch.rand(7, 3, generator=stream) < 0.8
        extra = torch.where(ended & valid, torch.randn(7, 3, generator=stream), torch.nan)
        told = count_episodes(running, rewards, ended, valid, {"x": extra})
        total = told if not total.any() else torch.cat([told[:1], total[1:] + told[1:]])
        for t in range(7):
            for n in range(3):
                if not valid[t, n]:
                    continue
                sums[n] += float(rewards[t, n])
                counts[n] += 1
                if ended[t, n]:
                    values = (1.0, sums[n], counts[n], float(extra[t, n]))
                    expected = [a + b for a, b in zip(expected, values, strict=True)]
                    sums[n], counts[n] = 0.0, 0
                    finished.add(n)
    assert total[0] == 3 - len(finished)
    torch.testing.assert_close(total[1:], torch.tensor(expected, dtype=torch.float64))


def test_the_window_is_silent_until_every_environment_has_finished_one() -> None:
    """13: the first to end are the short ones."""
    window = Window(["x"], size=4)
    window.add([2.0, 3.0, 6.0, 30.0, 9.0])
    assert window.means() == {}
    assert window.add([0.0, 2.0, 10.0, 40.0, 0.0]) == 2
    assert window.means() == {"return": 16 / 5, "length": 14.0, "x": 9 / 5}
    window.add([0.0, 4.0, 8.0, 8.0, 4.0])  # enough by itself: what was before is left
    assert window.means() == {"return": 2.0, "length": 2.0, "x": 1.0}
    again = Window(["x"], size=4)
    again.restore(window.to_record())
    assert again.means() == window.means()
