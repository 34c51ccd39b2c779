"""What an experiment file says is what the flags of its command say, and its errors name its lines.

Nothing is started here; tests/integration/test_experiments.py does that.
"""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from docs.experiment_schema import experiment_schema
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import MusterCli
from tests.examples import examples

from muster.api.experiments.experiment import ExperimentFolder
from muster.api.experiments.file import read_experiment
from muster.api.experiments.text import places_in_toml, read_tree
from muster.base.errors import UsageError
from muster.cli.commands.start import line_in
from muster.cli.experiment_words import file_of
from muster.cli.flags import ONE_TIME
from muster.cli.main import read_command
from muster.run.folder import EXPERIMENT_FILE
from muster.web.folder import Folders

WORK = "def run(lr: float, width: int = 8, seed: int = 0) -> dict:\n    return {'x': lr}\n"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "stages.py").write_text("def stage(record):\n    return record\n")
    return tmp_path


def settings_of(done: Any) -> dict[str, tuple[str, str]]:
    assert done.returncode == 0, done.stderr
    (phase,) = json.loads(done.stdout)["phases"]
    return {one["key"]: (one["value"], one["origin"]) for one in phase["settings"]}


TOML = """
command = "sweep"
target = "work.py:run"
seeds = [3, 5]
keep_going = true
force = false
timeout = "30m"
retries = 2

[grid]
lr = [1e-3, 0.1]
"width" = [8]
"""
YAML = """
command: sweep
target: work.py:run
seeds: [3, 5]
keep-going: true
force: false
timeout: 30m
retries: 2
on: local
grid:
  lr: [1e-3, 0.1]
  width: [8]
"""


@pytest.mark.parametrize(("name", "text"), [("e.toml", TOML), ("e.yaml", YAML)])
def test_a_file_is_a_command_line(work: Path, muster_main: MusterCli, name: str, text: str) -> None:
    (work / name).write_text(text)
    done = muster_main("start", name, "--dry-run", "--json")
    found = settings_of(done)
    (phase,) = json.loads(done.stdout)["phases"]
    typed = read_command(phase["command"])
    assert typed.space.space().seeds == (3, 5)
    assert dict(typed.space.space().grid) == {"lr": (0.001, 0.1), "width": (8,)}
    assert typed.options.timeout_s == 1800.0 and typed.options.keep_going
    assert typed.options.retries == 2 and not typed.options.force
    assert typed.options.run_dir == Path("runs/e")
    line = text.splitlines().index(next(one for one in text.splitlines() if "retries" in one)) + 1
    assert found["retries"] == ("2", f"{name}:{line}")
    assert found["per-gpu"] == ("1", "default")


