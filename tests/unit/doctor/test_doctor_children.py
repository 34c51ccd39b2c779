"""Child processes that hang, crash, chatter and leave others behind; the real probes on a CPU."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from tests.ports import free_port
from tests.processes import is_gone, ports_of

from muster.devices.inventory import Inventory
from muster.doctor.checks.table import CHECKS
from muster.doctor.facts import Facts, NetworkFacts, Run
from muster.doctor.gather import DriverAnswer
from muster.doctor.gather_probes import (
    Outcome,
    Targets,
    measure_all_reduce,
    measure_host_copies,
    measure_matmuls,
    measure_peer_copies,
    no_time,
    read_answer,
    repairs,
    run_probe,
)
from muster.doctor.probes import all_reduce, speed
from muster.doctor.probes.speed import parse_targets


def program(
    text: str, limit_s: float = 300.0, silence_s: float | None = None, left_s: float = math.inf
) -> Outcome:
    words = [sys.executable, "-c", text]
    return run_probe("", (), limit_s=limit_s, left_s=left_s, silence_s=silence_s, program=words)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("{}", "it lacks inventory"),
        ('{"inventory": 3}', "inventory is 3, which is not an object"),
        ('{"inventory": {}, "health": [{"index": "a"}]}', "health[0]"),
    ],
)
def test_an_answer_of_another_shape_is_a_failure_of_the_probe(answer: str, says: str) -> None:
    """The doctor ended at it, or found no GPU and everything healthy."""
    otherwise = DriverAnswer(inventory=Inventory(problem="the driver gave no answer"))
    found, run = read_answer(program(f"print({answer!r})"), otherwise)
    assert found is otherwise
    assert run.status == "failed" and says in run.reason
    facts = Facts(driver=run, inventory=found.inventory)
    told = list(CHECKS["driver"](facts))
    assert [one.severity for one in told] == ["error"] and says in told[0].what


def test_what_a_hung_probe_had_answered_wrongly_leaves_it_hung() -> None:
    outcome = Outcome(run=Run(status="hung", at="here"), value={"host_addresses": ["no address"]})
    found, run = read_answer(outcome, NetworkFacts())
    assert (found, run) == (NetworkFacts(), outcome.run)
    outcome = Outcome(run=Run(status="ok"), value=outcome.value)
    assert "'no address' does not appear to be" in read_answer(outcome, NetworkFacts())[1].reason


def test_the_last_object_counts_and_other_output_does_not() -> None:
    done = program('print("NCCL version"); print(\'{"a": 1}\'); print(\'{"a": 2}\'); print("[3]")')
    assert (done.run.status, done.value) == ("ok", {"a": 2})


def test_a_probe_that_hangs_is_cut_off_with_what_it_did_last_and_had_found() -> None:
    done = program(
        "import sys, time\n"
        "print('{\"found\": 1}', flush=True)\n"
        "print('at: copying 0-1', file=sys.stderr, flush=True)\n"
        "print('a warning', file=sys.stderr, flush=True)\n"
        "time.sleep(600)",
        limit_s=1.5,
    )
    assert (done.run.status, done.run.at, done.run.error) == ("hung", "copying 0-1", "a warning")
    assert done.value == {"found": 1}


@pytest.mark.parametrize(
    ("limit_s", "left_s", "silence_s", "status"),
    [(60.0, 0.5, None, "skipped"), (0.5, 60.0, None, "hung"), (60.0, 60.0, 0.5, "hung")],
)
def test_what_the_doctors_own_time_has_cut_off_does_not_hang(
    limit_s: float, left_s: float, silence_s: float | None, status: str
) -> None:
    done = program(
        "import sys, time\n"
        "print('{\"found\": 1}', flush=True)\n"
        "print('at: one', file=sys.stderr, flush=True)\n"
        "time.sleep(600)",
        limit_s, silence_s, left_s,
    )  # fmt: skip
    assert done.run.status == status
    if status == "skipped":
        assert str(done.run.error).startswith("the time for all checks was over")


def test_silence_after_a_first_word_is_a_hang() -> None:
    done = program(
        "import sys, time\nprint('at: one', file=sys.stderr, flush=True)\ntime.sleep(600)",
        silence_s=0.5,
    )
    assert (done.run.status, done.run.at) == ("hung", "one")


def test_a_slow_start_is_no_silence() -> None:
    done = program("import time\ntime.sleep(0.5)\nprint('{}')", silence_s=0.1)
    assert done.run.status == "ok"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ValueError('no such device')", "ValueError: no such device"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("pass", "it printed no result"),
    ],
)
def test_a_probe_that_fails_says_why(text: str, error: str) -> None:
    done = program(text)
    assert done.run.status == "failed"
    assert error in str(done.run.error)


def test_a_program_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    done = run_probe("", (), limit_s=1.0, program=[str(tmp_path / "none")])
    assert done.run.status == "failed"


@pytest.mark.parametrize("ending", ["time.sleep(600)", "pass"])
def test_nothing_that_a_probe_started_outlives_it(ending: str) -> None:
    done = program(
        "import json, os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(json.dumps({'pid': child.pid}), flush=True)\n"
        f"print('at: the end', file=sys.stderr, flush=True)\n{ending}",
        silence_s=0.2,
    )
    deadline = time.monotonic() + 300
    while not is_gone(done.value["pid"]):
        assert time.monotonic() < deadline, "the child's child has outlived it"
        time.sleep(0.02)


@pytest.mark.thorough
def test_copies_between_devices_in_a_child() -> None:
    cpus = Targets(kind="cpu", devices=(0, 1))
    peers = measure_peer_copies(cpus, lambda: 60.0, limit_s=60.0)
    assert [(c.source, c.target, c.is_right, c.problem) for c in peers.copies] == [
        (0, 1, True, None),
        (1, 0, True, None),
    ]


def test_copies_to_a_device_in_a_child() -> None:
    host = measure_host_copies(Targets(kind="cpu", devices=(0,)), lambda: 60.0, limit_s=60.0)
    (rate,) = host.rates
    assert rate.problem is None
    assert (rate.to_pageable_gb_s or 0) > 0
    assert rate.to_pinned_gb_s is None


def test_a_device_that_torch_cannot_use_is_told_beside_its_figures() -> None:
    """No GPU is here, so a cuda device fails where a broken one would, and the probe does not."""
    if torch.cuda.is_available():
        pytest.skip("here the devices work")
    row = speed.try_pair("cuda", 0, 1, 0.01)
    assert row["is_right"] is False
    assert row["problem"]
    assert speed.try_pair("cpu", 0, 1, 0.01)["is_right"] is True
    devices = parse_targets("cuda", "0,3")
    rows = speed.measure("fp32", devices, ["0", "3"], 0.01)
    assert [(row["device"], "tflops" in row) for row in rows] == [(0, False), (3, False)]
    assert all(row["problem"] for row in rows)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_error_of_a_product_is_that_of_its_precision(name: str) -> None:
    """Sums of 256 products: sqrt(256) roundings in fp32, or one at the end of a bf16 product."""
    dtype = getattr(torch, name)
    error = speed.relative_error(torch.device("cpu"), dtype)
    assert error < max(16 * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)
    assert error > 0


@pytest.mark.parametrize(
    ("spoil", "num_wrong"),
    [
        (lambda values: values, 0),
        (lambda values: values * 0, 2998 - 3),  # 0 is right where the index is a multiple of 1021
        (lambda values: values.fill_(float("nan")), 2998),
        (lambda values: values.index_fill_(0, torch.tensor([5, 7]), 0.0), 2),
        (lambda values: values / 6, 2998 - 3),  # one rank's own values, never summed
    ],
)
def test_wrong_sums_are_counted(
    spoil: Callable[[torch.Tensor], torch.Tensor], num_wrong: int
) -> None:
    right = (torch.arange(2998) % 1021).float() * (1 + 2 + 3)
    assert all_reduce.count_wrong(spoil(right), 3) == num_wrong


def test_pairs_that_hang_or_crash_are_named_and_the_others_are_still_tried() -> None:
    """The program below stands for GPUs: 1-0 never comes back, at 2-0 the process dies."""
    program = [sys.executable, str(Path(__file__).parent / "bad_pairs.py")]
    found = measure_peer_copies(
        Targets(kind="cuda", devices=(0, 1, 2)),
        lambda: 60.0,
        limit_s=60.0,
        silence_s=0.4,
        program=program,
    )
    assert found.run.status == "ok"
    told = {(c.source, c.target): (c.is_right, c.problem) for c in found.copies}
    assert told == {
        (0, 1): (True, None),
        (0, 2): (True, None),
        (1, 0): (None, "it never finished"),
        (1, 2): (True, None),
        (2, 0): (None, "it crashed: ended by signal 6"),
        (2, 1): (True, None),
    }


def test_pairs_for_which_no_time_is_left_are_said_to_be_untried() -> None:
    program = [sys.executable, str(Path(__file__).parent / "bad_pairs.py")]
    left = iter([60.0, 60.0, 1.0])
    found = measure_peer_copies(
        Targets(kind="cuda", devices=(0, 1, 2)),
        lambda: next(left),
        limit_s=60.0,
        silence_s=0.4,
        program=program,
    )
    assert (found.run.status, len(found.copies)) == ("skipped", 3)
    assert "3 of 6 pairs were not tried" in str(found.run.error)


def test_nothing_is_started_without_time_for_it() -> None:
    cpus = Targets(kind="cpu", devices=(0, 1))
    assert no_time(lambda: 100.0) is None
    assert measure_matmuls(cpus, lambda: 0.5, limit_s=9.0).run.status == "skipped"
    assert measure_host_copies(cpus, lambda: -1.0, limit_s=9.0).run.status == "skipped"
    assert measure_peer_copies(cpus, lambda: 0.5, limit_s=9.0).run.status == "skipped"
    reduce = measure_all_reduce(cpus, "gloo", NetworkFacts(), {}, lambda: 1.0, limit_s=9.0)
    assert [one.run.status for one in reduce.tries] == ["skipped"]


def test_repairs_are_tried_from_the_likeliest_and_not_what_is_set_already() -> None:
    network = NetworkFacts(default_interface="eth0")
    assert repairs("gloo", network, {}) == [
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"GLOO_SOCKET_IFNAME": "lo"},
    ]
    first, *rest = repairs("nccl", network, {})
    assert first == {"NCCL_P2P_DISABLE": "1"}
    assert {"NCCL_SOCKET_IFNAME": "eth0"} in rest
    assert {"NCCL_P2P_DISABLE": "1"} not in repairs("nccl", network, {"NCCL_P2P_DISABLE": "1"})


def test_two_nodes_meet_and_compare_clocks() -> None:
    port = free_port()
    outcomes: dict[str, Outcome] = {}

    def meet(role: str, patience_s: float) -> None:
        words = [role, "127.0.0.1", str(port), str(patience_s)]
        outcomes[role] = run_probe("network", words, limit_s=120.0)

    def serve() -> None:
        """Again where the other one has come too late: it answers for two seconds."""
        while "join" not in outcomes:
            meet("serve", 2)

    master = threading.Thread(target=serve)
    master.start()
    meet("join", 100)
    master.join()
    joined = outcomes["join"].value
    assert joined["is_reachable"] is True
    assert abs(joined["clock_skew_s"]) < joined["round_trip_s"] + 0.01
    assert outcomes["serve"].value == {"is_reachable": True}


def test_a_port_in_use_and_a_master_that_is_not_there() -> None:
    with socket.create_server(("", 0)) as door:
        port = str(door.getsockname()[1])
        served = run_probe("network", ["serve", "127.0.0.1", port, "2"], limit_s=120.0)
        assert "in use" in served.value["port_problem"]
    lost = run_probe("network", ["join", "127.0.0.1", str(free_port()), "0.4"], limit_s=120.0)
    assert lost.value["is_reachable"] is False
    assert lost.value["port_problem"]


def test_another_service_at_the_masters_port_does_not_hang_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        lost = run_probe("network", ["join", "127.0.0.1", port, "0.4"], limit_s=120.0)
    assert lost.run.status == "ok"
    assert lost.value["is_reachable"] is False


def test_the_disk_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_probe("disk", [str(tmp_path / "not" / "made" / "yet"), "0.1"], limit_s=120.0)
    assert done.value["is_writable"] is True
    assert done.value["write_mb_s"] > 0
    assert done.value["free_mib"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="no /proc")
def test_a_folder_that_cannot_be_written_is_told() -> None:
    done = run_probe("disk", ["/proc/runs", "0.1"], limit_s=120.0)
    assert done.value["is_writable"] is False
    assert done.value["problem"]


def test_a_probe_dies_with_the_doctor(tmp_path: Path) -> None:
    """kill -9 of the one who waits: the kernel ends the probe, which then says nothing more."""
    port = free_port()
    text = (
        "import sys; from muster.doctor.gather_probes import run_probe\n"
        f"run_probe('network', ['serve', '127.0.0.1', '{port}', '600'], limit_s=600)"
    )
    with subprocess.Popen([sys.executable, "-c", text]) as doctor:
        children: list[psutil.Process] = []
        # It asks the kernel at its start, before it listens.
        while not any(port in ports_of(child) for child in children):
            assert doctor.poll() is None, "it never started the probe"
            children = psutil.Process(doctor.pid).children()
            time.sleep(0.02)
        doctor.kill()
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive


def test_probes_print_one_object_and_progress_beside_it() -> None:
    """Run as a user would run it by hand."""
    done = subprocess.run(
        [sys.executable, "-m", "muster.doctor.probes.report", "network", "resolve", "localhost"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)["addresses"]) <= {"127.0.0.1", "::1"}
    assert done.stderr.startswith("at: resolving localhost")
