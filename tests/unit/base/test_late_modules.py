"""Modules that are imported when they are used."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from muster.base.late_modules import imported_when_used


def test_a_module_is_imported_when_it_is_used_and_afterwards_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("put_off", "put_off_too", "put_off_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "put_off.py").write_text("value = 3\n")
    (tmp_path / "put_off_too.py").write_text("value = 4\n")
    (tmp_path / "put_off_user.py").write_text(
        "import put_off, put_off_too\nfrom put_off_too import value\n"
    )
    with imported_when_used("put_off", "put_off_too"):
        user = importlib.import_module("put_off_user")
        assert user.value == 4  # it was used at once
    assert "put_off" not in sys.modules
    assert user.put_off.value == 3
    assert sys.modules["put_off"].value == 3 and "value" in vars(sys.modules["put_off"])
    with pytest.raises(AttributeError):
        _ = user.put_off.other
    there = sys.modules["put_off"]
    with imported_when_used("put_off"):  # what is there already stays
        assert sys.modules["put_off"] is there


def test_it_may_be_a_package_be_asked_for_or_not_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("put_off_package", "put_off_package.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "put_off_package").mkdir()
    (tmp_path / "put_off_package" / "__init__.py").write_text("")
    (tmp_path / "put_off_package" / "part.py").write_text("value = 5\n")
    with imported_when_used("put_off_package", "put_off_nowhere"):
        assert importlib.util.find_spec("put_off_package") is not None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("put_off_nowhere")
        assert importlib.import_module("put_off_package.part").value == 5
    assert sys.modules["put_off_package"].part.value == 5
