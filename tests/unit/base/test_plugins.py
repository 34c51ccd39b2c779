"""What other packages add: listed without an import, named where broken, paid for when used."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from muster.api.start.options import as_trackers
from muster.api.trackers.tracker import Place, check_installed, make_tracker
from muster.base.errors import TargetError, UnknownNameError
from muster.base.modules import all_plugins, load_plugin, plugins, version_of
from muster.doctor.checks.table import run_checks
from muster.doctor.facts import Extension, Facts
from muster.doctor.gather_host import gather_extensions
from muster.farm.executors.base import check_executor
from muster.generation import EngineSpec
from muster.pipeline.engines.engine import open_engine
from muster.run.record import environment

PLACE = Place(Path("trackers"), Path("tb"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def offer(site: Path, package: str, **groups: str) -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    text = "".join(f"[muster.{group}]\n{lines}\n" for group, lines in groups.items())
    (info / "entry_points.txt").write_text(text)


def test_help_reads_no_entry_points() -> None:
    program = (
        "import sys; from muster.cli.main import main; main(['--help']);"
        "sys.exit('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_listing_imports_nothing_of_the_package(site: Path) -> None:
    offer(site, "heavy", engines="big = heavy_engine:Big")
    (site / "heavy_engine.py").write_text("raise SystemExit('imported')\n")
    (found,) = [one for one in all_plugins() if one.package == "heavy"]
    assert (found.kind, found.name, found.place) == ("engine", "big", "heavy_engine:Big")
    assert "heavy_engine" not in sys.modules


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import nowhere_at_all\n", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit('no licence')\n", "SystemExit: no licence"),
        ("Other = 1\n", "AttributeError: module 'broken_one' has no attribute 'Mine'"),
        ("def (\n", "SyntaxError: invalid syntax"),
    ],
)
def test_a_broken_one_is_named_with_its_package_and_cause(
    site: Path, source: str, cause: str
) -> None:
    offer(site, "broken", engines="mine = broken_one:Mine")
    (site / "broken_one.py").write_text(source)
    sys.modules.pop("broken_one", None)
    with pytest.raises(TargetError) as told:
        open_engine(EngineSpec(engine="mine"))
    assert "The engine mine of broken cannot be loaded from broken_one:Mine" in str(told.value)
    assert cause in str(told.value)


def test_a_name_of_two_packages_is_refused_and_not_guessed(site: Path) -> None:
    offer(site, "first", trackers="lines = first_one:T")
    offer(site, "second", trackers="lines = second_one:T")
    with pytest.raises(TargetError, match=r"tracker lines .* (first and second|second and first)"):
        check_installed(as_trackers("lines"))
    assert {one.package for one in all_plugins() if one.name == "lines"} == {"first", "second"}


def test_a_name_that_would_leave_the_run_folder_is_refused(site: Path) -> None:
    offer(site, "hostile", trackers="../../evil = hostile_one:T")
    with pytest.raises(TargetError, match="its name has to be of letters"):
        check_installed(as_trackers("../../evil"))


def test_names_of_musters_own_stay_what_they_are(site: Path) -> None:
    offer(site, "taker", executors="local = taker_one:Mine", trackers="tensorboard = taker_one:T")
    check_executor("local")
    assert type(make_tracker("tensorboard", PLACE)).__name__ == "TensorBoard"


def test_what_is_not_known_is_told_with_what_packages_offer(site: Path) -> None:
    offer(site, "wider", engines="mine = x:Mine", trackers="lines = x:T", executors="far = x:E")
    with pytest.raises(UnknownNameError, match="did you mean 'lines'"):
        as_trackers("linez")
    with pytest.raises(UnknownNameError, match="Known: mine, openai, transformers, vllm"):
        open_engine(EngineSpec(engine="nothing"))
    with pytest.raises(UnknownNameError, match="Known: far, inline"):
        check_executor("nothing")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("class T:\n    def __init__(self, place): self.place = place\n", "no open or no most"),
        ("class T:\n    most_open = 1\n    open = id\n    def __init__(self, p): ...\n", ""),
    ],
)  # fmt: skip
def test_a_tracker_is_asked_for_its_methods(site: Path, body: str, told: str) -> None:
    offer(site, "track", trackers="lines = track_one:T")
    (site / "track_one.py").write_text(body)
    sys.modules.pop("track_one", None)
    if not told:
        assert make_tracker("lines", PLACE).most_open == 1
        return
    with pytest.raises(TargetError, match=told):
        make_tracker("lines", PLACE)


def test_an_engine_without_its_methods_is_named(site: Path) -> None:
    offer(site, "lame", engines="lame = lame_one:Lame")
    (site / "lame_one.py").write_text(
        "class Lame:\n    concurrency = 1\n    def __init__(self, spec): ...\n"
    )
    with pytest.raises(TargetError, match="The engine lame has no start, generate, stats, stop"):
        open_engine(EngineSpec(engine="lame"))


CHECKS = """
from muster.checks import ok

