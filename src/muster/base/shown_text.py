"""Users' text made fit to be shown: without what a terminal obeys, and without secrets; and numbers
with their nouns. Pure.

Parameters, names, messages and log lines come from programs, other users and file names. Shown on
a terminal they must not move the cursor, set the title, hide or reverse what stands beside them;
a page that is passed on must not show values of flags and settings that are named like secrets.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m\Z")
_COLOUR_OFF = "\x1b[0m"
#: Whole sequences: CSI (cursor, colours), strings up to their end (OSC, DCS, PM, APC), two-letter
#: ones. What is left of a broken one falls to the last alternative or to ``_UNSEEN``.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
#: C0 and C1 controls, what turns the direction of writing, line separators, lone surrogates.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Bytes of a name that Python could not read, such as UTF-8 where it takes all for ASCII (LANG=C).
_UNREAD = re.compile(r"[\udc80-\udcff]+")
_MOST_CHARS = 500


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> count(1, "task"), count(1200, "task"), count(0, "process", "processes")
    ('1 task', '1,200 tasks', '0 processes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """Numbers in their order, neighbours as a range.

    >>> number_ranges([2, 0, 1, 5])
    ['0-2', '5']
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]


def shell_word(text: object) -> str:
    """``text``, mostly a path, as one word of a command that a user may paste.

    >>> print(f"muster status {shell_word('my runs/a')}")
    muster status 'my runs/a'
    """
    return shlex.quote(str(text))


def shown_mib(mib: float, *, up: bool = False) -> str:
    """An amount of memory; ``up``: rounded so that it is shown above what it is above.

    >>> shown_mib(12288), shown_mib(12289, up=True), shown_mib(299.5)
    ('12 GiB', '12.1 GiB', '300 MiB')
    """
    if mib < 1024:
        return f"{math.ceil(mib) if up else round(mib)} MiB"
    gib = math.ceil(mib / 102.4) / 10 if up else mib / 1024
    return f"{gib:.1f}".removesuffix(".0") + " GiB"


def clean_text(text: str, *, colours: bool = False) -> str:
    """``text`` with its lines and tabs, and nothing that a terminal obeys.

    Escape sequences go; other controls, bidirectional overrides and lone surrogates are written
    out. ``colours``: those of a log stay, and end with the text.

    >>> clean_text("a\\x1b]0;title\\x07b \\x1b[31mred\\x1b[0m\\r\\n\\x08 \\u202e \\udcff")
    'ab red\\n\\\\x08 \\\\u202e \\\\udcff'
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not _UNSEEN.search(text):
        return text
    text = with_names_read(text)
    if not colours:
        return _UNSEEN.sub(_written_out, _SEQUENCE.sub("", text))
    parts: list[str] = []
    start, is_coloured = 0, False
    for found in _SEQUENCE.finditer(text):
        parts.append(_UNSEEN.sub(_written_out, text[start : found.start()]))
        start = found.end()
        if _COLOUR.match(found[0]):
            parts.append(found[0])
            is_coloured = True
    parts.append(_UNSEEN.sub(_written_out, text[start:]))
    return "".join(parts) + (_COLOUR_OFF if is_coloured else "")


def with_names_read(text: str) -> str:
    """``text`` with the bytes of names that are UTF-8 as the signs that they mean.

    >>> with_names_read("l\\udcc3\\udca4uf \\udcff")
    'läuf \\udcff'
    """
    return _UNREAD.sub(_read, text)


def _read(found: re.Match[str]) -> str:
    try:
        meant = found[0].encode("ascii", "surrogateescape").decode()
    except UnicodeDecodeError:
        return found[0]
    return found[0] if _UNSEEN.search(meant) else meant


def one_line(text: str, most: int = _MOST_CHARS) -> str:
    """`clean_text` on one line of ``most`` characters: for cells, names and messages.

    >>> one_line("two\\nlines\\t\\x1b[2J"), one_line("x" * 9, 4)
    ('two lines ', 'xxx…')
    """
    # Cut before as well: of a megabyte only the start is looked at.
    cleaned = clean_text(text[: 8 * most]).replace("\n", " ").replace("\t", " ")
    whole = len(cleaned) <= most and len(text) <= 8 * most
    return cleaned if whole else cleaned[: most - 1] + "…"


def shortened(text: str, most: int = _MOST_CHARS) -> str:
    """``text`` with as much of its begin and its end as ``most`` characters hold.

    >>> shortened("0123456789", 7), shortened("short", 7)
    ('012…789', 'short')
    """
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def json_text(text: str) -> str:
    """A JSON document with the same content in which nothing is left that a terminal obeys."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


