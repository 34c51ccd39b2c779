"""The batch script of a gang: what it asks for, and that bash reads it as it is meant."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from muster.base.errors import UsageError
from muster.run.folder import RunFolder
from muster.slurm.request import JobRequest
from muster.slurm.script import gang_script, gang_warning_s

CWD = Path("/home/me/my work")
FOLDER = RunFolder(Path("/home/me/runs/100%har"))


def script(site: JobRequest | None = None, **values: object) -> str:
    request = JobRequest(**values)  # type: ignore[arg-type]
    return gang_script(request.with_site(site or JobRequest()), FOLDER, CWD)


def options(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def test_what_is_asked_of_slurm() -> None:
    asked = options(
        script(
            num_nodes=2,
            gpus_per_node=4,
            cpus_per_node=8,
            memory="64GB",
            time_limit="4:00:00",
            partition="gpu",
            account="physics",
            slurm_args=("constraint=a100&nvlink", "exclusive"),
        )
    )
    assert asked == {
        "job-name": "100%har",
        "output": "/home/me/runs/100%%har/slurm/job-%j.log",
        "open-mode": "append",
        "nodes": "2",
        "ntasks-per-node": "1",
        "requeue": "",
        "signal": "B:USR1@60",
        "gpus-per-node": "4",
        "cpus-per-task": "8",
        "mem": "64G",
        "time": "4:00:00",
        "partition": "gpu",
        "account": "physics",
        "constraint": "a100&nvlink",
        "exclusive": "",
    }


def test_a_flag_wins_over_the_site_and_the_site_over_nothing() -> None:
    site = JobRequest(
        partition="slow",
        account="us",
        time_limit="1-0",
        memory="8G",
        slurm_args=("constraint=v100", "nice=10"),
        setup_lines=("module load cuda",),
    )
    text = script(site, partition="fast", slurm_args=("constraint=a100",))
    asked = options(text)
    assert (asked["partition"], asked["account"], asked["time"]) == ("fast", "us", "1-0")
    assert (asked["constraint"], asked["nice"], asked["mem"]) == ("a100", "10", "8G")
    assert text.index("cd -- '/home/me/my work'") < text.index("module load cuda")
    assert text.index("module load cuda") < text.index("srun")


def test_gpus_of_a_kind_are_asked_for_instead() -> None:
    asked = options(script(gpus_per_node=4, slurm_args=("gres=gpu:a100:4",)))
    assert asked["gres"] == "gpu:a100:4" and "gpus-per-node" not in asked


@pytest.mark.parametrize(
    ("values", "cores"),
    [
        ({}, None),
        ({"gpus_per_node": 4}, "16"),
        ({"gpus_per_node": 4, "cpus_per_node": 6}, "6"),
        ({"slurm_args": ("gres=gpu:a100:8",)}, "32"),
        ({"gpus_per_node": 4, "slurm_args": ("cpus-per-gpu=6",)}, None),
    ],
)
def test_ranks_do_not_share_a_single_core(values: dict[str, object], cores: str | None) -> None:
    text = script(**values)
    assert options(text).get("cpus-per-task") == cores
    assert ("srun --cpus-per-task" in text) == (cores is not None)


def test_the_end_of_the_job_is_a_date_whatever_format_the_user_likes() -> None:
    [line] = [line for line in script().splitlines() if line.startswith("end=$(") and "%e" in line]
    assert line.startswith("end=$(SLURM_TIME_FORMAT=standard squeue")


@pytest.mark.parametrize(
    ("limit", "grace_s", "warning"),
    [(None, 15.0, "60"), ("1:00:00", 15.0, "60"), ("1:00:00", 90.0, "120"), ("1", 15.0, "30")],
)
def test_the_warning_leaves_time_to_save(limit: str | None, grace_s: float, warning: str) -> None:
    asked = options(script(time_limit=limit, warn_before_s=gang_warning_s(grace_s)))
    assert asked["signal"] == f"B:USR1@{warning}"


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_bash_understands_it_and_the_launcher_gets_its_words(
    num_nodes: int, tmp_path: Path
) -> None:
    """A pretended srun shows what would run on the node."""
    folder = RunFolder(tmp_path / "it's ${HOME}")
    text = gang_script(JobRequest(num_nodes=num_nodes), folder, tmp_path)
    fakes = """
scontrol() {
    case $* in *hostnames*) echo n7; echo n8 ;; *) echo "X=1 NodeAddr=10.0.0.7 Y=2" ;; esac
}
squeue() { echo N/A; }
srun() { shift 2; bash -c "${1/exec \\/*python -m muster/printf '%s\\\\n'}" "${@:2}"; }
"""
    environment = {"PATH": "/usr/bin:/bin", "SLURM_NODEID": "1", "SLURM_JOB_ID": "5"}
    done = subprocess.run(
        ["bash", "-c", fakes + text], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:4] == ["resume", str(folder.path), "--node-rank", "1"]
    if num_nodes == 2:
        assert words[4:7] == ["--master-addr", "10.0.0.7", "--master-port"]
        assert 1024 <= int(words[7]) < 65536
    assert len(words) == (8 if num_nodes == 2 else 4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"time_limit": "4h"}, "--time 4h: SLURM cannot read this"),
        ({"memory": "much"}, "--mem much: SLURM cannot read this"),
        ({"cpus_per_node": 0}, "--cpus-per-node 0 is too small"),
        ({"slurm_args": ("nodes=3",)}, "--slurm-arg nodes: muster sets this option itself"),
    ],
)
def test_what_slurm_would_not_take_is_refused_at_once(
    values: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        script(**values)


def test_a_folder_that_slurm_cannot_write_to_is_refused() -> None:
    """A backslash in --output: SLURM replaces no %j in it, and drops the backslash."""
    with pytest.raises(UsageError, match="SLURM cannot write below a backslash"):
        gang_script(JobRequest(), RunFolder(Path("/home/me/a\\b")), CWD)


def test_a_job_is_put_back_after_a_preemption_and_cancelled_after_muster_cancel(
    tmp_path: Path,
) -> None:
    """The launchers end with 130 in both cases, and a cancelled run was started again."""
    folder = RunFolder(tmp_path / "it's ${HOME}")
    folder.slurm.mkdir(parents=True)
    fakes = """
squeue() { case $* in *%T*) echo RUNNING ;; esac; }
scontrol() { echo "scontrol $*"; return 1; }
scancel() { echo "scancel $*"; }
srun() { return 130; }
"""
    script = fakes + gang_script(JobRequest(), folder, tmp_path)

    def run(job: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": job}
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 130, done.stderr
        return done.stdout

    folder.slurm_cancelled("4").touch()
    assert run("4") == "scancel 4\n"
    assert run("5") == "scontrol requeue 5\n"
