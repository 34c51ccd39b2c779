"""The site file: what it may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.base.errors import SetupError
from muster.base.settings import read_settings
from muster.slurm.request import JobRequest, read_site

WHOLE = """
partition = "gpu"
account = "physics"
time = "8:00:00"
mem = "64GB"
modules = ["cuda/12.6", "python/3.12"]
setup = ["source ~/venv/bin/activate", "export X=${Y}"]
options = { constraint = "a100", exclusive = true, nice = 100 }
"""


def site_of(folder: Path, text: str) -> JobRequest:
    path = folder / "slurm.toml"
    path.write_text(text)
    return read_site(read_settings({"MUSTER_SLURM_SITE": str(path)}))


def test_all_it_can_say(tmp_path: Path) -> None:
    assert site_of(tmp_path, WHOLE) == JobRequest(
        partition="gpu",
        account="physics",
        time_limit="8:00:00",
        memory="64G",
        setup_lines=(
            "module load cuda/12.6 python/3.12",
            "source ~/venv/bin/activate",
            "export X=${Y}",
        ),
        slurm_args=("constraint=a100", "exclusive", "nice=100"),
    )


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert site_of(tmp_path, "") == JobRequest()


def test_without_a_file_there_are_no_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_site(read_settings({})) == JobRequest()


def test_the_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config" / "muster" / "slurm.toml"
    path.parent.mkdir(parents=True)
    path.write_text('partition = "mine"\n')
    assert read_site(read_settings({})).partition == "mine"


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"site\.toml cannot be read: No such file"):
        read_site(read_settings({"MUSTER_SLURM_SITE": str(tmp_path / "site.toml")}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('partiton = "gpu"', "Unknown key 'partiton'.\nHint: did you mean 'partition'?"),
        ("partition = 3", "partition must be a string, not 3."),
        ('modules = "cuda"', "modules must be a list of strings, not 'cuda'."),
        ("setup = [1]", "setup must be a list of strings, not [1]."),
        ('time = "8h"', "time 8h: SLURM cannot read this as a time limit."),
        ('mem = "much"', "mem much: SLURM cannot read this as an amount of memory."),
        ("options = { exclusive = false }", "options.exclusive cannot be false: leave it out"),
        ('options = { partition = "x" }', "options partition: muster sets this option itself."),
        ("options = { nice = 1.5 }", "options.nice must be a string, a whole number or true"),
        ("partition = ", "is not TOML: "),
    ],
)
def test_what_is_wrong_is_said_with_the_name_of_the_file(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(SetupError) as found:
        site_of(tmp_path, text)
    assert words in str(found.value)
    assert str(tmp_path / "slurm.toml") in str(found.value)


PER_CORE = 'options = { mem-per-cpu = "4G" }'


@pytest.mark.parametrize(
    ("site", "asked", "says"),
    [
        (PER_CORE, JobRequest(), {"mem-per-cpu": "4G"}),
        (PER_CORE, JobRequest(memory="8G"), {"mem": "8G"}),
        ('mem = "8G"', JobRequest(slurm_args=("mem-per-gpu=9G",)), {"mem-per-gpu": "9G"}),
        (PER_CORE, JobRequest(slurm_args=("mem-per-gpu=9G",)), {"mem-per-gpu": "9G"}),
    ],
)
def test_memory_is_asked_for_in_one_way_only(
    tmp_path: Path, site: str, asked: JobRequest, says: dict[str, str]
) -> None:
    options = asked.with_site(site_of(tmp_path, site)).options()
    assert {name: value for name, value in options.items() if name.startswith("mem")} == says


def test_two_ways_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="exclude each other"):
        site_of(tmp_path, f'mem = "8G"\n{PER_CORE}')
