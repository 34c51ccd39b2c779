"""Reads the NVIDIA driver: a broken GPU can make any of its calls hang for ever."""

from __future__ import annotations

import dataclasses
import sys

from muster.base.settings import read_settings
from muster.devices.discovery import discover
from muster.devices.nvml_health import read_health, read_links
from muster.doctor.probes.report import begin, progress, result


def main(words: list[str]) -> int:
    """``health``: only what changes from moment to moment."""
    results = begin()
    # What CUDA_VISIBLE_DEVICES hides is decided by a check, so everything is read.
    settings = dataclasses.replace(read_settings(), cuda_visible_devices=None)
    is_recorded = settings.device_facts is not None
    if words == ["health"]:
        health = () if is_recorded else read_health()
        result(results, {"health": [dataclasses.asdict(gpu) for gpu in health]})
        return 0
    progress("listing the GPUs")
    value = {"inventory": dataclasses.asdict(discover(settings))}
    result(results, value)
    if not is_recorded:
        progress("reading the health of the GPUs")
        value["health"] = [dataclasses.asdict(gpu) for gpu in read_health()]  # type: ignore[assignment]
        result(results, value)
        progress("reading the links between GPUs")
        value["links"] = [dataclasses.asdict(link) for link in read_links()]  # type: ignore[assignment]
        result(results, value)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
