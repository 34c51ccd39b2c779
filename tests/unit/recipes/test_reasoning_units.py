r"""Answers with units, percent signs and words: a table of pairs, and what no pair may break."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_recipes.reasoning.referee import Referee
from muster_recipes.reasoning.units import known
from muster_recipes.reasoning.verify import asks_percent, verify

#: (reference, answer) -> by our own rules, which the library is never asked about.
RULED: dict[str, list[tuple[str, str]]] = {
    "correct": [
        # a unit on one side only, or the same on both
        ("12 hours", "12 hours"), ("12 hours", "12"), ("12", "12 hours"), ("12 hours", "12 h"),
        ("12 hours", "12 hrs"), ("12 hour", "12 hours"), ("12 cm", r"12\text{ cm}"),
        (r"12\text{cm}", "12 cm"), (r"12\mathrm{cm}", "12 centimeters"), ("12", r"12\text{m}"),
        ("5 cm^2", "5 square centimetres"), ("5 cm^2", "5 cm²"), ("5 cm^{2}", "5 sq cm"),
        ("5 cm^3", "5 cubic centimeters"), ("5 square units", "5"), ("5 units", "5 cm"),
        ("60 km/h", "60 km per hour"), ("60 miles per hour", "60 mph"), ("18 apples", "18 apple"),
        ("18 apples", "18"), ("7 even", "7"), ("3 pm", "3"), ("12 cm long", "12 cm"),
        ("3 years old", "3 years"), (r"90^\circ", "90"), (r"90^\circ", "90 degrees"),
        (r"90^{\circ}", "90°"), ("90 degrees", r"90^\circ"), ("20 °C", "20 degrees Celsius"),
        ("5 degrees", "5 degrees Celsius"), (r"5^\circ\text{C}", "5 celsius"), ("3 lb", "3 pounds"),
        ("5 J/°C", "5 joules per degree Celsius"), ("5 J/°C", "0.005 kJ/celsius"),
        # converted
        ("15 minutes", "0.25 hours"), ("1 hour", "60 minutes"), ("1 km", "1000 m"),
        ("2 hours 30 minutes", "150 minutes"), ("2 hours and 30 minutes", "2.5"),
        ("5 dollars 50 cents", "5.5"), (r"\$5.50", "550 cents"), ("1 dollar", "100 cents"),
        ("5 feet 6 inches", "66 inches"), ("36 km/h", "10 m/s"), ("1 m^2", "10000 cm^2"),
        ("1 L", "1000 mL"), ("1 liter", "1000 cm^3"), ("2 weeks", "14 days"), ("1 kg", "1000 g"),
        ("1 inch", "2.54 cm"), ("24 months", "2 years"), ("3 quarters", "75 cents"),
        # money
        (r"\$18", "18"), ("$18", "18 dollars"), ("18 dollars", r"\$18.00"), ("$18$", "18"),
        ("$1,234.50", "1234.5"), ("18 USD", "$18"),
        # words that are factors
        ("3 million", "3000000"), ("3 million dollars", r"\$3,000,000"), ("2 dozen", "24"),
        ("1.5 billion", "1,500,000,000"), ("1e6", "1000000"), ("1e6", "1 million"),
        # percent means hundredths
        (r"50\%", "0.5"), ("0.5", "50%"), (r"50\%", "50 percent"), ("5%", "0.05"),
        ("20% increase", "20% increase"), ("20% increase", "20%"), ("100%", "1"),
        ("12.5%", r"12.5\%"), ("4 remainder 2", "4 remainder 2"), ("5 below zero", "5 below zero"),
    ],
    "wrong": [
        ("12 hours", "12 minutes"), ("3 ft", "3 in"), ("10 km/h", "10 m/s"), ("5 cm^2", "5 cm^3"),
        ("5 cm^2", "5 cm"), ("5 cm²", "5 cm³"), ("100 dollars", "100 cents"), ("12cm", "12m"),
        ("12 cm", "12 m"), ("12cm", "12 m"), ("12 kg", "12 km"), ("12 kg", "12 g"),
        ("$5", "5 cents"),
        (r"\$5", "5 cents"), ("5 cents", "$5"), ("5 dollars", "5 euros"), ("5 €", "$5"),
        ("5 £", "5 dollars"), ("12 hours", "12 cm"), ("15 minutes", "0.3 hours"),
        ("1 hour", "61 minutes"), ("2 hours 30 minutes", "140 minutes"), ("5 feet 6 inches", "5.6"),
        ("60 km/h", "60 km"), ("9 m/s", "9 m/s^2"), ("9 m/s^2", "9 m/s"), ("3 kW", "3 W"),
        ("1 million", "1"), ("3 million", "3 billion"), ("2 dozen", "2"), ("12 mL", "12 L"),
        ("12 square feet", "12 cubic feet"), ("12 square feet", "12 feet"), ("7 oz", "7 cm"),
        ("12 hours", "13 hours"), ("12 hours", "13"), ("18 apples", "19 pears"), ("4 N", "4 J"),
        (r"50\%", "50"), ("50", r"50\%"), (r"50\%", "0.05"), ("5%", "0.5"), ("100%", "100"),
        ("20% increase", "30% decrease"), (r"90^\circ", "90 cm"), ("3 miles", "3 mph"),
        ("2 weeks", "2 days"), ("1 year", "1 month"), ("1e6", "1e7"), ("1 inch", "2.5 cm"),
        ("5 ms", "5 s"), ("8 gallons", "8 quarts"), ("8 yards", "8 feet"), ("-5 cm", "5 cm"),
    ],
    "unparsed": [
        ("20% increase", "20% decrease"), ("3 pm", "3 am"), ("9 north", "9 south"),
        ("3 left", "3 right"), ("18 apples", "18 pears"), ("18 apples", "18 cm"),
        ("5 below zero", "5"), ("5", "5 below zero"), ("5 below zero", "5 above zero"),
        ("10 less than x", "10"), ("4 remainder 2", "4"), ("4 remainder 2", "4 remainder 3"),
        ("5 degrees Celsius", "5 degrees Fahrenheit"), ("1 year", "365 days"), ("5 more", "5"),
        (r"90^\circ", "90 rad"), ("5 profit", "5 loss"), ("2 pints up", "2 pints down"),
        ("5 halves", "5"), ("5 J/°C", "5 °C"), ("5 J per degree Celsius", "5 degrees Celsius"),
    ],
}  # fmt: skip
#: By the library, on what is left without the units.
ASKED: list[tuple[str, str, str]] = [
    (r"\frac{1}{2}\text{ cm}", r"\frac12\text{ m}", "wrong"),
    (r"\frac{1}{2}\text{ cm}", r"\frac12\text{ cm}", "correct"),
    (r"\frac{1}{2}\text{ cm}", "0.5", "correct"),
    (r"\frac{1}{2}\text{ hours}", "30 minutes", "correct"),
    (r"\frac{1}{2} \text{ m}", "50 cm", "correct"),
    (r"12\pi \text{ cm}", r"12 \pi", "correct"),
    (r"12\pi \text{ cm}", r"12\pi \text{ cm}^2", "wrong"),
    (r"33\frac{1}{3}\%", r"\frac{1}{3}", "correct"),
    (r"\frac{1}{2}", r"50\%", "correct"),
    (r"\frac{1}{2}\%", "0.5", "wrong"),
    (r"3\sqrt{2}\text{ cm}", r"\sqrt{18}", "correct"),
    (r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}\text{ mm}", "wrong"),
    ("3x", "3", "wrong"), ("3 x", "3", "wrong"), ("3m", "3", "correct"), ("2x", "2 x", "correct"),
    ("1/2", "0.5", "correct"), (r"\frac{3}{4}", "3/4", "correct"), ("1/3", "0.333", "wrong"),
    (r"\sqrt{8}", r"2\sqrt{2}", "correct"), (r"\sqrt{2}", "1.414", "wrong"),
    ("[1,2)", "[1,2]", "wrong"), (r"\{1,2,3\}", r"\{3,2,1\}", "correct"),
    ("(1,2)", "(2,1)", "wrong"),
    ("x=5", "5", "correct"), ("(x+1)^2", "x^2+2x+1", "correct"), ("x>3", "x<3", "wrong"),
    (r"2\frac{1}{2}", "2.5", "correct"), ("10^6", "1000000", "correct"), ("8", "2^3", "correct"),
    (r"6.02\times 10^{23}", "6.02e23", "correct"), (r"\pm 2", "2", "wrong"),
    ("5", "5 or 6", "wrong"),
    ("2,3", "2", "wrong"), ("12:30", "12.5", "wrong"), (r"2 \pi", "2", "wrong"),
    ("2 sin x", "2", "wrong"), ("1+2i", "2i+1", "correct"), (r"\infty", r"\infty", "correct"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", "wrong"),
]  # fmt: skip


def _decimals(answer: str, reference: str) -> bool | None:
    """The library's part of the ruled pairs: decimals that differ, and nothing else."""
    return Fraction(answer.replace(",", "")) == Fraction(reference.replace(",", ""))


