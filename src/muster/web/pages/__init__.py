"""The pages as HTML: what a reader sees before any script runs, and without one."""

from muster.web.pages.document import Shell, render

__all__ = ["Shell", "render"]