HIDDEN = "…"
# These are texts, which `re` compiles where one is asked for the first time: it takes as long as to
# import the half of a module, and neither a worker nor most commands ask.
_SECRET = (
    r"(?i)(^|[-_./])(api[-_]?key|apikey|[a-z0-9]*(passw(or)?d|passphrase)|pwd|pw|secrets?"
    r"|credentials?|auth|bearer|[a-z0-9]+[-_]key|([a-z0-9]+[-_])?token)$"
)
#: Keys of tables and tokens of vocabularies.
_HARMLESS = (
    r"(?i)(^|[-_./])(sort|text|label|image|data|target|input|output|group|primary|index|join|batch"
    r"|prompt|cache|metric|monitor|score|answer|question|eos|bos|pad|unk|sep|cls|mask|start|end"
    r"|stop|special|next|per|num|max|min|new|first|last|each)[-_](key|token)$"
)
#: As the services that give them out write them.
_LOOKS_SECRET = (
    r"\b(sk-[\w-]{12,}|hf_\w{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abpr]-[\w-]{10,}|glpat-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    # In an address: a name with its password, a token alone, and what is named like a secret.
    r"|(?<=://)[^\s/?#'\":]*:(?P<password>[^\s/?#'\"]+)(?=@)|(?<=://)[\w.~%-]{16,}(?=@)"
    # A password may have what ends the name of a host, but that is no port.
    r"|(?<=://)[^\s/?#'\":@]*:(?!\d{1,5}[/?#])(?P<odd>[^\s'\"@]+)(?=@)"
    r"|(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^\s&#'\"]+)"
)
#: Where words of a name in camel case begin.
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_IN_A_QUERY = re.compile(r"(^|[-_.])(key|sig|signature)$", re.I)
#: Anything shorter would hide the half of a page.
_LEAST_CHARS = 6
#: Values that are called key are often names; keys that services give out are longer.
_LEAST_KEY_CHARS = 16


@lru_cache(maxsize=1024)  # asked of each task's settings, which have the same names
def is_secret_name(name: str) -> bool:
    """Whether the value that has this name should not be shown.

    >>> [is_secret_name(name) for name in ("token", "wandb-key", "api_key", "db.password")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("accessToken", "dbPassword", "PGPASSWORD", "padToken")]
    [True, True, True, False]
    >>> [is_secret_name(name) for name in ("max_tokens", "pad_token", "sort-key", "key", "author")]
    [False, False, False, False, False]
    """
    name = _WORD.sub("_", name)
    return re.search(_SECRET, name) is not None and re.search(_HARMLESS, name) is None


def command_line(argv: Sequence[str]) -> str:
    """The words as a shell takes them, without the secrets in them."""
    return " ".join(
        hidden if hidden != word else shlex.quote(word)
        for word, (hidden, _) in zip(argv, map(_split, argv, _before(argv)), strict=True)
    )


@lru_cache
def shown_line(text: str) -> str:
    """A line of words, such as the target of a command sweep, without the secrets in it."""
    words = text.split(" ")
    return " ".join(
        _split(word, before)[0] for word, before in zip(words, _before(words), strict=True)
    )


def secrets_of(argv: Sequence[str], *settings: Mapping[str, Any]) -> frozenset[str]:
    """The secrets in a command line and in settings, wherever they stand again."""
    found = [secret for word, before in zip(argv, _before(argv), strict=True)
             for secret in _split(word, before)[1]]  # fmt: skip
    for values in settings:
        found += _in_settings(values, is_secret=False)
    return frozenset(secret for secret in found if len(secret) >= _LEAST_CHARS)


