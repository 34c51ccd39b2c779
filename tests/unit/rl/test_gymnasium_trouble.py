from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import time
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tests.processes import is_gone
from tests.unit.rl.ladder import Ladder, kind_of, of, place_of, registered

from muster.base.errors import MusterError, SetupError, UsageError
from muster.rl.gymnasium_envs import GymnasiumEnvs, make_gymnasium

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_refused(value: float) -> None:
    env = of(lambda: kind_of("Bad", trouble=staticmethod(lambda _: value))(trouble_at=3))
    env.reset()
    env.step(torch.tensor([0, 0]))
    env.step(torch.tensor([0, 0]))
    with pytest.raises(UsageError) as caught:
        env.step(torch.tensor([0, 0]))
    assert str(caught.value) == (
        f"SyncVectorEnv: in environment 0 at step 3 of episode 0 the reward is {value}. Learning "
        "from it would turn every weight into NaN."
    )


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
@pytest.mark.parametrize("at", [2, 4])
def test_observations_that_are_no_numbers_are_refused(mode: str, at: int) -> None:
    """In the middle of an episode and as its last observation."""

    def spoil(env: Ladder) -> None:
        env.height = np.nan  # type: ignore[assignment]

    env = of(lambda: kind_of("Bad", trouble=staticmethod(spoil))(trouble_at=at), mode=mode)
    env.reset()
    with pytest.raises(UsageError, match=rf"environment 0 at step {at} of episode 0 component 1 of "
                       "the observation is nan"):  # fmt: skip
        for _ in range(at):
            env.step(torch.tensor([0, 0]))


def test_observations_of_another_shape_than_their_space_are_told() -> None:
    def shrink(env: Ladder) -> None:
        env.seen = lambda: np.zeros(2)  # type: ignore[method-assign]

    env = of(lambda: kind_of("Shrinks", trouble=staticmethod(shrink))(trouble_at=2))
    env.reset()
    env.step(torch.tensor([0, 0]))
    with pytest.raises(UsageError) as caught:
        env.step(torch.tensor([0, 0]))
    assert str(caught.value).startswith(
        "SyncVectorEnv: environment 0 gives an observation of shape (2,), its space says (3,)."
    )


def error_of(env_id: str, **keywords: Any) -> MusterError:
    with pytest.raises(MusterError) as caught:
        make_gymnasium(env_id, place_of(2), **keywords)
    return caught.value


