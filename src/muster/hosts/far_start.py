"""What a host's shell is told, so that a Python there becomes the far end of a connection."""

from __future__ import annotations

import shlex
import string
import sys
from collections.abc import Sequence

HELLO = b"muster-far-end"
#: The first that has Muster, else the first that there is: it says at least what is missing. Each
#: looks for itself, as starting one Python to look and another to work takes twice as long.
_FIND_PYTHON = """\
{setup}
set -- {candidates}
for each; do
  command -v "$each" >/dev/null 2>&1 || continue
  first="${{first:-$each}}"
  [ $# -gt 1 ] || break
  "$each" -uc '{program}' or-another; code=$?
  case $code in 1|2|96|126|127) ;; *) exit $code; esac
done
[ -n "$first" ] || {{ echo "there is no python3" >&2; exit 127; }}
exec "$first" -uc '{program}'
"""
#: Once it has begun it ends with none of those exit codes.
PROGRAM = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("this Python is too old: " + sys.version.split()[0])
import importlib.util, os, traceback
if len(sys.argv) > 1 and importlib.util.find_spec("muster") is None:
    sys.exit(96)
sys.stdout.buffer.write(b"\\nmuster-far-end\\n")
sys.stdout.flush()
try:
    exec(compile(sys.stdin.buffer.read({size}), "far_end", "exec"))
except BaseException:
    traceback.print_exc()
os._exit(3)
"""
#: In this shell, for what it sets; not with what is sent to Python as its stdin.
_SETUP = """\
eval {line} </dev/null >&2 || {{ echo "muster: --setup has failed: "{line} >&2; exit 97; }}"""
#: Some shells take no longer word.
_WORD_CHARS = 500
_PLAIN = frozenset(string.ascii_letters + string.digits + " /:.,_=-")


def start_words(python: str | None, setup: Sequence[str], size: int) -> list[str]:
    """A command that starts the far end, whose program has so many bytes and comes on its stdin."""
    candidates = [python] if python else [sys.executable, "python3", "python"]
    lines = [_SETUP.format(line=shlex.quote(line)) for line in setup]
    script = _FIND_PYTHON.format(
        setup="\n".join(lines),
        candidates=shlex.join(candidates),
        program=PROGRAM.format(size=size),
    )
    return ["bash", "-lc", script] if setup else ["sh", "-c", script]


def for_any_shell(words: Sequence[str]) -> str:
    """A line for the login shell of a host, which may be one of the csh family or fish: they read
    quotes, backslashes, "!" and ends of lines each in a way of their own, so the line has none.
    """
    *shell, script = words
    kept = "".join(char if char in _PLAIN else _octal(char) for char in script)
    pieces = []
    while kept:
        piece = kept[:_WORD_CHARS]
        cut = piece.rfind("\\", -5)  # not within an escape
        piece = piece[:cut] if cut > 0 and len(kept) > _WORD_CHARS else piece
        pieces.append(f"'{piece}'")
        kept = kept[len(piece) :]
    return f'exec {shlex.join(shell)} \'eval "$(printf %b "$@")"\' sh {" ".join(pieces)}'


def _octal(char: str) -> str:
    return "".join(f"\\0{byte:03o}" for byte in char.encode())
