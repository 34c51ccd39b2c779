"""What a batch script says: options checked and quoted, words that bash does not expand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.slurm_cluster import SlurmCluster

from muster.base.errors import UsageError
from muster.slurm.sbatch import (
    BatchScript,
    check_memory,
    check_time,
    command_line,
    directive,
    further_options,
    time_limit_s,
)


def test_the_script_is_options_then_lines() -> None:
    script = BatchScript(options=(("nodes", "2"), ("requeue", "")), lines=("date",))
    assert script.text() == "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --requeue\n\ndate\n"


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
    given = ["constraint=a100", "--exclusive", "constraint=h100", "gres=gpu:a100:4"]
    assert further_options(given) == {
        "constraint": "h100",
        "exclusive": "",
        "gres": "gpu:a100:4",
    }
    with pytest.raises(UsageError, match=r"--slurm-arg time: muster sets .*\n.*use --time"):
        further_options(["time=1:00"])
    with pytest.raises(UsageError, match="write a long option of sbatch as NAME=VALUE"):
        further_options(["-c 4"])
    with pytest.raises(UsageError, match="is one line"):
        further_options(["comment=a\n#SBATCH --wrap=rm"])


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF)), min_size=1))
def test_bash_gives_the_words_back(words: list[str]) -> None:
    line = command_line(["printf", r"%s\0", *words])
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == words


def test_what_the_shell_is_to_expand_stays_behind() -> None:
    assert command_line(["echo", "${HOME}"], unquoted=['"$X"']) == "echo '${HOME}' \"$X\""


@pytest.mark.slurm
@pytest.mark.parametrize("value", ["plain", "two words", 'a "b" c', "${HOME} 'x'", "back\\slash"])
def test_slurm_reads_the_value_of_an_option_as_it_was(
    slurm: SlurmCluster, tmp_path: Path, value: str
) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{directive('comment', value)}\ntrue\n")
    words = ("sbatch", "--parsable", "--output=/dev/null", str(tmp_path / "job.sh"))
    job = slurm.run(*words).strip()
    assert f"Comment={value}\n" in slurm.run("scontrol", "show", "job", job).replace(" \n", "\n")