def test_origins(work: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("WIDTH", "64")
    (work / "e.toml").write_text(f'{TOML}depth = "${{env.WIDTH}}"\n')
    done = muster_main("start", "e.toml", "--set", "retries=4", "--set", "grid.lr=[0.5]",
                       "--set", "name=other", "--dry-run", "--json")  # fmt: skip
    found = settings_of(done)
    assert found["retries"] == ("4", "--set") and found["run-dir"] == ("runs/other", "--set")
    assert found["timeout"] == ("30m", "e.toml:7")
    assert found["devices"] == ("auto", "environment: CUDA_VISIBLE_DEVICES=0,1")
    assert "lr=[0.5]" in found["grid"][0] and 'depth=["64"]' in found["grid"][0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('sede = 3', "e.toml:3: muster sweep work.py:run has no sede.\nHint: did you mean seeds?"),
        ("retries = 1.5", "e.toml:3: --retries 1.5: write a whole number"),
        ("retries = [1, 2]", "e.toml:3: retries = [1, 2]: write one value"),
        ('force = "yes"', 'e.toml:3: force = "yes": write true or false'),
        ("timeout = 'soon'", "e.toml:3: --timeout soon: cannot read this as a duration"),
        ("run_dir = 3", "e.toml:3: run_dir is 3"),
        ("quiet = true", "e.toml:3: quiet is for one start"),
        ("restart = true", "e.toml:3: restart is for one start"),
        ("run-dir = 'a'\nrun_dir = 'b'", "run_dir is given a second time"),
        ("per_gpu = 1\nper-gpu = 2", "e.toml:4: per-gpu is given a second time; first at e.toml:3"),
        ("devices = 'cpu'\ngpus = 2", "gpus says the same as devices at e.toml:3"),
        ("retries = -1", "e.toml:3: --retries -1 is too small"),
        ("gpu_ids = '0'\ndevices = 'cpu'", "each choose the devices"),
        ("comand = 'map'", "did you mean command?"),
        ("after = ['x']", "e.toml:3: muster sweep work.py:run has no after"),
        ("name = '../x'", "cannot be the name of a folder"),
        ("retries = ", "e.toml:3 is not TOML"),
        ("name = '${env.MY_API_KEY}'\n", ""),
        ("python = '${env.MY_API_KEY}'", "looks like a secret"),
        ("python = '${env.NOT_THERE}'", "the environment has no NOT_THERE"),
        ("python = '${teacher.dir}'", "teacher"),
        ("program = 'a b'", "is both a target and a program"),
        ('program = "echo \'a"', "a quotation mark is missing"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_line(
    work: Path, muster_main: MusterCli, text: str, says: str
) -> None:
    (work / "e.toml").write_text(f'command = "sweep"\ntarget = "work.py:run"\n{text}\n')
    done = muster_main("start", "e.toml", "--dry-run")
    if says:
        assert done.returncode == 2 and says in done.stderr
    assert "Traceback" not in done.stderr and not (work / "runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing.toml"], "Cannot read nothing.toml: No such file"),
        (["work.py"], "not an experiment file"),
        (["empty.toml"], "muster: the file lacks command."),
        (["marked.toml", "--set", "retris=1"], "--set: muster sweep work.py:run has no retris"),
        (["e.toml", "--set", "retries"], "write a.b=value"),
        (["e.toml", "--set", "target.x=1"], "target is a value"),
        (["e.toml", "--set", "retris=1"], "--set: muster sweep work.py:run has no retris"),
    ],
)
def test_wrong_starts(work: Path, muster_main: MusterCli, words: list[str], says: str) -> None:
    text = 'command = "sweep"\ntarget = "work.py:run"\n'
    (work / "e.toml").write_text(text)
    (work / "marked.toml").write_text(text, encoding="utf-8-sig")  # as some editors write it
    (work / "empty.toml").touch()
    done = muster_main("start", *words, "--dry-run")
    assert done.returncode == 2 and says in done.stderr


