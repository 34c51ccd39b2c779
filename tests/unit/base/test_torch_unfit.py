"""When a worker on a GPU is refused for its torch, and what is asked of a torch that works."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.base import device_faults
from muster.base.device_faults import hidden_fault, says_unfit, why_unfit


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    device_faults._has_other_way.cache_clear()
    yield
    device_faults._has_other_way.cache_clear()


def torch_with(monkeypatch: pytest.MonkeyPatch, **cuda: Any) -> Any:
    module: Any = types.ModuleType("torch")
    module.cuda, module._C = types.SimpleNamespace(**cuda), types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    torch_with(monkeypatch, is_available=lambda: False, init=init)


@pytest.mark.usefixtures("cpu_torch")
def test_a_task_with_nothing_but_a_torch_for_the_cpu_is_refused() -> None:
    why = why_unfit()
    assert says_unfit(why)
    assert "Torch not compiled with CUDA enabled" in why
    assert "MUSTER_ALLOW_CPU_TORCH=1" in why


@pytest.mark.usefixtures("cpu_torch")
@pytest.mark.parametrize("name", ["xgboost", "lightgbm", "catboost", "onnxruntime", "jax"])
def test_where_another_way_is_installed_torch_is_not_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / name).mkdir()
    assert why_unfit()  # a folder is no library
    device_faults._has_other_way.cache_clear()
    (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))  # and forget what the folder held
    assert why_unfit() == ""
    assert name not in sys.modules


@pytest.mark.usefixtures("cpu_torch")
@pytest.mark.parametrize(("said", "is_refused"), [("1", False), ("0", True), ("", True)])
def test_a_user_may_say_that_torch_is_not_for_the_gpu(
    said: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_ALLOW_CPU_TORCH", said)
    assert bool(why_unfit()) == is_refused


def test_a_device_without_a_context_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a torch that was only initialised: to synchronise opens a context, and may fail."""
    asked = []

    def synchronize(index: int) -> None:
        asked.append(index)
        if index == 0:
            raise RuntimeError("CUDA error: out of memory")

    torch = torch_with(
        monkeypatch,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        memory_reserved=lambda index: index,
        synchronize=synchronize,
    )
    torch._C._cuda_hasPrimaryContext = lambda index: index == 1
    assert hidden_fault() == ""
    assert asked == [1]
    del torch._C._cuda_hasPrimaryContext  # a torch that cannot be asked
    assert "out of memory" in hidden_fault()
