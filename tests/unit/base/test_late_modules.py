"""Modules that are imported when they are used."""

from __future__ import annotations

import importlib
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
