"""What a check of one's own for ``muster doctor`` needs; see docs/extensions.md.

def licence(facts: Facts) -> Iterator[Finding]:
    yield ok("The licence server answers.")
"""

from __future__ import annotations

from muster.doctor.facts import Facts
from muster.doctor.findings import Finding, error, note, ok, warning

__all__ = ["Facts", "Finding", "error", "note", "ok", "warning"]
