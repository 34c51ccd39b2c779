r"""The unit behind a number: known ones with what they measure, any other words as they are.

``split`` divides an answer such as ``12 km/h``, ``\frac{1}{2} cm^2``, ``2 hours 30 minutes`` or
``20\% increase`` into its value and its unit; ``ratio`` says how two units compare. Pure.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

#: What a unit measures: base quantities with their powers, sorted.
Dimension = tuple[tuple[str, int], ...]
#: Dimension -> size in its base unit. Some names have several meanings: a pound, a degree.
Meanings = dict[Dimension, Fraction]

_PLAIN: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "km kilometer kilometre": "1000", "dm decimeter decimetre": "0.1",
        "cm centimeter centimetre": "0.01", "mm millimeter millimetre": "0.001",
        "in inch inches": "0.0254", "ft foot feet": "0.3048", "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "g gram gramme": "0.001", "kg kilogram kilo": "1", "mg milligram": "0.000001",
        "t tonne": "1000", "lb lbs pound": "0.45359237", "oz ounce": "0.028349523125",
        "ton": "907.18474",
    },
    "time": {
        "s sec second": "1", "ms millisecond": "0.001", "min minute": "60", "h hr hour": "3600",
        "day": "86400", "week": "604800",
    },
    "month": {"month": "1", "year yr": "12", "decade": "120", "century centuries": "1200"},
    "dollar": {"dollar buck usd": "1", "cent penny pennies": "0.01", "dime": "0.1",
               "nickel": "0.05", "quarter": "0.25"},
    "euro": {"euro eur €": "1"},
    "gbp": {"£ gbp pound": "1", "pence": "0.01"},
    "rupee": {"rupee rs inr": "1"},
    "yen": {"yen ¥": "1"},
    "yuan": {"yuan": "1"},
    "angle": {"degree deg °": "1"},
    "radian": {"radian rad": "1"},
    "celsius": {"celsius centigrade degree deg °": "1"},
    "fahrenheit": {"fahrenheit degree deg °": "1"},
    "kelvin": {"kelvin": "1"},
    "force": {"n newton": "1"},
    "energy": {"j joule": "1", "kj kilojoule": "1000"},
    "power": {"w watt": "1", "kw kilowatt": "1000"},
    "voltage": {"v volt": "1"},
    "current": {"amp ampere": "1"},
    "frequency": {"hz hertz": "1", "khz": "1000"},
}  # fmt: skip
_VOLUMES = {
    "l liter litre": "0.001", "ml milliliter millilitre": "0.000001",
    "cl centiliter centilitre": "0.00001", "dl deciliter decilitre": "0.0001",
    "gallon gal": "0.003785411784", "quart": "0.000946352946", "pint": "0.000473176473",
    "cup": "0.0002365882365",
}  # fmt: skip
_SPEEDS = {"mph": "0.44704", "kph kmh": "5/18"}
#: Alone behind a number they may be variables: they count as units behind a space only.
_LETTERS = frozenset("mgthslLJNWV")
_POWERS_AHEAD = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3, "²": 2, "³": 3}
#: Words behind a unit that say nothing about the amount.
_FILLERS = frozenset({
    "old", "long", "wide", "tall", "high", "deep", "away", "each", "total", "altogether",
    "exactly", "approximately",
})  # fmt: skip
#: Units of no kind in particular.
_ANY = frozenset({"unit", "units"})
#: Words that change the number before them in a way that is not known here.
_CHANGERS = frozenset({
    "below", "under", "above", "over", "less", "fewer", "more", "than", "remainder", "plus",
    "minus", "times", "squared", "cubed", "half", "halves", "third", "thirds", "quarters",
    "short", "negative",
})  # fmt: skip
#: Words that belong to mathematics: the text is not divided there.
_MATHEMATICS = frozenset({
    "pi", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "sqrt", "mod", "or",
    "and", "to", "choose",
})  # fmt: skip
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6,
                "billion": 10**9, "trillion": 10**12}  # fmt: skip


def _table() -> dict[str, Meanings]:
    found: dict[str, Meanings] = {}

    def add(names: str, dimension: Dimension, size: str) -> None:
        for name in names.split():
            found.setdefault(name, {})[dimension] = Fraction(size)

    for quantity, units in _PLAIN.items():
        for names, size in units.items():
            add(names, ((quantity, 1),), size)
    for names, size in _VOLUMES.items():
        add(names, (("length", 3),), size)
    for names, size in _SPEEDS.items():
        add(names, (("length", 1), ("time", -1)), size)
    return found


_UNITS = _table()
#: Only these are known by one capital letter or more; all other names are read in lower case.
_CAPITALS = {"L": "l", "N": "n", "J": "j", "W": "w", "V": "v", "C": "celsius", "F": "fahrenheit",
             "K": "kelvin"}  # fmt: skip
_TOKEN = re.compile(r"[A-Za-z]+|[°€£¥²³/·*]|\^\{?-?\d\}?|\\cdot|\\times|\.")


#: Temperatures that are counted in degrees.
_SCALES: set[Dimension] = {(("celsius", 1),), (("fahrenheit", 1),)}
#: The same kind of quantity, between which no factor is exact, or there is more than a factor.
_ALIKE = ({"month", "time"}, {"angle", "radian"}, {"celsius", "fahrenheit", "kelvin"})


class OtherWords(Exception):
    """Both sides have words behind the number, and they are not the same."""


class NotConvertible(Exception):
    """Two units of one kind of quantity that no factor converts."""


class Unit(NamedTuple):
    """``meanings`` of a known unit, or else the ``words`` that stand there."""

    meanings: Meanings | None
    words: str = ""


class Quantity(NamedTuple):
    """``value``: the text of the number; ``unit``: None where there is none.

    ``percent``: a percent sign stood behind the number. ``is_changed``: words change the number in
    a way that is not known here.
    """

    value: str
    unit: Unit | None = None
    percent: bool = False
    is_changed: bool = False


def known(text: str) -> Meanings | None:
    """What a unit's text means: ``km/h``, ``square feet``, ``cm^{2}``, ``miles per hour``."""
    text = text.strip().rstrip(".")
    if _TOKEN.sub("", text).strip():
        return None  # more stands there than parts of a unit
    factors: list[tuple[Meanings, int]] = []  # units and their powers
    sign, ahead = 1, 1  # -1 behind "per"; 2 behind "square"
    is_behind_unit = False
    for token in _TOKEN.findall(text):
        word = token.lower()
        if token in ("/", "per", "a", "an"):
            if not factors:
                return None
            sign, is_behind_unit = -1, False
        elif token in ("·", "*", "\\cdot", "\\times", "."):
            is_behind_unit = False
        elif word in _POWERS_AHEAD:
            ahead = _POWERS_AHEAD[word]
        elif word in _POWERS_BEHIND or token.startswith("^"):
            if not is_behind_unit:
                return None
            meanings, power = factors[-1]
            factors[-1] = meanings, power * (_POWERS_BEHIND.get(word) or int(token.strip("^{}")))
            is_behind_unit = False
        elif word not in _FILLERS or not factors:
            found = _of_name(token)
            if found is None:
                return None
            if is_behind_unit and found.keys() <= _SCALES & factors[-1][0].keys():
                factors[-1] = found, factors[-1][1]  # degrees Celsius: one unit
                continue
            factors.append((found, sign * ahead))
            ahead, is_behind_unit = 1, True
    units = (_power(meanings, power) for meanings, power in factors)
    number: Meanings = {(): Fraction(1)}
    return functools.reduce(_times, units, number) if factors else None


