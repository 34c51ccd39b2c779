"""By which interface a node reaches the others (more in test_two_nodes)."""

from __future__ import annotations

import sys

import pytest

from muster.supervisor.rendezvous import interface_towards


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux")
def test_this_machine_is_reached_over_its_loop() -> None:
    assert interface_towards("127.0.0.1", 29400) == "lo"


def test_a_name_that_nobody_knows_is_no_error() -> None:
    assert interface_towards("no-such-host.invalid", 29400) is None
