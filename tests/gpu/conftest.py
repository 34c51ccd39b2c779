"""For tests on a CUDA device, each file of which has a process of its own (``make test-gpu``): what
a process has on the device would make the device busy for the runs that the next file starts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# The processes that inductor keeps for compiling would outlive their test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
_HERE = Path(__file__).parent
_WARNINGS = (
    # torch 2.9 to 2.11 ask for an interface that older ones do not have.
    "ignore:Please use the new API settings to control TF32",
    # Said by the first call of set_sync_debug_mode in a process, also of ("default").
    "ignore:Synchronization debug mode is a prototype",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE:
            for warning in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _cuda_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
