"""Several nodes: flags come before the environment, and one node needs neither."""

from __future__ import annotations

import pytest

from muster.base.errors import UsageError
from muster.cli.flags import DeviceFlags
from muster.cli.gang_flags import GangFlags, NodeFlags, gang_options_from

SAID = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29400", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"nodes": 2}, (1, "node-a", 29400)),
        ({"nodes": 2, "node_rank": 0}, (0, "node-a", 29400)),
        ({"nodes": 2, "master_addr": "b"}, (1, "b", 29400)),
        ({"nodes": 2, "master_port": 7, "node_rank": 1}, (1, "node-a", 7)),
        ({}, (0, None, None)),
    ],
)
def test_the_environment_says_what_flags_do_not(
    flags: dict[str, int], wanted: tuple[int, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    options = gang_options_from(DeviceFlags(), GangFlags(), NodeFlags(**flags))  # type: ignore[arg-type]
    assert (options.node_rank, options.master_addr, options.master_port) == wanted


def test_without_both_there_is_no_place_to_meet() -> None:
    with pytest.raises(UsageError, match="needs a place to meet"):
        gang_options_from(DeviceFlags(), GangFlags(), NodeFlags(nodes=2))