def split(text: str, *, letters: bool = False) -> Quantity:
    """The value of a tidied answer and its unit; without a unit where none is recognised.

    ``letters``: ``3m`` is 3 metres, and not 3 times a variable.
    """
    compound = _compound(text)
    if compound is not None:
        return compound
    for begin in _BEGIN.finditer(text):
        value, rest = text[: begin.start()].rstrip(), text[begin.start() :].strip()
        if not value or not _is_amount(value):
            continue
        percent = _PERCENT.match(rest)
        if percent is not None:
            words = rest[percent.end() :].strip().rstrip(".")
            if words and not _WORDS.fullmatch(words):
                return Quantity(text)
            return Quantity(value, Unit(None, _normal(words)) if words else None, percent=True)
        is_apart = text[begin.start()].isspace() or not rest[0].isalpha()
        rest = rest.replace("^\\circ", "°").replace("^{\\circ}", "°").replace("\\degree", "°")
        meanings = known(rest)
        if meanings is not None and (is_apart or letters or rest not in _LETTERS):
            return Quantity(value, Unit(meanings))
        words = rest.rstrip(".")
        if not is_apart or not NUMBER.fullmatch(value) or not _WORDS.fullmatch(words):
            continue
        return _with_words(text, value, words)
    is_changed = NUMBER.match(text) and _CHANGERS & set(
        re.findall(r"(?<![\\a-z])[a-z]+", text.lower())
    )
    return Quantity(text, is_changed=bool(is_changed))


