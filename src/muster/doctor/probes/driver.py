"""Reads the NVIDIA driver: a broken GPU can make any of its calls hang forever."""

from __future__ import annotations

import dataclasses
from typing import Any

from muster.base.settings import read_settings
from muster.devices.discovery import discover
from muster.devices.nvml_health import read_health, read_links
from muster.doctor.probes.report import Tell, progress


def main(words: list[str], tell: Tell) -> None:
    """``health``: only what changes from moment to moment."""
    # What CUDA_VISIBLE_DEVICES hides is decided by a check, so everything is read.
    settings = dataclasses.replace(read_settings(), cuda_visible_devices=None)
    is_recorded = settings.device_facts is not None
    if words == ["health"]:
        tell({"health": () if is_recorded else read_health()})
        return
    progress("listing the GPUs")
    value: dict[str, Any] = {"inventory": discover(settings)}
    tell(value)
    if not is_recorded:
        progress("reading the health of the GPUs")
        value["health"] = read_health()
        tell(value)
        progress("reading the links between GPUs")
        value["links"] = read_links()
        tell(value)