@pytest.fixture
def judge() -> Iterator[Referee]:
    judge = Referee()
    yield judge
    judge.close()


def test_the_table_is_large() -> None:
    assert sum(map(len, RULED.values())) + len(ASKED) >= 150


@pytest.mark.parametrize("verdict", RULED)
def test_rules_decide_units_and_words(verdict: str) -> None:
    found = {pair: verify(pair[1], pair[0], "", _decimals) for pair in RULED[verdict]}
    assert {pair: each for pair, each in found.items() if each != verdict} == {}


@pytest.mark.parametrize("verdict", RULED)
def test_reference_and_answer_may_change_places(verdict: str) -> None:
    found = {pair: verify(pair[0], pair[1], "", _decimals) for pair in RULED[verdict]}
    assert {pair: each for pair, each in found.items() if each != verdict} == {}


def test_the_library_compares_what_is_left_without_units(judge: Referee) -> None:
    found = [verify(answer, reference, "", judge.compare) for reference, answer, _ in ASKED]
    wanted = [verdict for _, _, verdict in ASKED]
    assert [
        (case, verdict) for case, verdict in zip(ASKED, found, strict=True) if verdict != case[2]
    ] == []
    assert found == wanted


@pytest.mark.parametrize(
    ("problem", "is_asked"),
    [
        ("What percent of 50 is 25?", True),
        ("By what percentage did it grow?", True),
        ("He had 20. Find the discount. Express your answer as a percent.", True),
        ("What is 20 percent of 50?", False),
        ("A price rose by 20%. What is it now?", False),
        ("What is the probability of heads?", False),
        ("", False),
    ],
)
def test_a_percentage_is_asked_for_or_given(problem: str, is_asked: bool) -> None:
    assert asks_percent(problem) is is_asked


