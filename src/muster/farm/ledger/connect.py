"""The ledger's tables and their version, and opening it: for its one writer, or to look at it.

See ``store`` for what is promised.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from muster.base.atomic_files import Refusal, refusal_of, sync_folder
from muster.base.errors import LedgerError, MusterError
from muster.base.settings import variable

#: What this muster reads. A ledger is made with format 1 and gets the second with its first stopped
#: task: older musters read all others. The third is that of a ledger whose large plan is being
#: listed, without an index of its keys (`KEYS`): older musters would add its tasks again.
FIRST_VERSION, WITH_STOPPED, WITHOUT_KEYS = 1, 2, 3
SCHEMA_VERSION = WITHOUT_KEYS

#: Tasks are told apart by it. In ledgers of older musters it is a part of the table.
KEYS = "CREATE UNIQUE INDEX tasks_key ON tasks (key)"
#: KiB, negative as SQLite wants them, while the keys are sorted. SQLite sorts as much at once as
#: its cache may hold; what the processor's own cache does not hold takes half as long again.
_SORTING_CACHE = -2048

#: Added to ledgers that were made without it; older musters read and write them as before. A worker
#: imports its target once, so the code of an attempt is that of its worker.
WORKER_CODE = "ALTER TABLE workers ADD COLUMN code TEXT"

#: Made when a task logs its first numbers; older musters do not look at it. A row is what an
#: attempt has sent at once; whoever follows a run asks for ids above the last that it has seen.
#: ``serial`` is the worker's number of the frame: one that is heard twice is recorded once.
METRICS = """
CREATE TABLE metrics (
    frame_id INTEGER PRIMARY KEY, task_id INTEGER NOT NULL, token INTEGER NOT NULL,
    serial INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE UNIQUE INDEX metrics_of_task ON metrics (task_id, token, serial);
"""

#: What a search was told and has decided, made by the first search: replayed, it is the search.
SEARCH_TABLE = (
    "CREATE TABLE IF NOT EXISTS search "
    "(id INTEGER PRIMARY KEY, kind TEXT NOT NULL, task_id INTEGER, body BLOB NOT NULL)"
)

TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE targets (target_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE tasks (
    task_id INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    target_id INTEGER NOT NULL,
    payload BLOB NOT NULL,
    grp INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL DEFAULT 0,
    state INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0,
    tries INTEGER NOT NULL DEFAULT 0
);
{KEYS};
CREATE INDEX tasks_ready ON tasks (priority DESC, grp, task_id) WHERE state = 0;
CREATE INDEX tasks_unlike ON tasks (state) WHERE state > 2;
CREATE TABLE workers (
    worker_id INTEGER PRIMARY KEY,
    slot_id INTEGER NOT NULL,
    label TEXT NOT NULL,
    devices TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER,
    log TEXT NOT NULL,
    started_s REAL NOT NULL,
    ended_s REAL,
    ending TEXT,
    code TEXT
);
CREATE TABLE attempts (
    task_id INTEGER NOT NULL,
    token INTEGER NOT NULL,
    worker_id INTEGER NOT NULL,
    started_s REAL NOT NULL,
    seconds REAL NOT NULL,
    outcome TEXT NOT NULL,
    signal INTEGER,
    peak_mib REAL,
    log_start INTEGER NOT NULL,
    log_end INTEGER NOT NULL,
    failure_id INTEGER,
    message TEXT,
    PRIMARY KEY (task_id, token)
) WITHOUT ROWID;
CREATE TABLE failures (
    failure_id INTEGER PRIMARY KEY,
    fingerprint TEXT NOT NULL UNIQUE,
    outcome TEXT NOT NULL,
    message TEXT NOT NULL,
    trace TEXT NOT NULL
);
CREATE TABLE results (
    task_id INTEGER PRIMARY KEY,
    token INTEGER NOT NULL,
    value BLOB,
    sha256 TEXT,
    files INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE late_results (
    task_id INTEGER NOT NULL, token INTEGER NOT NULL, worker_id INTEGER NOT NULL,
    received_s REAL NOT NULL, value BLOB
);
CREATE TABLE code (target_id INTEGER NOT NULL, hash TEXT NOT NULL, since_s REAL NOT NULL);
"""


def create(path: Path) -> None:
    """Make an empty ledger; appears whole or not at all. Does nothing where one exists."""
    if path.exists():
        return
    beside = path.with_name(f".{path.name}.new")
    with explained(path, "create"):
        remove(beside)
        database = sqlite3.connect(beside, isolation_level=None)
        database.execute("PRAGMA page_size = 8192")
        # Not WAL yet: a full disk would let `close` fail in silence to move the log into the
        # file, and what is renamed below would be empty. With a rollback journal COMMIT says so.
        database.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {FIRST_VERSION}; COMMIT;")
        database.close()
        put_in_place(beside, path)


def remove(path: Path) -> None:
    """Remove a database and the side files of its log, the database first."""
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm"), Path(f"{path}-journal")):
        name.unlink(missing_ok=True)


def put_in_place(beside: Path, path: Path) -> None:
    """Rename a closed database to ``path``; what is there goes, and its log with it.

    A log that stayed would be taken for the new database's own and written into it.
    """
    remove(path)
    beside.rename(path)
    sync_folder(path.parent)


def fold_log(path: Path) -> None:
    """Merge the log that a killed writer has left into the database file.

    This comes before the file is replaced: the log would be read as that of the new one.
    """
    if not Path(f"{path}-wal").exists():
        return
    with explained(path, "open"), closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # no shared memory over a network
        database.execute("PRAGMA journal_mode = DELETE")


def open_writer(path: Path) -> sqlite3.Connection:
    """The coordinator's connection: WAL, every commit synced to the disk."""
    with explained(path, "open"):
        database = sqlite3.connect(path, isolation_level=None, cached_statements=64)
        _check_version(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("PRAGMA cache_size = -24576")
        database.execute("PRAGMA wal_autocheckpoint = 4000")
        damage = database.execute("SELECT count(*) FROM meta").fetchone()
        assert damage is not None
        add_worker_code(database)
        if version_of(database) == WITHOUT_KEYS:  # a coordinator died while it listed its plan
            with explained(path, "sort the keys of"):
                database.execute("BEGIN IMMEDIATE")
                add_keys(database)
                database.execute("COMMIT")
        return database


def add_worker_code(database: sqlite3.Connection) -> None:
    """Add the column to a ledger that was made without it; do nothing where it is."""
    if not has_worker_code(database):
        database.execute(WORKER_CODE)


def has_worker_code(database: sqlite3.Connection) -> bool:
    columns = database.execute("PRAGMA table_info(workers)").fetchall()
    return any(column[1] == "code" for column in columns)


def add_metrics(database: sqlite3.Connection) -> None:
    """Make the table of what tasks have logged; do nothing where it is. Within a transaction."""
    if not has_metrics(database):
        for statement in METRICS.strip().split(";")[:-1]:  # a script would commit
            database.execute(statement)


def version_of(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def drop_keys(database: sqlite3.Connection) -> bool:
    """Take the index of keys away, so that many tasks are listed faster; returns whether there was
    one to take. Within a transaction. A ledger of the second format keeps it, or that would be
    forgotten.
    """
    if version_of(database) != FIRST_VERSION:
        return False
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'index' AND name = 'tasks_key'"
    if database.execute(sql).fetchone() is None:
        return False  # it is a part of the table
    database.execute("DROP INDEX tasks_key")
    database.execute(f"PRAGMA user_version = {WITHOUT_KEYS}")
    return True


def add_keys(database: sqlite3.Connection) -> None:
    """Make the index of keys again. Within a transaction."""
    (held,) = database.execute("PRAGMA cache_size").fetchone()
    database.execute(f"PRAGMA cache_size = {_SORTING_CACHE}")
    try:
        database.execute(KEYS)
    finally:
        database.execute(f"PRAGMA cache_size = {held}")
    database.execute(f"PRAGMA user_version = {FIRST_VERSION}")


def has_metrics(database: sqlite3.Connection) -> bool:
    return has_table(database, "metrics")


def has_table(database: sqlite3.Connection, name: str) -> bool:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return database.execute(sql, (name,)).fetchone() is not None


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection; the writer is never kept waiting for longer than a snapshot."""
    if not path.exists():
        raise LedgerError(
            f"There is no ledger at {path}.",
            hint="is this a run folder? `muster list` shows the runs below ./runs.",
        )
    with explained(path, "open"):
        try:
            database = _connect_read_only(path, "mode=ro")
        except sqlite3.OperationalError:
            if not os.access(path, os.R_OK):
                raise LedgerError(
                    f"Cannot read the ledger {path}: Permission denied.",
                    hint="ask the owner of the run for the right to read it.",
                ) from None
            # On a read-only file system WAL's side files cannot be made; nobody writes there.
            database = _connect_read_only(path, "mode=ro&immutable=1")
        _check_version(database, path)
        return database


def _connect_read_only(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{mode}"
    database = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        database.execute("PRAGMA user_version").fetchone()
        database.execute("PRAGMA query_only = ON")
    except sqlite3.Error:
        database.close()
        raise
    return database


def _check_version(database: sqlite3.Connection, path: Path) -> None:
    version = version_of(database)
    if version > SCHEMA_VERSION:
        database.close()
        raise LedgerError(
            f"The ledger {path} was written by a newer muster (format {version}; this one reads "
            f"up to {SCHEMA_VERSION}).",
            hint="upgrade muster: pip install --upgrade muster-gpu. Nothing was changed.",
        )
    if version < 1:
        database.close()
        raise LedgerError(f"{path} is a database, but not a muster ledger.")


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Raise SQLite's errors as LedgerError that says what happened and what can be done."""
    try:
        yield
    except MusterError:
        raise
    except sqlite3.Error as error:
        raise _explain(error, path, doing) from error
    except OSError as error:
        raise LedgerError(f"Cannot {doing} the ledger {path}: {error.strerror}.") from error


#: What SQLite may sort for, in its folder for temporary files.
_SORTING = ("read", "sort the keys of")
#: A disk with more room than that is not the one that was full.
_ROOM = 2**20


def _is_full(path: Path, doing: str) -> bool:
    """Whether the ledger's disk is the one that is full. SQLite says the same of the one on which
    it sorts, from which it has removed by then what it had written.
    """
    return doing not in _SORTING or shutil.disk_usage(path.parent).free < _ROOM


def _refusal(path: Path) -> Refusal | None:
    """Why the ledger or its log does not grow: SQLite has a word for a full disk alone."""
    files = (path, Path(f"{path}-wal"), Path(f"{path}-journal"))
    found = (refusal_of(one, _ROOM) for one in files if one.is_file())
    return next(filter(None, found), None)


def _sorting_folder() -> Path:
    """Where SQLite has its temporary files: the first of these in which it may."""
    named = filter(None, map(variable, ("SQLITE_TMPDIR", "TMPDIR")))
    places = map(Path, (*named, "/var/tmp", "/usr/tmp", "/tmp"))
    may_write = os.W_OK | os.X_OK
    return next((p for p in places if p.is_dir() and os.access(p, may_write)), Path.cwd())


def _explain(error: sqlite3.Error, path: Path, doing: str) -> LedgerError:
    text = str(error)
    if "full" in text and not _is_full(path, doing):
        folder = _sorting_folder()
        return LedgerError(
            f"Cannot {doing} the ledger {path}: the disk of {folder}, where SQLite sorts what is "
            f"large, is full ({text}).",
            hint="everything shown as finished is saved. Free space there, or have the variable "
            "SQLITE_TMPDIR name a folder on another disk; then run the same command.",
        )
    if "full" in text:
        return LedgerError(
            f"The disk of {path} is full, so nothing more can be recorded ({text}).",
            hint="everything shown as finished is saved. Free space, then run the same command.",
        )
    if "I/O" in text and (refusal := _refusal(path)) is not None:
        return LedgerError(
            f"{refusal.what.format(path.parent)}, so nothing more can be recorded ({text}).",
            hint=f"{refusal.hint}. Everything shown as finished is saved.",
        )
    if "malformed" in text or "not a database" in text or "corrupt" in text:
        return LedgerError(
            f"The ledger {path} is damaged ({text}); muster does not touch it further.",
            hint=f"recover what is readable with: sqlite3 {path} .recover > rescued.sql; "
            "or start afresh with another --run-dir.",
        )
    if "readonly" in text or "read-only" in text or "unable to open" in text:
        return LedgerError(
            f"Cannot {doing} the ledger {path}: {text}.",
            hint="check that you may write to this folder, or choose another --run-dir.",
        )
    if "locked" in text:
        return LedgerError(
            f"The ledger {path} is held by another program ({text}).",
            hint="close the database browser that holds it, or wait.",
        )
    return LedgerError(f"Cannot {doing} the ledger {path}: {text}.")
