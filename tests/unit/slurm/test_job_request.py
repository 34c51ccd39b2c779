"""What is asked of SLURM is checked, and quoted in the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.slurm_cluster import SlurmCluster

from muster.base.errors import UsageError
from muster.slurm.request import JobRequest, check_memory, check_time, time_limit_s
from muster.slurm.script import batch_script, directive


def test_the_script_is_options_then_lines() -> None:
    text = batch_script({"nodes": "2", "requeue": ""}, ["date"])
    assert text == "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --requeue\n\ndate\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14400),
        ("2-0", 172800),
        ("1-2:03", 93780),
        ("1-00:00:01", 86401),
    ],
)
def test_time_limits_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert check_time(text) == text and time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-1", "0", "00:00", "1-", "4:00:00 "])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM cannot read this as a time limit") as found:
        check_time(text)
    assert "4:00:00 (hours:minutes:seconds)" in str(found.value)


@pytest.mark.parametrize(
    ("text", "means"), [("16G", "16G"), ("16gb", "16G"), ("16GiB", "16G"), ("500", "500")]
)
def test_memory(text: str, means: str) -> None:
    assert check_memory(text) == means


@pytest.mark.parametrize("text", ["", "1.5G", "lots", "16 G", "-1"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM cannot read this as an amount of memory"):
        check_memory(text)


def test_further_options_and_those_that_muster_sets() -> None:
    given = ("constraint=a100", "--exclusive", "constraint=h100", "gres=gpu:a100:4")
    assert JobRequest(slurm_args=given).further == {
        "constraint": "h100",
        "exclusive": "",
        "gres": "gpu:a100:4",
    }
    with pytest.raises(UsageError, match=r"--slurm-arg time: muster sets .*\n.*use --time"):
        JobRequest(slurm_args=("time=1:00",))
    with pytest.raises(UsageError, match="write a long option of sbatch as NAME=VALUE"):
        JobRequest(slurm_args=("-c 4",))
    with pytest.raises(UsageError, match="is one line"):
        JobRequest(slurm_args=("comment=a\n#SBATCH --wrap=rm",))


@pytest.mark.slurm
@pytest.mark.parametrize("value", ["plain", "two words", 'a "b" c', "${HOME} 'x'", "back\\slash"])
def test_slurm_reads_the_value_of_an_option_as_it_was(
    slurm: SlurmCluster, tmp_path: Path, value: str
) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{directive('comment', value)}\ntrue\n")
    words = ("sbatch", "--parsable", "--output=/dev/null", str(tmp_path / "job.sh"))
    job = slurm.run(*words).strip()
    assert f"Comment={value}\n" in slurm.run("scontrol", "show", "job", job).replace(" \n", "\n")