def test_where_a_percentage_is_asked_for_a_plain_number_is_one() -> None:
    """And never both: 50 % is 50 there, and one half elsewhere."""
    asked = "What percent of 50 is 25?"
    for reference, answer in (
        ("50", r"50\%"),
        (r"50\%", "50"),
        ("50", "50"),
        ("50%", "50 percent"),
    ):
        assert verify(answer, reference, asked, _decimals) == "correct"
    for reference, answer in ((r"50\%", "0.5"), ("0.5", r"50\%"), ("50%", "5%")):
        assert verify(answer, reference, asked, _decimals) == "wrong"


_KNOWN = st.sampled_from(
    "hours minutes seconds days cm m km mm feet inches miles kg g mg lb dollars cents euros L mL "
    "km/h m/s mph cm^2 m^2 cm^3 gallons watts joules newtons volts degrees celsius kelvin".split()
)
_AMOUNT = st.decimals(min_value=0, max_value=10_000, places=2)


@given(amount=_AMOUNT, other=_AMOUNT, unit=_KNOWN, another=_KNOWN)
def test_known_units_are_equal_only_where_they_convert(
    amount: object, other: object, unit: str, another: str
) -> None:
    """Against the plain arithmetic of sizes; a number without its unit is still the number."""
    first, second = known(unit), known(another)
    assert first is not None and second is not None
    shared = [dimension for dimension in first if dimension in second]
    left, right = f"{amount} {unit}", f"{other} {another}"
    verdict = verify(left, right, "", _decimals)
    if shared:
        sizes = first[shared[0]], second[shared[0]]
        is_equal = Fraction(str(amount)) * sizes[0] == Fraction(str(other)) * sizes[1]
        assert (verdict == "correct") == is_equal
    else:
        assert verdict != "correct"
    assert verify(left, str(amount), "", _decimals) == "correct"
    assert verify(str(amount), left, "", _decimals) == "correct"


@given(st.text(alphabet="0123456789 .,%$\\^{}/cmkhsgdolarintesupw°²³-", max_size=24))
def test_any_text_is_equal_to_itself_and_never_ends_in_an_error(text: str) -> None:
    verdict = verify(text, text, "", lambda answer, reference: None)
    assert verdict in ("correct", "no_reference", "unparsed")
    verify(text, "12 cm", "", lambda answer, reference: None)
