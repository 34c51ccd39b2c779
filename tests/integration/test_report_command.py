"""``muster report`` on real runs of every kind; the pages are read back by a parser of HTML."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from muster.api.report.content import in_words
from muster.api.runs import Run
from muster.cli.main import main
from muster.farm.task import TaskState

MUSTER = (sys.executable, "-m", "muster")

FUNCTION = """\
def f(lr: float, text: str, seed: int):
    if lr > 0.5 and seed == 1:
        raise ValueError("<script>bad()</script>")
    return {"score": 2 * lr + seed, "note": "<b>bold</b>"}
"""
GATED = """\
import pathlib, time
def f(n: int, gate: str):
    while n and not pathlib.Path(gate).exists():
        time.sleep(0.05)
    return {"twice": 2 * n}
"""
STAGE = """\
def upper(record):
    if record["text"] == "t3":
        raise ValueError("<i>no</i>")
    return {"text": record["text"].upper()}
def lower(record):
    return {"text": record["text"].lower()}
STAGES = [upper, lower]
"""
SCRIPT = """\
import muster
for step in range(3):
    muster.log(step, loss=1 / (step + 1))
print('hello <u>from</u> a rank')
"""
FAILING = """\
import os
if os.environ["RANK"] == "1":
    raise RuntimeError("<img src=x onerror=run()>")
