"""A file that starts a run when workers import it: one sentence, and no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muster.base.target import ReentryError, load, parse_target

CALLS = [
    ("muster.sweep", "muster.sweep(f, grid={'x': [1]})"),
    ("muster.map", "muster.map(f, [{'x': 1}], 'out.jsonl')"),
    ("muster.fit", "muster.fit(f)"),
]


@pytest.mark.parametrize("how", ["t.py:f", "reentrant_{n}:f"])
@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_a_call_while_the_file_is_imported_is_refused(
    name: str, call: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = how.format(n=name.rpartition(".")[2])
    location = target.partition(":")[0]
    file = location if location.endswith(".py") else f"{location}.py"
    (tmp_path / file).write_text(f"import muster\ndef f(x: int = 0): return {{}}\n{call}\n")
    with pytest.raises(ReentryError) as error:
        load(parse_target(target, tmp_path), tmp_path)
    assert str(error.value) == (
        f"{location} calls {name} when it is imported, and workers import it to reach what they "
        "run: each of them would start another run.\n"
        'Hint: put the call under `if __name__ == "__main__":`.'
    )
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == [file]


@pytest.mark.thorough
def test_a_script_without_a_guard_ends_with_the_sentence(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import muster\ndef f(x: int): return {'y': x}\n"
        "muster.sweep(f, grid={'x': [1, 2]}, devices='cpu:2', run_dir='r')\n"
    )
    done = subprocess.run(
        [sys.executable, "s.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "s.py"]