def ratio(ours: Unit | None, theirs: Unit | None) -> Fraction | None:
    """How many of ``theirs`` one of ``ours`` is; 1 where only one side has a unit.

    None: both are known and measure different things. Raises OtherWords where words differ that are
    not known here, and NotConvertible where only a convention would help: days in a month.
    """
    if ours is None or theirs is None:
        return Fraction(1)
    if ours.meanings is None or theirs.meanings is None:
        if ours.meanings is None and theirs.meanings is None and ours.words == theirs.words:
            return Fraction(1)
        raise OtherWords
    for dimension, size in ours.meanings.items():
        if dimension in theirs.meanings:
            return size / theirs.meanings[dimension]
    kinds = [{d[0][0] for d in each if d} for each in (ours.meanings, theirs.meanings)]
    if any(alike & kinds[0] and alike & kinds[1] for alike in _ALIKE):
        raise NotConvertible
    return None


NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")
_BEGIN = re.compile(r"\s(?=\S)|(?<=[\d}).])(?=[A-Za-z°€£¥%]|\\%|\^\{?\\circ|\\degree)")
_PERCENT = re.compile(r"\\?%|percent\b|per cent\b")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ /.'-]+[A-Za-z]+)*")
_PART = re.compile(rf"({NUMBER.pattern})\s*([A-Za-z]+)")


def _of_name(token: str) -> Meanings | None:
    if token in _CAPITALS:
        return _UNITS[_CAPITALS[token]]
    if len(token) == 1 and token.isupper():
        return None
    name = token.lower()
    for form in (name, name.removesuffix("s"), name.removesuffix("es")):
        if form in _UNITS and not (len(form) == 1 and form != name):
            return _UNITS[form]
    return None


def _power(meanings: Meanings, power: int) -> Meanings:
    return {
        tuple((name, each * power) for name, each in dimension): size**power
        for dimension, size in meanings.items()
    }


def _times(left: Meanings, right: Meanings) -> Meanings:
    found: Meanings = {}
    for first, size in left.items():
        for second, other in right.items():
            powers = dict(first)
            for name, power in second:
                powers[name] = powers.get(name, 0) + power
            found[tuple(sorted((n, p) for n, p in powers.items() if p))] = size * other
    return found


def _is_amount(value: str) -> bool:
    """Whether ``value`` is a number, and not an expression with variables or a sentence."""
    without = re.sub(r"\\[A-Za-z]+", " ", value)
    is_plain = re.search(r"[A-Za-z]", without.partition("=")[2] or without) is None
    return is_plain and (value[-1] in "0123456789}).]" or value.endswith("\\pi"))


def _with_words(text: str, value: str, words: str) -> Quantity:
    parts = words.lower().replace("-", " ").split()
    if _MATHEMATICS & set(parts):
        return Quantity(text)
    factor = 1
    while parts and parts[0].removesuffix("s") in _MULTIPLIERS:
        factor *= _MULTIPLIERS[parts.pop(0).removesuffix("s")]
    if factor > 1:
        value = _plain(Fraction(value.replace(",", "")) * factor)
        if not parts:
            return Quantity(value)
        meanings = known(" ".join(parts))
        if meanings is not None:
            return Quantity(value, Unit(meanings))
    if _CHANGERS & set(parts):
        return Quantity(text, is_changed=True)
    if set(parts) <= _ANY.union(_POWERS_AHEAD, _POWERS_BEHIND):
        return Quantity(value)
    return Quantity(value, Unit(None, _normal(" ".join(parts))))


def _compound(text: str) -> Quantity | None:
    """``2 hours 30 minutes``, ``5 dollars and 50 cents``: one amount, in the first unit."""
    place, total, first = 0, Fraction(0), None
    num = 0
    for part in _PART.finditer(text):
        between = text[place : part.start()].strip(" ,")
        if between not in ("", "and"):
            return None
        meanings = _of_name(part.group(2))
        if meanings is None:
            return None
        first = first or meanings
        shared = [dimension for dimension in first if dimension in meanings]
        if not shared:
            return None
        amount = Fraction(part.group(1).replace(",", ""))
        total += amount * meanings[shared[0]] / first[shared[0]]
        place, num = part.end(), num + 1
    if num < 2 or first is None or text[place:].strip(" ."):
        return None
    return Quantity(_plain(total), Unit(first))


def _plain(number: Fraction) -> str:
    """Text that reads back as the same number where it is a finite decimal."""
    scale = 0
    while scale < 20 and (number * 10**scale).denominator != 1:
        scale += 1
    if scale == 20:
        return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
    digits = f"{abs(int(number * 10**scale)):0{scale + 1}d}"
    whole, rest = (digits[:-scale], digits[-scale:]) if scale else (digits, "")
    return f"{'-' * (number < 0)}{whole}{'.' * bool(rest)}{rest}"


def _normal(words: str) -> str:
    """Words that mean the same written the same: lower case, without a plural's s."""
    parts = [part.removesuffix("s") for part in re.split(r"[^a-z]+", words.lower()) if part]
    return " ".join(part for part in parts if part not in _FILLERS)
