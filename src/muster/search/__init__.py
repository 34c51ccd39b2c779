"""Which settings are tried next, and which trials end early: pure, and rebuilt by replaying."""