def test_unknown_ids_name_the_nearest() -> None:
    error = error_of("CartPol-v1")
    assert isinstance(error, UsageError)
    assert str(error).startswith("Unknown Gymnasium environment 'CartPol-v1'.\nHint: did you mean ")
    assert "'CartPole-v1'" in str(error)
    assert "'MODULE:CartPol-v1' imports MODULE first" in str(error)
    assert "did you mean" not in str(error_of("xyz"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of("no_such_module:Game-v0")
    assert isinstance(error, SetupError)
    assert "Cannot import 'no_such_module', which should register 'Game-v0'" in str(error)

    def needy() -> Any:
        raise gymnasium.error.DependencyNotInstalled("Box3D is missing: pip install box3d")

    error = error_of(registered(monkeypatch, needy))
    assert isinstance(error, SetupError)
    assert "needs a package that is missing: Box3D is missing: pip install box3d" in str(error)

    def importing() -> Any:
        importlib.import_module("no_such_module")

    assert "cannot be imported: No module named" in str(
        error_of(registered(monkeypatch, importing))
    )


def test_without_gymnasium_the_message_says_what_to_install() -> None:
    source = """
    import sys
    sys.modules["gymnasium"] = None
    from muster.base.errors import SetupError
    try:
        import muster.rl.gymnasium_envs
    except SetupError as error:
        print(error)
    """
    words = [sys.executable, "-c", textwrap.dedent(source)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "A Gymnasium environment needs the package gymnasium, which is not installed." in told
    assert "Hint: pip install 'muster-gpu[rl]'" in told


def test_other_mistakes_are_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    told = error_of("CartPole-v1", env_kwargs={"gravity_of": "mars"})
    assert isinstance(told, UsageError)
    assert "CartPole-v1 cannot be made: " in str(told)
    assert "gravity_of" in str(told)
    assert "has no vector form of its own" in str(error_of("Pendulum-v1", vectorization="native"))
    assert "components 0 to 3" in str(error_of("CartPole-v1", observe=(4,), vectorization="async"))
    kind = kind_of("Words", observation_space=spaces.Text(3))
    assert "no flat form" in str(error_of(registered(monkeypatch, kind), vectorization="async"))


# Processes.


@pytest.fixture(autouse=True)
def _before() -> None:
    """What this process had started before the test, such as multiprocessing's tracker."""
    _BEFORE.clear()
    _BEFORE.update(psutil.Process().children())


_BEFORE: set[psutil.Process] = set()


def processes() -> list[psutil.Process]:
    """The children that a test has started and that have not ended."""
    found = set(psutil.Process().children()) - _BEFORE
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def test_async_environments_are_closed_at_the_end() -> None:
    env = make_gymnasium("CartPole-v1", place_of(3), vectorization="async")
    env.reset()
    assert len(processes()) == 3
    env.close()
    assert processes() == []
    with pytest.raises(RuntimeError, match="CartPole-v1 is closed: make new environments"):
        env.reset()


def stumble(env: Ladder) -> None:
    raise ZeroDivisionError("the ladder breaks")


# Gymnasium tells what happened in a process as a warning.
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_error_of_an_environment_ends_all_of_them(
    monkeypatch: pytest.MonkeyPatch, vectorization: Any
) -> None:
    kind = kind_of("Breaks", trouble=staticmethod(stumble))
    env = make_gymnasium(
        registered(monkeypatch, kind),
        place_of(3),
        vectorization=vectorization,
        env_kwargs={"trouble_at": 2},
    )
    env.reset()
    env.step(torch.tensor([0, 0, 0]))
    with pytest.raises(ZeroDivisionError, match="the ladder breaks"):
        env.step(torch.tensor([0, 0, 0]))
    assert processes() == []
    with pytest.raises(RuntimeError, match="is closed"):
        env.step(torch.tensor([0, 0, 0]))
    env.close()


def test_bad_values_end_async_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of("Bad", trouble=staticmethod(lambda _: float("nan")))
    env = make_gymnasium(
        registered(monkeypatch, kind),
        place_of(2),
        vectorization="async",
        env_kwargs={"trouble_at": 1},
    )
    env.reset()
    with pytest.raises(UsageError, match="the reward is nan"):
        env.step(torch.tensor([0, 0]))
    assert processes() == []


@pytest.mark.parametrize("then", ["step", "close"])
def test_a_killed_process_is_told_and_leaves_no_others(then: str) -> None:
    env = make_gymnasium("CartPole-v1", place_of(3), vectorization="async")
    env.reset()
    victim = processes()[1]
    victim.kill()
    psutil.wait_procs([victim], timeout=300)
    if then == "step":
        with pytest.raises(SetupError, match="CartPole-v1: a process that steps an environment"):
            env.step(torch.tensor([0, 0, 0]))
    env.close()
    assert processes() == []


def vanish(env: Ladder) -> None:
    if env.height:
        os._exit(1)


def test_a_process_that_vanishes_in_a_step_leaves_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one does; the others have done their step and wait to be asked."""
    env = make_gymnasium(
        registered(monkeypatch, kind_of("Vanishes", trouble=staticmethod(vanish))),
        place_of(3),
        vectorization="async",
        env_kwargs={"trouble_at": 1},
    )
    env.reset()
    with pytest.raises(SetupError, match="a process that steps an environment has died"):
        env.step(torch.tensor([1, 0, 0]))
    assert processes() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it there")
def test_async_environments_die_with_their_owner() -> None:
    """Even in the middle of a step, when nobody reads what the owner's end says."""
    source = """
    import os, time, gymnasium, torch, psutil
    from gymnasium.envs.classic_control import CartPoleEnv
    from muster.rl.environment import Place
    from muster.rl.gymnasium_envs import make_gymnasium

    class Slow(CartPoleEnv):
        def step(self, action):
            os.write(1, b"stepping\\n")
            time.sleep(60)

    gymnasium.register("Slow-v0", entry_point=Slow)
    place = Place(num_envs=3, first_env=0, seed=0, device=torch.device("cpu"))
    env = make_gymnasium("Slow-v0", place, vectorization="async")
    env.reset()
    print(*(p.pid for p in psutil.Process().children()), flush=True)
    env.step(torch.zeros(3, dtype=torch.int64))
    """
    words = [sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            pids = [int(word) for word in owner.stdout.readline().split()]
            told = [owner.stdout.readline() for _ in pids]
        finally:
            owner.kill()
    assert told == ["stepping\n"] * 3
    deadline = time.monotonic() + 300
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, "processes have outlived their owner"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="fork is safe there")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_given_async_environments_are_taken_over() -> None:
    envs = AsyncVectorEnv([Ladder] * 2, context="fork", autoreset_mode=AutoresetMode.NEXT_STEP)
    env = GymnasiumEnvs.of(envs, place_of(2))
    assert env.reset()["observation"].shape == (2, 3)
    env.close()
    assert envs.closed
