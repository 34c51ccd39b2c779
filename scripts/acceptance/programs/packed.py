"""A task that holds its share of the card and computes a little for a while."""

from __future__ import annotations

import os
import time

import torch

_DEVICE = os.environ["DEVICE"]


def work(i: int) -> dict[str, int]:
    room = torch.zeros(int(os.environ["SHARE_MIB"]) << 20, dtype=torch.uint8, device=_DEVICE)
    end_s = time.monotonic() + float(os.environ["SLEEP_S"])
    left = torch.randn(64, 64, device=_DEVICE)
    while time.monotonic() < end_s:
        float((left @ left).sum())
        time.sleep(0.01)
    return {"i": i, "mib": room.numel() >> 20}
