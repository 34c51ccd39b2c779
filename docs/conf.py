"""The site: what Sphinx makes of the pages in this folder (``make docs``)."""

from __future__ import annotations

import re
from typing import Any

import muster

project = "Muster"
author = "The Muster contributors"
copyright = "The Muster contributors, Apache-2.0"
version = release = muster.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["**/.*"]

#: The anchors are those of GitHub, so that a link holds in both places.
myst_heading_anchors = 4

napoleon_use_ivar = True  # the fields of a dataclass are described once
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # those of other libraries are not ours to print
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"Muster {version}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def read_docstring(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Our docstrings say ``Attributes`` without the colon by which Napoleon knows a section."""
    lines[:] = [f"{line}:" if line == "Attributes" else line for line in lines]


def read_page(app: Any, name: str, source: list[str]) -> None:
    """Pages at the top of the repository are not on the site; their files can be had there."""
    source[0] = re.sub(r"\]\(((?:\.\./)+[A-Z]+\.md)\)", r"](path:\1)", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before Napoleon
