"""Opening a run's ledger for writing, wherever it lives."""

from __future__ import annotations

from muster.base.settings import Settings
from muster.farm.ledger.away import AwayLedger, open_at_home
from muster.farm.ledger.home import choose_place
from muster.farm.ledger.store import Ledger
from muster.run.folder import RunFolder
from muster.run.folder_id import own_id


def open_ledger(folder: RunFolder, settings: Settings) -> Ledger:
    """The writer's ledger of ``folder``: there, or on a local disk with copies shipped there.

    The caller holds the run's lock.
    """
    place = choose_place(folder, own_id(folder).text, settings)
    return AwayLedger(place.path, folder.ledger) if place.is_away else open_at_home(folder.ledger)
