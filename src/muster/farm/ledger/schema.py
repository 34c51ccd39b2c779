"""The tables of the ledger and their version. See ``store`` for what is promised."""

from __future__ import annotations

#: Raised with every change that an older muster could not read.
SCHEMA_VERSION = 1

#: Added to ledgers that were made without it; older musters read and write them as before. A worker
#: imports its target once, so the code of an attempt is that of its worker.
WORKER_CODE = "ALTER TABLE workers ADD COLUMN code TEXT"

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE targets (target_id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE tasks (
    task_id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    target_id INTEGER NOT NULL,
    payload BLOB NOT NULL,
    grp INTEGER NOT NULL DEFAULT 0,
    priority INTEGER NOT NULL DEFAULT 0,
    state INTEGER NOT NULL DEFAULT 0,
    token INTEGER NOT NULL DEFAULT 0,
    tries INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX tasks_ready ON tasks (priority DESC, grp, task_id) WHERE state = 0;
CREATE INDEX tasks_not_done ON tasks (state) WHERE state <> 2;
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