def good(facts):
    yield ok("fine")

def raises(facts):
    yield ok("not yet")
    raise KeyError("x")

def yields_texts(facts):
    return ["all is well"]
"""


def test_checks_of_packages_run_last_and_a_broken_one_is_a_warning(site: Path) -> None:
    names = "\n".join(f"{name} = own_checks:{name}" for name in ("good", "raises", "yields_texts"))
    offer(site, "inspector", checks=names + "\nabsent = absent_one:f")
    (site / "own_checks.py").write_text(CHECKS)
    found = {one.check: one for one in run_checks(Facts()) if one.check.startswith("inspector:")}
    assert found["inspector:good"].severity == "ok"
    for name, cause in (
        ("raises", "KeyError: 'x'"),
        ("yields_texts", "it yields str, not findings"),
        ("absent", "No module named 'absent_one'"),
    ):
        assert found[f"inspector:{name}"].severity == "warning"
        assert f"The check {name} of inspector failed" in found[f"inspector:{name}"].what
        assert cause in found[f"inspector:{name}"].what


def test_each_is_imported_in_a_child_that_may_end_or_hang(site: Path) -> None:
    offer(
        site, "many",
        recipes="fine = json:dumps",
        executors="early = gone_engine:Gone",
        checks="torn = torn_check:f",
        engines="gone = gone_engine:Gone",
    )  # fmt: skip
    (site / "gone_engine.py").write_text("import os\nos._exit(3)\n")
    found = {one.name: one.problem for one in gather_extensions(loads=True, limit_s=60.0)}
    assert found["fine"] == ""
    assert found["torn"] == "ModuleNotFoundError: No module named 'torn_check'"
    assert found["gone"] == found["early"] == "Python ends when it is imported"
    quick = {one.name: one.problem for one in gather_extensions(loads=False, limit_s=60.0)}
    assert set(quick.values()) == {""}


@pytest.mark.thorough
def test_one_that_hangs_does_not_hide_the_others(site: Path) -> None:
    offer(site, "stuck", executors="stuck = stuck_one:E", checks="good = json:dumps")
    (site / "stuck_one.py").write_text("import time\ntime.sleep(600)\n")
    found = {
        one.name: one.problem for one in gather_extensions(loads=True, limit_s=120.0, silence_s=5.0)
    }
    assert found["stuck"] == "it hangs when it is imported" and found["good"] == ""


def test_one_for_which_there_was_no_time_is_not_blamed_and_a_check_not_imported_here(
    site: Path,
) -> None:
    offer(site, "late", recipes="late = late_one:E", checks="last = late_one:f")
    (site / "late_one.py").write_text("import time\ntime.sleep(600)\n")
    facts = Facts(extensions=gather_extensions(loads=True, limit_s=1.0))
    assert [one.problem for one in facts.extensions] == ["", ""]
    told = [one for one in run_checks(facts) if "of late" in one.what or "late:" in one.check]
    assert [one.severity for one in told] == ["note", "note"]
    assert all("was not imported: the time for all checks was over" in one.what for one in told)


def test_what_an_extension_prints_is_no_output_of_a_command(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(site, "loud", checks="loud = loud_one:f")
    (site / "loud_one.py").write_text(
        "from muster.checks import ok\nprint('imported')\n"
        "def f(facts):\n    print('called')\n    yield ok('fine')\n"
    )
    (found,) = [one for one in run_checks(Facts()) if one.check == "loud:loud"]
    assert found.what == "fine"
    assert capsys.readouterr() == ("", "imported\ncalled\n")


def test_a_check_that_cannot_be_imported_is_not_tried_again(site: Path) -> None:
    offer(site, "slow", checks="hangs = hangs_one:f")
    (site / "hangs_one.py").write_text("raise AssertionError('imported again')\n")
    known = Extension(kind="check", name="hangs", place="hangs_one:f", package="slow", problem="x")
    found = run_checks(Facts(extensions=(known,)))
    assert not [one for one in found if one.check == "slow:hangs"]
    assert plugins("check")["hangs"].package == "slow"
    with pytest.raises(TargetError, match="imported again"):
        load_plugin("check", "hangs")


@pytest.mark.parametrize("package", ["muster-gpu", "torch", "numpy", "nvidia-ml-py"])
def test_a_version_is_the_one_that_python_names(package: str) -> None:
    assert version_of(package) == importlib.metadata.version(package)


def test_a_package_that_is_not_installed_has_no_version(tmp_path: Path) -> None:
    (tmp_path / "other-1.dist-info").mkdir()
    sys.path.append(str(tmp_path))
    try:
        assert version_of("other") == "1"
        assert version_of("oth") is None
    finally:
        sys.path.remove(str(tmp_path))


def test_the_platform_in_a_record_is_the_one_that_python_names() -> None:
    assert environment()["platform"] == platform.platform()