"""
#: Run name → its command. One CPU worker each: they run beside one another.
RUNS = {
    "function": (
        "sweep", "f.py:f", "--grid", "lr=0.1,0.2,0.9", "--grid", "text=<script>x</script>,plain",
        "--seeds", "2", "--devices", "cpu:1", "--monitor-interval", "0.1",
    ),
    "recipe": (
        "sweep", "ssm", "--num-seeds", "1", "--student-dims", "2", "4", "--gnc-num-samples", "2000",
        "--gd-epochs", "20", "--devices", "cpu:1", "--monitor-interval", "0",
    ),
    "training": ("train", "digits", "--epochs", "2", "--warmup-epochs", "0.5", "--width", "8",
                 "--devices", "cpu:1"),
    "agent": ("train", "ppo", "--num-steps", "1024", "--eval-episodes", "2", "--hidden", "8",
              "--devices", "cpu:1"),
    "map": ("map", "stage.py:upper", "--input", "in.jsonl", "--output", "out.jsonl", "--devices",
            "cpu:1"),
    "stages": ("map", "stage.py:STAGES", "--input", "in.jsonl", "--output", "two.jsonl",
               "--stage-by-stage", "--devices", "cpu:1"),
    "script": ("run", "--nproc-per-node", "2", "script.py"),
    "failing": ("run", "--nproc-per-node", "2", "failing.py"),
}  # fmt: skip
EXIT_CODES = {"function": 1, "map": 1, "stages": 1, "failing": 1}
SECTIONS = ("Figures", "Results", "Configuration", "Environment", "Time and devices")


class Page(HTMLParser):
    """Titles, texts, links and the kinds of tags of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.alts: list[str] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.code = ""
        self._open = ""
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self._open = tag
        self.sources += [str(values[name]) for name in ("src", "href", "data") if name in values]
        if tag == "img":
            self.alts.append(values.get("alt") or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "style":
            return
        self.texts.append(data)
        if self._open in ("td", "th"):
            self.rows[-1][-1] += data
        if self._open == "code":
            self.code += data
        if self._open in ("h1", "h2"):
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def values_of(self, name: str) -> list[str]:
        """Of the rows that begin with ``name``, the cells behind it."""
        return [row[1] for row in self.rows if row and row[0] == name]

    def value_of(self, name: str) -> str:
        return self.values_of(name)[0]


def report(place: Path, *words: str) -> int:
    """The command in this process, which has imported everything already; its exit code."""
    with contextlib.chdir(place):
        return main(["report", *words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of every kind below ``runs``, each with its page."""
    place = tmp_path_factory.mktemp("reports")
    files = {"f.py": FUNCTION, "stage.py": STAGE, "script.py": SCRIPT, "failing.py": FAILING}
    for name, text in files.items():
        (place / name).write_text(text)
    (place / "in.jsonl").write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(5)))
    started = {
        name: subprocess.Popen(
            [*MUSTER, words[0], "--run-dir", f"runs/{name}", *words[1:]],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for name, words in RUNS.items()
    }
    for name, process in started.items():
        told, _ = process.communicate(timeout=300)
        assert process.returncode == EXIT_CODES.get(name, 0), f"{name}: {told}"
    for name in RUNS:
        assert report(place, name) == 0
    return place


def page_of(place: Path, name: str) -> Page:
    return Page(place / "runs" / name / "report" / "index.html")


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_has_a_page_that_needs_nothing_else(place: Path, name: str) -> None:
    page = page_of(place, name)
    assert page.headings[0] == name
    assert page.headings[-len(SECTIONS) :] == list(SECTIONS)
    assert all(s.startswith(("data:image/png;base64,iVBOR", "#")) for s in page.sources)
    assert "script" not in page.tags
    assert all(page.alts)
    words = ["muster", RUNS[name][0], "--run-dir", f"runs/{name}", *RUNS[name][1:]]
    assert shlex.split(page.code) == words
    assert page.values_of("python")[-1] == sys.version.split()[0]  # the first may be an option
    assert page.value_of("devices") in ("cpu:1", "auto")
    assert "about" in page.value_of("time at work")
    assert page.value_of("starts") == "1"


def test_a_sweep_of_a_function(place: Path) -> None:
    page = page_of(place, "function")
    assert "Finished with failures: 10 done, 2 failed of 12 tasks." in page.text
    assert page.headings[1] == "What failed"
    assert "ValueError: <script>bad()</script> (2 failed tasks, 2 attempts)" in page.text
    assert page.value_of("target") == "f.py:f"
    assert ["lr", "text", "done", "score"] in page.rows
    assert ["0.1", "<script>x</script>", "2 of 2", "0.70 ± 0.71"] in page.rows
    assert ["0.9", "plain", "1 of 2", "1.8"] in page.rows
    assert page.alts[0] == "score over lr and text; mean, bars: standard deviation over the seeds"
    run = place / "runs" / "function"
    assert {path.name for path in (run / "figures").iterdir()} == {"results.png", "results.pdf"}
    assert (run / "table.csv").read_text().splitlines()[0] == (
        "lr,text,num_runs,num_done,score_mean,score_sd,score_num"
    )
    assert len(json.loads((run / "table.json").read_text())) == 6


def test_a_sweep_of_a_recipe(place: Path) -> None:
    page = page_of(place, "recipe")
    assert "Finished: 4 done of 4 tasks." in page.text
    assert "What failed" not in page.headings
    assert page.alts[0] == "Figure ssm of the recipe ssm"
    assert page.value_of("recipe") == "ssm"
    assert page.value_of("gnc_num_samples") == "2000"
    header = next(row for row in page.rows if row[:4] == ["seed", "rank", "dim", "method"])
    body = [dict(zip(header, row, strict=True)) for row in page.rows if len(row) == len(header)][1:]
    assert [row["method"] for row in body] == ["gd", "gnc", "gd", "gnc"]
    assert body[0]["num_samples"] == "–"  # not known of gradient descent, and so not 0
    assert body[1]["num_samples"] == "2,000"
    assert "There are no samples of the devices: nothing was recorded." in page.text


def test_a_training(place: Path) -> None:
    page = page_of(place, "training")
    results = json.loads((place / "runs/training/training_results.json").read_text())
    assert "Finished." in page.text
    assert "Figure curves of the training training" in page.alts
    assert "Figure measured of the training training" in page.alts
    test = results["metrics"]["test"]
    assert ["test", f"{test['loss']:.4g}", f"{test['accuracy']:.4g}", "digits"] in page.rows
    per_class = [results["metrics"][split]["class_accuracy"][3] for split in ("val", "test")]
    assert ["3", *(f"{value:.4g}" for value in per_class)] in page.rows
    assert page.value_of("global_batch") == "64"
    assert page.value_of("samples_per_s") == in_words(results["measured"]["samples_per_s"])
    assert page.value_of("mfu") == "–"


def test_a_training_of_an_agent(place: Path) -> None:
    page = page_of(place, "agent")
    assert "A training of an agent: ppo" in page.text
    assert page.alts[0] == "Figure curves of the training agent"
    assert any(row[:2] == ["deterministic", "100"] for row in page.rows)
    assert page.value_of("env") == "CartPole-v1"


def test_a_map(place: Path) -> None:
    page = page_of(place, "map")
    assert "Finished with failures: 5 of 5 records done, 1 rejected." in page.text
    assert "1 record in the stage upper: ValueError: <i>no</i>" in page.text
    assert ["upper", "5", "4", "1", "0", "0", "0"] in page.rows
    assert page.value_of("input.kind") == "jsonl"


def test_a_map_stage_by_stage(place: Path) -> None:
    page = page_of(place, "stages")
    assert "A map of records through STAGES[0] → STAGES[1]." in page.text
    assert "Finished with failures: 5 of 5 records done, 1 rejected." in page.text
    assert "1 record in the stage STAGES[0]: ValueError: <i>no</i>" in page.text
    assert ["STAGES[0]", "5", "4", "1", "0", "0", "0"] in page.rows
    assert ["STAGES[1]", "4", "4", "0", "0", "0", "0"] in page.rows
    assert page.value_of("input.first file") == str(place / "in.jsonl")


def test_a_run_of_a_program(place: Path) -> None:
    page = page_of(place, "script")
    assert "A run of script.py on 2 ranks." in page.text
    assert "hello <u>from</u> a rank" in page.text
    row = next(row for row in page.rows if "cpu:0, cpu:1" in row)
    assert row[-2:] == ["0", "0"]  # exit code and restarts
    assert "loss over steps" in page.alts, "what it logged is drawn"


def test_a_run_that_failed_says_so_first(place: Path) -> None:
    page = page_of(place, "failing")
    assert "Failed with exit code 1." in page.text
    assert page.headings[1] == "What failed"
    assert "Rank 1: RuntimeError: <img src=x onerror=run()>" in page.text
    assert "img" not in page.tags


# ---------------------------------------------------------------------- the command


def test_out_leaves_the_run_as_it_is_and_holds_everything(place: Path, tmp_path: Path) -> None:
    def files() -> dict[Path, int]:
        run = place / "runs" / "recipe"
        found = (*run.glob("*.*"), *run.glob("figures/*"), *run.glob("report/*"))
        return {path: path.stat().st_mtime_ns for path in found if "ledger" not in path.name}

    before = files()
    out = tmp_path / "new" / "folder"
    words = [*MUSTER, "report", "recipe", "--out", str(out), "--json"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [Path(path).relative_to(out).as_posix() for path in json.loads(done.stdout)] == [
        "table.csv", "figures/ssm.png", "figures/ssm.pdf", "index.html",
    ]  # fmt: skip
    assert files() == before
    assert Page(out / "index.html").headings[0] == "recipe"


def test_a_page_is_made_again_with_the_same_content(place: Path) -> None:
    before = page_of(place, "training")
    assert report(place, "training") == 0
    after = page_of(place, "training")
    assert (after.rows, after.alts, after.headings) == (before.rows, before.alts, before.headings)


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        (("nothing",), 2, "Unknown run 'nothing'."),
        (("script", "--out", "f.py"), 2, "--out f.py is a file."),
        (("script", "--out", "f.py/deeper"), 3, "choose another place with --out DIR"),
    ],
)
def test_mistakes_are_told(
    place: Path,
    words: tuple[str, ...],
    exit_code: int,
    says: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert report(place, *words) == exit_code
    told = capfd.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_without_matplotlib_the_page_says_what_is_missing(place: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('No module named matplotlib', name='matplotlib')"
    )
    code = "import sys; from muster.cli.main import main; sys.exit(main())"
    for name in ("recipe", "training"):
        done = subprocess.run(
            [sys.executable, "-c", code, "report", name, "--out", str(tmp_path / name)],
            cwd=place,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        )
        assert done.returncode == 0, done.stderr
        assert "pip install 'muster-gpu[figures]'" in Page(tmp_path / name / "index.html").text


# ---------------------------------------------------------------------- not finished


@pytest.fixture
def half_done(tmp_path: Path) -> Iterator[Path]:
    """A sweep that works on its second task until it has been looked at."""
    (tmp_path / "gated.py").write_text(GATED)
    gate = tmp_path / "gate"
    words = ("sweep", "gated.py:f", "--grid", "n=0,1,2", "--grid", f"gate={gate}",
             "--devices", "cpu:1", "--run-dir", "half")  # fmt: skip
    process = subprocess.Popen(
        [*MUSTER, *words], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        run, deadline_s = tmp_path / "half", time.monotonic() + 300
        while not (run / "ledger.sqlite").exists() or Run(run).counts()[TaskState.DONE] < 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield tmp_path
    finally:
        gate.touch()
        process.wait(300)


def test_a_run_under_way(half_done: Path) -> None:
    assert report(half_done, "half") == 0
    page = Page(half_done / "half" / "report" / "index.html")
    assert "Still running: 1 done" in page.text
    assert ["0", "1 of 1", "0"] in page.rows
    assert ["1", "0 of 1", "–"] in page.rows


def test_a_training_without_an_end_and_a_run_without_anything(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "cut"
    shutil.copytree(place / "runs" / "training", run)
    for name in ("training_results.json", "curves.png", "events.jsonl"):
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:30]) + '{"kind": "tra')
    assert report(tmp_path, "cut") == 0
    page = Page(run / "report" / "index.html")
    assert "Unfinished: it has not come to an end." in page.text
    assert "Figure curves of the training cut" in page.alts
    assert "The last recorded step" in page.text

    for name in ("metrics.jsonl", "curves.png", "monitor.csv"):
        (run / name).unlink()
    shutil.rmtree(run / "figures")
    assert report(tmp_path, "cut") == 0
    text = Page(run / "report" / "index.html").text
    assert "no step of the training was recorded yet" in text
    assert "There are no results yet." in text

    shutil.copytree(place / "runs" / "recipe", tmp_path / "empty")
    for path in (tmp_path / "empty").glob("ledger.*"):
        path.unlink()
    assert report(tmp_path, "empty") == 0
    assert "Unfinished: nothing done" in Page(tmp_path / "empty/report/index.html").text


# ---------------------------------------------------------------------- a browser


@pytest.mark.parametrize(
    ("flags", "background"),
    [((), (255, 255, 255)), (("--force-dark-mode",), (0x14, 0x17, 0x1B))],
    ids=["light", "dark"],
)
def test_a_browser_shows_it(
    place: Path, tmp_path: Path, flags: tuple[str, ...], background: tuple[int, int, int]
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine")
    from matplotlib.image import imread

    page = place / "runs" / "training" / "report" / "index.html"
    shot = tmp_path / "page.png"
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/b",
         "--window-size=400,900", f"--screenshot={shot}", *flags, page.as_uri()],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    pixels = (imread(shot)[:, :, :3] * 255).round()
    assert pixels.shape == (900, 400, 3)
    assert tuple(pixels[2, 2]) == background
    ink = (pixels != pixels[2, 2]).any(axis=2)
    assert ink[:, 20:380].mean() > 0.02  # there is something on it
