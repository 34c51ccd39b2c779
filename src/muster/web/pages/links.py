"""Paths of pages and files, on a server and in an exported copy. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Links:
    root: str
    suffix: str

    def to(self, path: str) -> str:
        """
        >>> Links("/", "").to(""), Links("../", ".html").to(""), Links("../", ".html").to("run/1f")
        ('/', '../index.html', '../run/1f.html')
        """
        if not path:
            return self.root + (f"index{self.suffix}" if self.suffix else "")
        return self.root + quote(path, errors="replace") + self.suffix

    def run(self, run_id: object, page: str = "overview") -> str:
        return self.to(f"run/{run_id}" + ("" if page == "overview" else f"/{page}"))

    def task(self, run_id: object, key: object) -> str:
        return self.to(f"run/{run_id}/task/{key}")

    def static(self, path: str) -> str:
        return f"{self.root}static/{path}"
