"""Facts as JSON and back, for ``--save-facts`` and ``--from-facts``.

What is left out is not known; a key that does not exist is an error, because a misspelt fact would
otherwise be read as an unknown one.
"""

from __future__ import annotations

import json
from pathlib import Path

from muster.base.codec import MalformedError, decode, write_json
from muster.base.errors import UsageError
from muster.doctor.facts import FACTS_VERSION, Facts


def save_facts(path: Path, facts: Facts) -> None:
    """Replace ``path``; raises OSError where that fails."""
    write_json(path, facts)


def load_facts(path: Path) -> Facts:
    """The facts in ``path``; UsageError when it is missing or is no facts file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the facts in {path}: {error.strerror or error}.",
            hint="record a machine there with `muster doctor --save-facts FILE`.",
        ) from None
    return facts_from_json(data, str(path))


def facts_from_json(data: bytes, source: str) -> Facts:
    """The facts in ``data``; ``source`` names it in the UsageError."""
    try:
        record = json.loads(data)
        version = record.get("version", FACTS_VERSION) if isinstance(record, dict) else None
        if isinstance(version, int) and version > FACTS_VERSION:
            raise MalformedError(
                f"it has version {version}, and this muster reads up to {FACTS_VERSION}"
            )
        facts = decode(Facts, record)
    except ValueError as error:
        raise UsageError(
            f"The facts in {source} cannot be used: {error}.",
            hint="record them again with `muster doctor --save-facts FILE`.",
        ) from None
    return facts
