"""A search: how it went, what it tried, and where trials were ended."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from muster.api.sweeps.search_state import SearchState, read_search
from muster.api.sweeps.search_view import importance, view
from muster.base.errors import UsageError
from muster.web.folder import Folder
from muster.web.query import Query

#: Importance takes seconds: it is asked for, and computed again when as many more have ended.
_KNOWN: WeakKeyDictionary[Folder, tuple[object, dict[str, Any] | None]] = WeakKeyDictionary()
_ONE_AT_A_TIME = Lock()


def content(folder: Folder, query: Query) -> dict[str, Any]:
    """``importance=1``: with how much each parameter matters."""
    state = read_search(folder.folder)
    if state is None:
        if folder.run.stored.is_search:
            return {"goals": [], "history": []}  # it has not begun
        raise UsageError(f"{folder.path} is not a search.")
    wanted = query.text("importance") == "1"
    weighed = _importance(folder, state) if wanted else None
    return {
        **view(state),
        "importance": weighed and weighed["values"],
        "weighed": weighed and {"step": weighed["step"], "trials": weighed["trials"]},
    }


def _importance(folder: Folder, state: SearchState) -> dict[str, Any] | None:
    standing = (folder.run.stored.run_id, len(state.ended))  # a run that was begun anew is another
    with _ONE_AT_A_TIME:
        known = _KNOWN.get(folder)
        if known is None or known[0] != standing:
            known = _KNOWN[folder] = (standing, importance(state))
    return known[1]