def test_yaml_without_pyyaml(
    work: Path, muster_main: MusterCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "e.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = muster_main("start", "e.yaml", "--dry-run")
    assert done.returncode == 3
    assert "needs the package pyyaml" in done.stderr
    assert "Hint: pip install pyyaml, or write the same as TOML." in done.stderr


def test_a_key_said_twice_in_yaml(work: Path, muster_main: MusterCli) -> None:
    """PyYAML takes the last without a word."""
    (work / "e.yaml").write_text(f"{YAML}retries: 3\n")
    done = muster_main("start", "e.yaml", "--dry-run")
    assert done.returncode == 2 and "e.yaml:13: retries is given a second time" in done.stderr


def test_numbers_in_yaml_are_those_that_one_sees(work: Path) -> None:
    """PyYAML takes 4:00:00 as 14,400, 010 as 8, and makes dates of texts."""
    (work / "e.yaml").write_text(
        "time: 4:00:00\nuntil: 18:30\na: 010\nb: [089, -3, 1e3, 1_000]\nc: 2026-01-31\n"
    )
    tree, _ = read_tree(work / "e.yaml")
    assert tree == {
        "time": "4:00:00", "until": "18:30", "a": 10, "b": [89, -3, 1000.0, "1_000"],
        "c": "2026-01-31",
    }  # fmt: skip
    assert isinstance(tree["b"][0], int)
    (work / "e.yaml").write_text("a: !!int x\n")
    with pytest.raises(UsageError, match="is not YAML"):
        read_tree(work / "e.yaml")


def test_dates_in_toml_are_texts(work: Path, muster_main: MusterCli) -> None:
    (work / "e.toml").write_text(f"{TOML}day = [2026-01-31, 04:00:00]\n")
    found = settings_of(muster_main("start", "e.toml", "--dry-run", "--json"))
    assert 'day=["2026-01-31", "04:00:00"]' in found["grid"][0]


def test_a_home_folder_is_where_flags_have_it(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    (work / "e.toml").write_text(f"run_dir = '~/best'\n{TOML}")
    assert read_experiment(work / "e.toml").run_dir == Path("/home/u/best")


def test_the_lines_of_keys() -> None:
    text = "a = 1\n[b.'c d']\ne.f = 2\nl = '''\nx\n'''\n[[g]]\n"
    assert places_in_toml(text, "t") == {
        ("a",): "t:1", ("b", "c d"): "t:2", ("b", "c d", "e", "f"): "t:3", ("b", "c d", "l"): "t:4",
    }  # fmt: skip


# ---------------------------------------------------------------------- a command line as a file

LINES = [
    "sweep work.py:run --grid lr=1e-3,1e-2 --grid \"tag='a,b',c\" --seeds 3 --timeout 30m",
    "sweep --seeds 3,5 --shell -- echo {seed} '$HOME' --quiet",
    "sweep work.py:run --space 'lr=log(1e-5,1e-1)' --space 'w=choice(8,16)' --maximize x",
    "sweep ssm --num-seeds 4 --student-dims 16 32 64",
    "map stages.py:stage --input in.jsonl --output out.jsonl --no-ids --batch-size 8",
    "train digits --devices cpu:2 --epochs 5 --lr 3e-4 --checkpoint-interval 5steps",
    "train ppo --num-steps 1000",
    "sweep work.py:run --seeds 2 --wait",
    "sweep work.py:run --seeds 2 --wait=2h",
    "run --devices cpu:2 -m package.train --epochs 3 --lr=-1",
    "run --no-python --gpus 2 ./prog -- --x",
    "sweep work.py:run --num-gpus -1 --log-to tensorboard --maximize '${dir} $${x}'",
]


@pytest.mark.parametrize("line", LINES)
def test_a_file_of_a_command_line_means_the_same(
    work: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    _means_the_same(["muster", *shlex.split(line)], work)


def _means_the_same(argv: list[str], folder: Path) -> None:
    file = folder / "again.toml"
    file.write_text(file_of(argv, "why"))
    experiment = read_experiment(file)
    parsed = line_in(experiment, experiment.phases[0], ExperimentFolder(Path("x"))).parsed
    without = {*ONE_TIME, "options.run_dir", "options.name"}
    before = read_command(argv)
    assert parsed.command == before.command and parsed.program == before.program
    assert {(one.option.path, repr(one.value)) for one in parsed.but(without)} == {
        (one.option.path, repr(one.value)) for one in before.but(without)
    }


TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    st.text("${}a", max_size=8),
)


@examples(25)
@given(st.lists(st.sampled_from([
    ["--name"], ["--metrics-from"], ["--on"], ["--try"], ["--maximize"], ["--stop"],
]), max_size=4, unique_by=tuple), st.data())  # fmt: skip
def test_any_text_survives(flags: list[list[str]], data: st.DataObject) -> None:
    """Quotes, escapes, line ends and what looks like a flag or a reference."""
    import tempfile

    argv = ["muster", "sweep", "work.py:run"]
    for (flag,) in flags:
        text = data.draw(TEXTS)
        argv.append(f"{flag}={text}") if " " not in text else argv.extend([flag, text])
    program = data.draw(st.lists(TEXTS, max_size=3))
    if program:
        argv = ["muster", "sweep", *argv[3:], "--", *program]
    try:
        read_command(argv)
    except Exception:
        return
    with tempfile.TemporaryDirectory() as folder:
        _means_the_same(argv, Path(folder))


ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def schema() -> Any:
    text = (ROOT / "docs/reference/experiment.schema.json").read_bytes()
    return jsonschema.Draft202012Validator(json.loads(text))


def test_the_schema_is_of_these_dataclasses(schema: Any) -> None:
    """Renew: python docs/generate_reference.py"""
    assert json.loads(json.dumps(experiment_schema())) == schema.schema
    schema.check_schema(schema.schema)


@pytest.mark.parametrize("line", LINES)
def test_the_schema_takes_what_init_writes(
    work: Path, line: str, schema: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    schema.validate(tomllib.loads(file_of(["muster", *shlex.split(line)], "")))


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (TOML, True),
        (f"{TOML}\n[phase.a]\n{TOML.replace('[grid]', '[phase.a.grid]')}", False),
        ('[phase.a]\ncommand="sweep"\ntarget="a.py:b"\nafter=["c"]\ndevices="${env.D}"', True),
        ('name="x"\ndevices=2\n[phase.a]\ncommand="train"\ntarget="digits"\nlr=0.1', True),
        ('command="sweep"\ntarget="ssm"\nnum_seeds=4', True),
        ('command="sweep"\ntarget="a.py:b"\nsede=4', False),
        ('command="sweep"\ntarget="a.py:b"\nretries=1.5', False),
        ('command="sweep"\ntarget="a.py:b"\nforce="yes"', False),
        ('command="train"\ntarget="digits"\nprecision="fp99"', False),
        ('command="train"\nprogram="a b"', False),
        ('command="sweeep"\ntarget="a.py:b"', False),
        ('phase = 3', False),
    ],
)  # fmt: skip
def test_the_schema_tells_right_from_wrong(text: str, is_right: bool, schema: Any) -> None:
    assert schema.is_valid(tomllib.loads(text)) == is_right


def test_the_schema_of_the_list_has_room_for_what_is_damaged(
    work: Path, muster_main: MusterCli
) -> None:
    for name, record in (("run", "run.json"), ("phases", EXPERIMENT_FILE)):
        (work / "runs" / name).mkdir(parents=True)
        (work / "runs" / name / record).write_text("{")
    listed = json.loads(muster_main("list", "--json").stdout)
    assert [one["state"] for one in listed] == ["damaged", "damaged"]
    schema = json.loads((ROOT / "docs/reference/json/list.json").read_bytes())
    jsonschema.Draft202012Validator(schema).validate(listed)


def test_init(work: Path, muster_main: MusterCli) -> None:
    done = muster_main("init", "a.toml", "--", "sweep", "work.py:run", "--grid", "lr=1,2",
                       "--grid", "width=8")  # fmt: skip
    for value, means in (("[3]", "lr=[3]"), ("3,4", "lr=3,4"), ("5", "lr=5")):
        shown = muster_main("start", "a.toml", "--set", f"grid.lr={value}", "--dry-run", "--json")
        grid = settings_of(shown)["grid"]
        assert means in grid[0] and "width=8" in grid[0] and "1,2" not in grid[0], grid
        assert grid[1] == "--set"
    assert done.returncode == 0 and "muster start a.toml" in done.stdout
    assert "# All combinations" in (work / "a.toml").read_text()
    again = muster_main("init", "a.toml", "--", "sweep", "work.py:run")
    assert again.returncode == 2 and "there already" in again.stderr
    asked = muster_main("init", "b.toml", "--kind", "sweep", "--target", "work.py:run",
                        "--grid", "lr=1,2")  # fmt: skip
    assert asked.returncode == 0 and 'grid = ["lr=1,2"]' in (work / "b.toml").read_text()
    silent = muster_main("init", "c.toml", "--kind", "run")
    assert silent.returncode == 2 and "--target is missing" in silent.stderr
    both = muster_main("init", "d.toml", "--from", "x", "--kind", "sweep")
    assert both.returncode == 2 and "give one of them" in both.stderr


def test_a_file_that_cannot_be_written_leaves_none(work: Path, muster_main: MusterCli) -> None:
    """A torn one would be in the way of the next try."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = ("--kind", "run", "--target", "work.py", "--args", "x" * 10_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        done = muster_main("init", "a.toml", *words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == 3 and "limit (ulimit -f), or name another file." in done.stderr
    assert not (work / "a.toml").exists()


def test_a_folder_that_is_not_there(work: Path, muster_main: MusterCli) -> None:
    (work / "sub").mkdir()
    (work / "sub" / "e.toml").write_text('folder = "nowhere"\ncommand = "sweep"\ntarget = "a.py:f"')
    done = muster_main("start", "sub/e.toml", "--dry-run")
    assert done.returncode in (2, 3) and "nowhere" in done.stderr


def test_looking_finds_the_phases(work: Path, muster_main: MusterCli) -> None:
    """The dashboard shows each phase as a run; a damaged record hides nothing else."""
    for name in ("good/a", "good/b", "bad/c"):
        (work / "runs" / name).mkdir(parents=True)
        (work / "runs" / name / "run.json").write_text("{}")
    for name, text in (("good", "{"), ("bad", '{"places": [3]}')):
        (work / "runs" / name / "experiment.json").write_text(text)
    found = {folder.path.name for folder in Folders([work / "runs"]).all()}
    assert found == {"a", "b", "c"}
    listed = json.loads(muster_main("list", "--json").stdout)
    assert [(one["name"], one["state"]) for one in listed] == [
        ("bad", "damaged"), ("good", "damaged"),
    ]  # fmt: skip
    for command in ("status", "why", "errors", "resume", "cancel"):
        done = muster_main(command, "good")
        assert done.returncode == 3 and "damaged" in done.stderr, command
    assert "several phases" in muster_main("export", "good", "--to", "x.csv").stderr
