"""Facts through JSON and back; files that are no facts; the shell file of repairs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.base.codec import to_json, write_json
from muster.base.errors import UsageError
from muster.cli.commands.doctor import finding_lines, summary
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import FACTS_VERSION, Facts, facts_from_json, load_facts
from muster.doctor.findings import Finding, env_script, ok

HOSTS = sorted((Path(__file__).parent / "hosts").glob("*.json"))


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_facts_survive_json(path: Path, tmp_path: Path) -> None:
    facts = load_facts(path)
    write_json(tmp_path / "again.json", facts)
    again = load_facts(tmp_path / "again.json")
    assert again == facts
    assert run_checks(again) == run_checks(facts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is [], which is not an object"),
        ('{"hosts": {}}', "unknown key 'hosts'"),
        (
            '{"host": {"cpu_cores": "8"}}',
            "cannot be used: host.cpu_cores is '8', which is not a whole number",
        ),
        ('{"host": {"cpu_cores": true}}', "is true, which is not a whole number"),
        ('{"health": [{"uuid": "GPU-a"}]}', "health[0] lacks index"),
        ('{"torch": {"run": {"status": "fine"}}}', "is 'fine', not one of ok, failed"),
        ('{"inventory": {"cuda_driver_version": [12]}}', "must have 2 entries, not 1"),
        ('{"environment": {"RANK": 3}}', "environment.RANK is 3, which is not text"),
        (f'{{"version": {FACTS_VERSION + 1}}}', "this muster reads up to"),
    ],
)
def test_a_file_that_is_no_facts_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        facts_from_json(text.encode(), "host.json")
    assert "The facts in host.json cannot be used" in str(caught.value)
    assert says in str(caught.value)
    assert "--save-facts" in str(caught.value)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_facts(tmp_path / "none.json")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_FIELDS = sorted(Facts.__dataclass_fields__)


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3))
def test_any_json_is_read_or_refused_and_never_a_traceback(record: dict[str, Any]) -> None:
    try:
        facts = facts_from_json(json.dumps(record).encode(), "x")
    except UsageError:
        return
    assert facts_from_json(to_json(facts), "x") == facts or "NaN" in json.dumps(record)
    run_checks(facts)


def test_the_shell_file_sets_what_findings_set(tmp_path: Path) -> None:
    nasty = "it's $(touch pwned) `x`\nrm -rf /"
    found = [
        Finding(severity="error", what=nasty, settings={"NCCL_P2P_DISABLE": "1"}),
        Finding(
            severity="warning", what="second", settings={"NCCL_P2P_DISABLE": "0", "A_B": nasty}
        ),
        Finding(severity="note", what="third", commands=("ulimit -n 64", "ulimit -n 64")),
        Finding(severity="note", what="no repair"),
    ]
    script = tmp_path / "fix.sh"
    script.write_text(env_script(found, "node1", "fix.sh"))
    done = subprocess.run(
        [
            "bash",
            "-euc",
            'source fix.sh; printf "%s|%s|%s" "$NCCL_P2P_DISABLE" "$A_B" "$(ulimit -n)"',
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"1|{nasty}|64"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fix.sh"]
    assert "no repair" not in script.read_text()


def test_a_shell_file_without_repairs_says_so() -> None:
    assert "Nothing to set" in env_script([ok("fine")], "node1", "x.sh")


def test_lines_are_wrapped_for_a_terminal_and_whole_elsewhere() -> None:
    finding = Finding(severity="error", what="word " * 40, why="because", fix="do", check="driver")
    whole = finding_lines([ok("fine"), finding], None)
    assert len(whole) == 4
    assert whole[0].startswith("ok ")
    wrapped = finding_lines([finding], 60)
    assert len(wrapped) > 4
    assert max(map(len, wrapped)) <= 60
    assert summary([finding, ok("a"), ok("b")], 12.34) == "broken: 1 error, 2 in order; 12.3 s"
    assert summary([ok("a")], 61).startswith("healthy: 1 in order")
