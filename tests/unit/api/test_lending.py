"""What a run gives back and takes, as a value: requests at random to two runs that share a machine
of recorded GPUs, with real leases; and what is refused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from muster.api.runs import Run
from muster.api.start.lending import Lending
from muster.api.start.options import SweepOptions
from muster.api.start.placing import (
    as_wanted,
    forget_wanted,
    hand_on,
    read_wanted,
    slots_of,
    take_devices,
)
from muster.api.sweeps.adding import change_devices
from muster.base.codec import to_json
from muster.base.errors import SetupError, UsageError
from muster.base.settings import Settings, read_settings
from muster.devices.inventory import Device, Inventory
from muster.farm.events import Slots
from muster.farm.view import GIVEN_BACK, QUARANTINED, RunView, WorkerLine
from muster.monitor.files import read_rows
from muster.monitor.recorder import record_run
from muster.plan.prices import write_prices
from muster.run.folder import RunFolder
from muster.run.record import new_record, write_run
from muster.run.requests import Ask
from muster.web.export import export


def facts(num_gpus: int) -> bytes:
    gpus = (
        Device(
            index=i, uuid=f"GPU-{i}", name="Recorded GPU", memory_total_mib=80_000,
            memory_used_mib=0, holders=(),
        )
        for i in range(num_gpus)
    )  # fmt: skip
    return to_json(Inventory(devices=tuple(gpus)))


def view_of(states: Mapping[str, str]) -> RunView:
    lines = [
        WorkerLine(slot, state, "1 x=1" if state == "running" else "", None, None, "", 0)
        for slot, state in states.items()
    ]
    return RunView("r", 1, 0, 0, 0, 0, 0, 0.0, None, None, "running", tuple(lines), ())


class Host:
    """A run on its devices: workers end some time after their slot was given back."""

    def __init__(self, folder: Path, settings: Settings, **options: Any) -> None:
        self.folder = RunFolder(folder)
        self.folder.create()
        self.options = SweepOptions(**options)
        self.settings = settings
        self.begin()

    def begin(self) -> None:
        chosen = as_wanted(self.folder, self.options)
        placement, leases = take_devices(chosen, self.folder.name, self.settings)
        slots = slots_of(placement, chosen)
        self.lending = Lending(self.folder, self.options, self.settings, slots, leases)
        self.lending.forget_other_choice()
        self.states = {slot.label: "running" for slot in slots}
        self.labels = [slot.label for slot in slots]

    def ask(self, **what: Any) -> dict[str, Any]:
        answers: list[Mapping[str, Any]] = []
        events = self.lending.hear(Ask({"devices": what}, answers.append), view_of(self.states))
        [answer] = answers
        assert bool(events) == ("refused" not in answer)
        for event in events:
            assert isinstance(event, Slots)
            self.labels = [slot.label for slot in event.wanted]
            assert len({slot.slot_id for slot in self.lending.slots}) == len(self.lending.slots)
            for label in self.labels:
                self.states[label] = "running"
            for label in self.states.keys() - {*self.labels}:
                if self.states[label] == "running":
                    self.states[label] = "ending"
        return dict(answer)

    def end_workers(self) -> None:
        for label, state in self.states.items():
            if state == "ending":
                self.states[label] = GIVEN_BACK
        self.lending.look(view_of(self.states))

    @property
    def held(self) -> set[str]:
        return set(self.lending._leases)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return on_machine(tmp_path, monkeypatch, 4)


def on_machine(path: Path, patch: pytest.MonkeyPatch, num_gpus: int) -> Settings:
    (path / "facts.json").write_bytes(facts(num_gpus))
    patch.setenv("MUSTER_DEVICE_FACTS", str(path / "facts.json"))
    patch.setenv("MUSTER_LEASE_DIR", str(path / "leases"))
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return read_settings()


@examples(25, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from([1, 2]), st.sampled_from([1, 2, "auto"]))
def test_no_gpu_is_held_by_two_runs(seed: int, group: int, per_gpu: Any) -> None:
    """Two runs give back, take and choose; one is killed now and then, and goes on."""
    draw = random.Random(seed)
    per_gpu = 1 if group > 1 else per_gpu
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        settings = on_machine(Path(place), patch, 6)
        runs = [
            Host(Path(place, name), settings, devices="2", per_gpu=per_gpu, gpus_per_task=group)
            for name in "ab"
        ]
        for _ in range(20):
            run = draw.choice(runs)
            before, wanted = run.held, read_wanted(run.folder)
            match draw.randrange(5):
                case 0:
                    answer = run.ask(release=draw.randint(1, 3))
                case 1:
                    answer = run.ask(add=draw.randint(1, 3))
                case 2:
                    some = draw.sample(range(6), draw.randint(1, 4))
                    answer = run.ask(only=",".join(map(str, some)))
                case 3:
                    run.end_workers()
                    answer = {}
                case _:
                    run.lending.close()
                    run.begin()
                    answer = {}
            if "refused" in answer:
                assert (run.held, read_wanted(run.folder)) == (before, wanted)
            found = read_wanted(run.folder)
            if found is not None:
                assert set(found.devices) <= run.held
                used = {u for slot in run.lending.slots for u in slot.devices}
                assert set(found.devices) <= used
            assert runs[0].held.isdisjoint(runs[1].held)
        for run in runs:
            for label in run.states:
                run.states[label] = "ending" if label not in run.labels else "running"
            run.end_workers()
            mine = {u for s in run.lending.slots if s.label in run.labels for u in s.devices}
            assert run.held == mine, "a lease that nobody uses"
            run.lending.close()


def test_release_add_and_only_of_gpus(settings: Settings, tmp_path: Path) -> None:
    a = Host(tmp_path / "a", settings, devices="3")
    a.states["cuda:1"] = "idle"
    assert run_labels(a.ask(release=1)) == (["cuda:0", "cuda:2"], ["cuda:1"], [])
    assert a.held == {"GPU-0", "GPU-1", "GPU-2"}, "until its worker has ended"
    a.states["cuda:1"] = GIVEN_BACK
    a.end_workers()
    assert a.held == {"GPU-0", "GPU-2"}
    b = Host(tmp_path / "b", settings, devices="1")
    assert b.held == {"GPU-1"}
    said = a.ask(only="0,1")
    assert "cuda:1: leased by run b" in said["refused"]
    said = a.ask(add=2)
    assert (
        "Cannot take 2 more GPUs: only 1 can be had." in said["refused"]
        and "cuda:1: leased by run b" in said["refused"]
    )
    assert "there is no GPU 7; this host has 4 visible GPUs" in a.ask(only="0,7")["refused"]
    assert "keeps one" in a.ask(release=2)["refused"]
    assert "asks for nothing" in a.ask(add=0)["refused"]
    assert run_labels(a.ask(only="0,3")) == (["cuda:0", "cuda:3"], ["cuda:2"], ["cuda:3"])
    assert run_labels(a.ask(add=1)) == (["cuda:0", "cuda:3", "cuda:2"], [], ["cuda:2"])
    a.lending.close()
    a.begin()
    assert a.held == {"GPU-0", "GPU-2", "GPU-3"}, "what was asked for last"
    a.lending.close()
    a.options = SweepOptions(devices="1")
    a.begin()
    assert (a.held, read_wanted(a.folder)) == ({"GPU-0"}, None), "another choice goes before it"
    for run in (a, b):
        run.lending.close()


def test_what_is_recorded_follows_the_devices(settings: Settings, tmp_path: Path) -> None:
    """monitor.csv went on with the GPUs of the start."""
    run, said = Host(tmp_path / "a", settings, devices="2"), list[str]()

    def sampled() -> set[str]:
        path = run.folder.monitor_csv(0)
        found = list(read_rows(path)) if path.exists() and path.stat().st_size else []
        return {str(row.uuid) for row in found if row.uuid and row.time_utc == found[-1].time_utc}

    def until(*numbers: int) -> None:
        deadline = time.monotonic() + 60
        while sampled() != {f"GPU-{number}" for number in numbers}:
            assert time.monotonic() < deadline, (sampled(), said)
            time.sleep(0.02)

    with record_run(run.folder, run.lending.uuids, 0.05, settings, said.append):
        until(0, 1)
        assert run_labels(run.ask(only="1,2"))[1:] == (["cuda:0"], ["cuda:2"])
        until(0, 1, 2)
        run.end_workers()
        until(1, 2)
    run.lending.close()


def test_cpu_workers_have_numbers(settings: Settings, tmp_path: Path) -> None:
    run = Host(tmp_path / "a", settings, devices="cpu:4")
    assert run_labels(run.ask(only="0,3"))[0] == ["cpu:0", "cpu:3"]
    assert run_labels(run.ask(add=2))[2] == ["cpu:1", "cpu:2"]
    assert run_labels(run.ask(only="cpu:6"))[0] == [f"cpu:{i}" for i in (0, 3, 1, 2, 4, 5)]
    assert "there is no CPU worker 99" in run.ask(only="99")["refused"]
    assert "does not choose CPU workers" in run.ask(only="GPU-8")["refused"]
    run.begin()
    assert run.labels == [f"cpu:{i}" for i in range(6)]


HOSTILE: list[Any] = [
    5, "release", ["release"], {"release": "x"}, {"release": None}, {"add": [1]}, {"add": {}},
    {"release": float("inf")}, {"add": float("nan")}, {"add": 10**30}, {"only": "cpu:²"},
    {"only": "²"}, {"only": "cpu:" + "9" * 5000}, {"only": None}, {"only": ""},
]  # fmt: skip


@pytest.mark.parametrize("devices", ["cpu:2", "2"])
def test_a_hostile_request_is_refused(devices: str, settings: Settings, tmp_path: Path) -> None:
    run = Host(tmp_path / "a", settings, devices=devices)
    for what in HOSTILE:
        answers: list[Mapping[str, Any]] = []
        assert run.lending.hear(Ask({"devices": what}, answers.append), view_of({})) == []
        assert answers[0]["refused"], what
    run.lending.close()


def test_a_disk_that_takes_no_more_is_told_with_the_file(
    settings: Settings, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    run = Host(tmp_path / "a", settings, devices="cpu:2")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        answer = run.ask(release=1)
        with pytest.raises(SetupError) as prices:
            write_prices(tmp_path / "prices.toml")
        with pytest.raises(SetupError) as pages:
            export([tmp_path], tmp_path / "site")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    place = run.folder.devices_json
    assert answer["refused"] == f"Cannot write {place}: File too large."
    assert answer["is_setup"], "the words of the request are right"
    assert answer["hint"].endswith("or leave the run on the devices that it has.")
    assert run_labels(run.ask(release=1)) == (["cpu:0"], ["cpu:1"], []), "nothing had changed"
    assert "prices.toml: File too large.\nHint: " in str(prices.value)
    assert f"{tmp_path / 'site'}: File too large.\n" in str(pages.value)


def test_what_is_in_quarantine_goes_first_and_never_stays_alone(
    settings: Settings, tmp_path: Path
) -> None:
    run = Host(tmp_path / "a", settings, devices="2")
    run.states = {"cuda:0": QUARANTINED, "cuda:1": "idle"}
    assert "in quarantine" in run.ask(only="0")["refused"]
    assert run_labels(run.ask(release=1))[:2] == (["cuda:1"], ["cuda:0"])
    run.states["cuda:0"] = GIVEN_BACK
    run.lending.look(view_of(run.states))
    assert run.held == {"GPU-1"}
    assert run_labels(run.ask(add=1))[2] == ["cuda:2"], "not the one that was in quarantine"
    assert run_labels(run.ask(only="0,1"))[2] == ["cuda:0"], "which may be named"
    run.lending.close()


def test_elsewhere_a_run_has_as_many_and_they_are_called_as_there(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Host(tmp_path / "a", settings, devices="4")
    run.ask(only="1,3")
    run.lending.close()
    on_machine(tmp_path, monkeypatch, 3)  # without GPU-3
    run.begin()
    assert run.held == {"GPU-0", "GPU-1"}
    found = read_wanted(run.folder)
    assert found is not None and found.labels == ("cuda:0", "cuda:1")
    run.lending.close()
    cpu = Host(tmp_path / "b", settings, devices="cpu:4")
    cpu.ask(only="1,3")
    cpu.begin()
    found = read_wanted(cpu.folder)
    assert found is not None and list(found.labels) == cpu.labels == ["cpu:0", "cpu:1"]
    stage = RunFolder(tmp_path / "stage")
    hand_on(cpu.folder, stage)
    assert read_wanted(stage) == found, "as does the next stage of a map"
    forget_wanted(cpu.folder)
    cpu.begin()
    assert len(cpu.labels) == 4, "what is typed goes before what was asked for"


def test_a_host_without_gpus_gives_no_cpu_workers_to_a_run_that_had_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(tmp_path, monkeypatch, 0)
    folder = RunFolder(tmp_path / "r")
    folder.create()
    record = new_record(folder, "sweep", SweepOptions(), spec={}, code={}, argv=())
    write_run(folder, record)
    folder.events.write_text('{"event": "start", "workers": ["cuda:0", "cuda:1"]}\n')
    with pytest.raises(UsageError, match="had GPUs when it last ran, and this machine shows none"):
        change_devices(Run(folder.path), {"release": 1})
    assert read_wanted(folder) is None


def test_whole_groups_of_gpus(settings: Settings, tmp_path: Path) -> None:
    run = Host(tmp_path / "a", settings, devices="2", gpus_per_task=2)
    assert "each has 2 GPUs" in run.ask(add=1)["refused"]
    assert run_labels(run.ask(add=2))[2] == ["cuda:2+3"]
    assert "takes GPUs of one worker apart" in run.ask(only="1,2")["refused"]
    assert run_labels(run.ask(release=2)) == (["cuda:0+1"], ["cuda:2+3"], [])
    run.lending.close()


@pytest.mark.parametrize("executor", ["slurm", "ray"])
def test_a_cluster_gives_its_workers_their_devices(
    executor: str, settings: Settings, tmp_path: Path
) -> None:
    run = Host(tmp_path / "a", settings, executor=executor)
    assert "which gives them their devices" in run.ask(release=1)["refused"]
    assert not run.folder.devices_json.exists()


def run_labels(answer: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    assert json.dumps(answer)
    return answer["has"], answer["gives_back"], answer["takes"]