def hide_secrets(value: Any) -> Any:
    """A setting, or a dict or list of them, without the secrets in it. A list of texts may be the
    words of a command, in which a secret stands behind its flag.

    >>> hide_secrets({"lr": 0.1, "flags": [{"api_key": "xyz"}], "args": ["--token", "abc"]})
    {'lr': 0.1, 'flags': [{'api_key': '…'}], 'args': ['--token', '…']}
    >>> hide_secrets({"d_key": 64, "class_token": True, "n_token": [8, 16], "token": 12345678})
    {'d_key': 64, 'class_token': True, 'n_token': [8, 16], 'token': '…'}
    """
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if item and is_secret_name(str(name)) and not _is_plain(item)
            else hide_secrets(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        words = [item if isinstance(item, str) else "" for item in value]
        return [
            _split(item, before)[0] if isinstance(item, str) else hide_secrets(item)
            for item, before in zip(value, _before(words), strict=True)
        ]
    return shown_line(value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """``text`` without what looks like a secret, wherever it comes from.

    >>> without_secrets("login with hf_abcdefghijkl failed")
    'login with … failed'
    >>> without_secrets("ssh://git@host/a http://me:open-sesame@host/?page=2&api_key=xyz#top")
    'ssh://git@host/a http://…@host/?page=2&api_key=…#top'
    >>> without_secrets("http://a@b.c:open@proxy postgresql://me:o/pe#n@host http://h:80/@a")
    'http://…@proxy postgresql://…@host http://h:80/@a'
    """
    return re.sub(_LOOKS_SECRET, _hidden, text)


def safe_line(text: str, most: int = _MOST_CHARS) -> str:
    """`one_line` without what looks like a secret."""
    return one_line(without_secrets(text[: 8 * most]), most)


def _hidden(found: re.Match[str]) -> str:
    if not _is_secret(found):
        return found[0]
    return f"{found['name']}={HIDDEN}" if found["name"] else HIDDEN


def _is_secret(found: re.Match[str]) -> bool:
    name = found["name"]
    return name is None or is_secret_name(name) or _IN_A_QUERY.search(name) is not None


def _before(argv: Sequence[str]) -> list[str]:
    return ["", *argv[:-1]] if argv else []


def _split(word: str, before: str) -> tuple[str, list[str]]:
    """``word`` as it is shown, and the secrets in it; ``before`` is the word in front of it."""
    name, equals, value = word.partition("=")
    if equals and name in ("--grid", "--zip"):
        inner, secrets = _split(value, "")
        return (f"{name}={inner}" if secrets else word), secrets
    if equals and is_secret_name(name.lstrip("-")):
        parts = (part.strip("'\" []") for part in value.split(","))
        return f"{without_secrets(name)}={HIDDEN}", [value, *parts, *_found_in(word)]
    from muster.base.flags import kind_of_word  # here: it takes longer than all of `muster --help`

    # Any program's words, which nothing has parsed: what follows a flag may be its value.
    has_flag = kind_of_word(before) == "flag" and "=" not in before
    is_value = has_flag and kind_of_word(word) == "value"
    if is_value and is_secret_name(before.lstrip("-")):
        return HIDDEN, [word]
    return without_secrets(word), _found_in(word)


def _found_in(word: str) -> list[str]:
    """What in a word looks like a secret wherever it stands again."""
    return [
        found["value"] or found["password"] or found["odd"] or found[0]
        for found in re.finditer(_LOOKS_SECRET, word)
        # ?key=validation is hidden there, but not wherever a page says validation.
        if _is_secret(found) and (found["name"] is None or _is_key(found["name"], found["value"]))
    ]


def _is_key(name: str, value: str) -> bool:
    return is_secret_name(name) or (len(value) >= _LEAST_KEY_CHARS and not value.isalpha())


def _is_plain(value: Any) -> bool:
    """Whether no secret looks like this, whatever its name: a switch, a share, a size."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_small = isinstance(value, int) and abs(value) < 10 ** (_LEAST_CHARS - 1)
    return is_small or isinstance(value, float)


def _in_settings(value: Any, *, is_secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _in_settings(item, is_secret=is_secret or is_secret_name(str(name)))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _in_settings(item, is_secret=is_secret)
    elif is_secret and isinstance(value, str):
        yield value
