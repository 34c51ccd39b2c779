"""Several nodes: flags come before the environment, and one node needs neither."""

from __future__ import annotations

import pytest

from muster.api.start.options import GangOptions
from muster.base.errors import UsageError
from muster.cli.gang import gang_groups, gang_options
from muster.cli.parse import parse_groups

SAID = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29400", "NODE_RANK": "1"}


def _options(*words: str) -> GangOptions:
    return gang_options(parse_groups(gang_groups(GangOptions(), ""), words, "run", ""))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--nodes 2", (1, "node-a", 29400)),
        ("--nnodes 2 --node-rank 0", (0, "node-a", 29400)),
        ("--nodes 2 --master-addr b", (1, "b", 29400)),
        ("--nodes 2 --master-port 7 --node-rank 1", (1, "node-a", 7)),
        ("", (0, None, None)),
    ],
)
def test_the_environment_says_what_flags_do_not(
    flags: str, wanted: tuple[int, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    options = _options(*flags.split())
    assert (options.node_rank, options.master_addr, options.master_port) == wanted


def test_without_both_there_is_no_place_to_meet() -> None:
    with pytest.raises(UsageError, match="needs a place to meet"):
        _options("--nodes", "2")
