"""What says the same in several files says the same: versions, base dependencies, forms."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import muster

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_conda_recipe_asks_for_the_base_dependencies() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/meta.yaml").read_text())
    asked = [text.replace(" ", "") for text in recipe["requirements"]["run"]]
    assert asked == [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]]
    script, target = recipe["build"]["entry_points"][0].split(" = ")
    assert {script: target} == PROJECT["scripts"]


def test_every_version_is_the_same() -> None:
    recipe = yaml.safe_load((ROOT / "packaging/conda/meta.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {PROJECT["version"], recipe["package"]["version"], citation["version"]}
    assert versions == {muster.__version__}
    assert PROJECT["license"] == citation["license"] == recipe["about"]["license"]


def test_the_issue_form_asks_for_what_the_doctor_says() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert "muster doctor --json" in labels
    assert yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
