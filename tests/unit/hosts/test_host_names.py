"""Hosts are named safely, and each gets the workers that were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.api.start.options import SweepOptions
from muster.base.errors import MusterError, SetupError, UsageError
from muster.farm.executors.cluster import ClusterRequest, plan_nodes
from muster.hosts.check import judge
from muster.hosts.connection import SSH, ssh_command
from muster.hosts.names import Host, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a"),)),
        ("a, me@b.lab:0-3,", (Host("a"), Host("me@b.lab", gpus=(0, 1, 2, 3)))),
        ("c:0+2-3,localhost", (Host("c", gpus=(0, 2, 3)), Host("localhost"))),
        ("d:cpu:4,e:cpu", (Host("d", cpu_workers=4), Host("e", cpu_workers=1))),
        ("10.0.0.7:1", (Host("10.0.0.7", gpus=(1,)),)),
    ],
)
def test_hosts_are_read(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


def test_hosts_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "boxes.txt"
    path.write_text("# mine\na:0-1  # the old one\n\nb\n")
    assert parse_hosts(f"@{path}") == (Host("a", gpus=(0, 1)), Host("b"))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        parse_hosts(f"@{tmp_path}/none")


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=id", "a,-v", "me@-b", "-l@b", "a;id", "a b", "a`id`", "$(id)", "a|b", "a/b",
        "a\nb", "%h", "a'b", "[::1]", "ssh://a", "@", "", ",", "a,a", "a:0,a:1", "a:", "a:x",
        "a:3-1",
        "a:0+0", "a:-1", "a:cpu:0", "a:0:1", "ä", "a" * 300,
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.property
@given(st.text(max_size=12))
def test_ssh_never_takes_a_host_for_an_option_or_a_command(text: str) -> None:
    if text.startswith("@"):
        return
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    for host in hosts:
        argv = ssh_command(host, "true")
        assert argv[argv.index("--") + 1 :] == [host.name, "true"]
        assert not host.name.startswith("-")
        assert set(host.name) <= set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_@"
        )


def test_ssh_asks_nobody_and_forwards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SSH, "ssh -F 'my config'")
    argv = ssh_command(Host("a"), "true")
    assert argv[:3] == ["ssh", "-F", "my config"]
    for word in ("BatchMode=yes", "ConnectTimeout=10", "ClearAllForwardings=yes", "-a", "-x"):
        assert word in argv
    monkeypatch.setenv(SSH, "ssh 'x")
    with pytest.raises(UsageError, match=SSH):
        ssh_command(Host("a"), "true")


def _facts(gpus: int = 0, cpus: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "gpus": [{"index": n, "name": "H100"} for n in range(gpus)], "cpus": cpus, "driver": "570",
        "python": "/usr/bin/python3", "python_version": "3.11.7", "muster": "1", "ray": "2",
        "torch": "3", "gpu_problem": "", "disk_free_mib": 1 << 20, "temp_dir": "/tmp",
        "cache": {"place": "/home/me/.cache/muster", "lacks": "", "free_mib": 1 << 20}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gpus", "asked", "workers"),
    [
        ("a,b", (2, 4), {}, [2, 4]),  # unlike counts
        ("a:1,b:0-2", (2, 4), {}, [1, 3]),
        ("a,b", (2, 4), {"gpus_per_worker": 2}, [1, 2]),
        ("a,b", (1, 2), {"gpus_per_worker": 0.5}, [2, 4]),
        ("a,b", (0, 0), {}, [1, 1]),
        ("a:cpu:3,b", (2, 0), {}, [3, 1]),
        ("a", (4,), {"cpus_per_worker": 4}, [2]),  # 8 cores
        ("a", (16,), {}, [16]),
    ],
)
def test_each_host_gets_its_workers(
    text: str, gpus: tuple[int, ...], asked: dict[str, Any], workers: list[int]
) -> None:
    request = ClusterRequest(hosts=text, **asked)
    made, nodes = plan_nodes(request, parse_hosts(text), [_facts(count) for count in gpus])
    assert [node.workers for node in nodes] == workers
    assert made.num_workers == sum(workers)
    assert bool(made.gpus_per_worker) == bool(nodes[0].gpus)
    assert all(node.cpus >= node.workers * made.cores_per_actor for node in nodes)


@pytest.mark.parametrize(
    ("each", "memory", "workers", "gpus"),
    [
        (1, (1 << 20, 2500), [8, 2], [8, 2]),
        (1, (1 << 20, 500), [8, 0], [8, 0]),
        (2, (1 << 20, 1500), [4, 1], [8, 2]),
        (0.35, (9 << 10, 2500), [9, 2], [5, 1]),  # two on each
    ],
)
def test_gpus_without_a_worker_are_left_to_others(
    each: float, memory: tuple[int, int], workers: list[int], gpus: list[int]
) -> None:
    request = ClusterRequest(hosts="a,b", gpus_per_worker=each).with_memory(1024)
    facts = [_facts(8, memory_mib=one) for one in memory]
    _, nodes = plan_nodes(request, parse_hosts("a,b"), facts)
    assert [node.workers for node in nodes] == workers
    assert [len(node.gpus) for node in nodes] == gpus
    assert ("b: nothing" in nodes[1].shown) is (workers[1] == 0)


@pytest.mark.parametrize(
    ("text", "gpus", "asked", "says"),
    [
        ("a,b", (1, 0), {}, "b would work without a GPU"),
        ("a:cpu,b", (1, 1), {}, "a would work without a GPU"),
        ("a", (0,), {"gpus_per_worker": 1}, "no host gives a GPU"),
        ("a", (1,), {"gpus_per_worker": 2}, "No worker fits"),
    ],
)
def test_what_cannot_run_is_refused(
    text: str, gpus: tuple[int, ...], asked: dict[str, Any], says: str
) -> None:
    request = ClusterRequest(hosts=text, **asked)
    with pytest.raises(UsageError, match=says):
        plan_nodes(request, parse_hosts(text), [_facts(count) for count in gpus])


@pytest.mark.parametrize(
    ("more", "what", "state", "fix"),
    [
        ({"python_version": "3.12.1"}, "python", "failure", "--hosts-python"),
        ({"muster": None}, "muster", "failure", "pip install 'muster-gpu==1'"),
        ({"ray": "9"}, "ray", "failure", "pip install 'ray==2'"),
        ({"torch": None}, "torch", "warning", "install torch 3"),
        ({"gpus": []}, "GPUs", "failure", "a alone"),
        ({"gpu_problem": "Driver/library version mismatch"}, "GPUs", "failure", "nvidia-smi"),
        ({"skew_s": -40.0}, "clock", "warning", "set-ntp"),
        ({"disk_free_mib": 100}, "disk", "warning", "make room"),
        ({"disk_free_mib": 3}, "disk", "failure", "make room"),
        (
            {"cache": {"place": "/h/c", "lacks": "/h", "free_mib": 9999}},
            "cache",
            "warning",
            "make it writable",
        ),
        ({"cache": {"place": "/h/c", "lacks": "", "free_mib": 3}}, "cache", "warning", "make room"),
    ],
)
def test_what_is_wrong_with_a_host_is_told_with_what_repairs_it(
    more: dict[str, Any], what: str, state: str, fix: str
) -> None:
    here = {"python_version": "3.11.2", "muster": "1", "ray": "2", "torch": "3"}
    host = Host("a", gpus=(0,))
    assert {one.state for one in judge(host, _facts(1), here)} == {"ok"}
    wrong = [one for one in judge(host, {**_facts(1), **more}, here) if one.state != "ok"]
    assert [(one.what, one.state) for one in wrong] == [(what, state)]
    assert fix in wrong[0].fix


def test_another_checkout_of_the_same_version_is_told() -> None:
    here = {"python_version": "3.11.2", "muster": "1", "ray": "2", "torch": "3"}
    for code, state in (("x", "ok"), ("y", "warning")):
        facts = {**_facts(1), "muster_code": code}
        found = {one.what: one for one in judge(Host("a"), facts, {**here, "muster_code": "x"})}
        assert found["muster"].state == state


@pytest.mark.parametrize(
    ("asked", "executor", "says"),
    [
        ({"hosts": "a", "address": "b:1"}, "ray", "starts a Ray of its own"),
        ({"hosts": "a"}, "slurm", "no effect with --on slurm"),
        ({"hosts": "a"}, "inline", "no effect with --on inline"),
        ({"hosts_python": "/p"}, "ray", "no effect without --hosts"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    asked: dict[str, Any], executor: str, says: str
) -> None:
    with pytest.raises(MusterError, match=says) as caught:
        SweepOptions(executor=executor, cluster=ClusterRequest(**asked))
    assert not isinstance(caught.value, SetupError)


def test_hosts_mean_ray() -> None:
    assert SweepOptions(cluster=ClusterRequest(hosts="a")).executor == "ray"
