"""The page as HTML: nothing from outside gets in, nothing of it is lost, nothing is loaded."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from muster.api.report.content import (
    MOST_ROWS,
    Facts,
    Given,
    Health,
    Listing,
    Page,
    Picture,
    Section,
    Spread,
    Table,
    Text,
    as_given,
    facts_of,
    in_words,
    section,
    table_of,
    with_spread,
)
from muster.api.report.html import STYLE, to_html
from muster.base.shown_text import clean_text, command_line, is_secret_name, secrets_of

#: All that a page is made of.
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "pre", "code",
    "nav", "ul", "li", "a", "main", "section", "details", "summary", "div", "table", "caption",
    "thead", "tbody", "tr", "th", "td", "figure", "img", "figcaption", "footer",
}  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\nnot really a picture"


class Seen(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_with(text: str, picture: Path) -> Page:
    """Every place of a page that can hold a text from elsewhere holds this one."""
    blocks = (
        Text(text),
        Listing(text, text),
        Table(text, (text, "number"), ((text, 1.5), (None, None)), text),
        Facts(text, ((text, text),)),
        Picture(picture, text, text),
    )
    return Page(text, text, text, text, Health.GOOD, (Section(text, blocks),))


def shown(text: str) -> str:
    """What a parser gives back: with control characters written out, or taken out."""
    return clean_text(text)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "figure.png"
    path.write_bytes(PNG)
    return path


NASTY = st.one_of(
    st.text(min_size=1, max_size=40),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            '"><img src=x onerror=alert(1)>',
            "'><svg/onload=alert(1)>",
            "</title></style></pre><script src=//evil.example/x.js></script>",
            "<!-- ", "]]>", "&lt;b&gt;", "\x1b[31mred\x1b[0m", "\ud800", "<a href='http://x'>",
        ]
    ),
)  # fmt: skip


@examples(60)
@given(text=NASTY)
def test_no_text_becomes_a_tag_and_all_of_it_is_shown(text: str, picture: Path) -> None:
    seen = Seen(to_html(page_with(text, picture), text))
    plain = Seen(to_html(page_with("x", picture), "x"))
    assert [tag for tag, _ in seen.tags] == [tag for tag, _ in plain.tags]
    assert {tag for tag, _ in seen.tags} <= TAGS
    assert [sorted(attrs) for _, attrs in seen.tags] == [sorted(a) for _, a in plain.tags]
    wanted = shown(text)
    alts = [attrs["alt"] for tag, attrs in seen.tags if tag == "img"]
    assert alts == [wanted]
    assert wanted in "".join(seen.texts)


def test_nothing_is_loaded_and_pictures_are_in_the_page(picture: Path) -> None:
    seen = Seen(to_html(page_with("x", picture), "x"))
    for tag, attrs in seen.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith(("data:image/png;base64,", "#")), (tag, value)
        assert not any(name.startswith("on") for name in attrs)
    policy = next(a for t, a in seen.tags if t == "meta" and "http-equiv" in a)
    assert policy["content"] is not None
    assert policy["content"].startswith("default-src 'none'")
    style = "".join(seen.texts)
    assert "url(" not in style
    assert "@import" not in style


def test_a_telephone_the_dark_paper_and_a_reader_are_thought_of(picture: Path) -> None:
    seen = Seen(to_html(page_with("x", picture), "x"))
    metas = [attrs for tag, attrs in seen.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    text = "".join(seen.texts)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("html", {"lang": "en"}) in seen.tags
    assert [tag for tag, _ in seen.tags if tag in ("h1", "h2")] == ["h1", "h2"]
    assert {attrs.get("scope") for tag, attrs in seen.tags if tag == "th"} == {"col", "row"}


def test_links_of_the_contents_lead_to_sections_of_their_own(picture: Path) -> None:
    parts = tuple(Section(title, (Text("x"),)) for title in ("Same", "Same", "…", "Ä & B"))
    seen = Seen(to_html(Page("t", "l", "", "s", Health.BAD, parts), "x"))
    links = [str(attrs["href"]).removeprefix("#") for tag, attrs in seen.tags if tag == "a"]
    ids = [attrs["id"] for tag, attrs in seen.tags if tag == "section"]
    assert links == ids
    assert len(set(ids)) == 4


def test_a_long_grid_is_folded_and_not_lost() -> None:
    grid = [n / 7 for n in range(1000)]
    words = f"muster sweep a.py:f --grid {','.join(map(str, grid))}"
    facts = facts_of("Parameters", {"lr": grid, "short": [1, 2]}, are_given=True)
    assert facts is not None
    page = Page("r", "lead", words, "done", Health.GOOD, (Section("What", (facts,)),))
    text = to_html(page, "muster").decode()
    head = text.index("<details><summary>muster sweep a.py:f --grid 0.0,")
    assert text.index("characters)</summary>", head) < text.index(str(grid[-1]), head)
    assert text.count("<details>") == 2, "the short one is not folded"
    assert text.count(str(grid[-1])) == 2
    shown = re.sub(r"<details>(<summary>.*?</summary>).*?</details>", r"\1", text, flags=re.DOTALL)
    assert len(shown) - len(STYLE) < 4000


def test_a_large_table_is_cut_and_says_where_all_of_it_is() -> None:
    rows = [{"n": n, "never": None, "late": 1 if n == 999 else None} for n in range(1000)]
    table = table_of("Results", rows, whole=Path("runs/x/table.csv"))
    assert table is not None
    assert len(table.rows) == MOST_ROWS
    assert table.columns == ("n", "late")  # known in a row that is not shown
    assert table.rows[7] == (7, None)
    assert table.note == (
        "The first 300 of 1,000 rows. All of them are in table.csv. Columns without any value: "
        "never."
    )
    assert table_of("Results", []) is None
    assert section("Empty", [None]) == []


def test_names_inside_of_names() -> None:
    facts = facts_of("c", {"a": {"b": 1, "c": {"d": None}}, "e": {}})
    assert facts is not None
    assert facts.pairs == (("a.b", 1), ("a.c.d", None), ("e", {}))


# ---------------------------------------------------------------------- values


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_a_number_is_shown_to_four_digits(value: float) -> None:
    back = float(in_words(value).replace(",", ""))
    assert math.isclose(back, value, rel_tol=5.1e-4, abs_tol=1e-322)


@given(
    st.floats(min_value=-1e6, max_value=1e6),
    st.floats(min_value=1e-4, max_value=1e5),
)
def test_a_mean_is_shown_as_fine_as_its_deviation(mean: float, sd: float) -> None:
    left, right = (float(part.replace(",", "")) for part in with_spread(mean, sd).split(" ± "))
    assert math.isclose(right, sd, rel_tol=0.06)
    assert abs(left - mean) <= 0.06 * sd


def test_what_is_missing_is_never_a_zero() -> None:
    assert in_words(None) == "–"
    assert in_words("") == "–"
    assert in_words(0) == "0"
    assert in_words(0.0) == "0"
    assert in_words(math.nan) == "not a number"
    assert in_words([None, 0.25]) == "[–, 0.25]"
    assert in_words(Spread(0.5, None, 1, 1)) == "0.5"
    assert in_words(Spread(0.5, 0.1, 2, 3)) == "0.50 ± 0.10 (n = 2)"
    assert in_words(Given(0.123456789)) == "0.123456789"
    assert in_words("x" * 500) == "x" * 199 + "…"


@given(st.one_of(st.integers(-(10**14), 10**14), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_setting_keeps_all_of_its_digits(value: float) -> None:
    assert float(as_given(value)) == value


def test_a_command_line_can_be_pasted_and_hides_keys() -> None:
    words = ["muster", "map", "x y", "--api-key", "abc", "--hf-token=def", "--max-tokens", "9"]
    assert command_line(words) == "muster map 'x y' --api-key … --hf-token=… --max-tokens 9"
    assert command_line(["muster", "--api-key", "--quiet", "z"]) == "muster --api-key --quiet z"


@pytest.mark.parametrize(
    "words",
    [
        ["--token=hf_ARGSECRET"],
        ["--wandb-key", "hf_ARGSECRET"],
        ["--password", "hf_ARGSECRET"],
        ["--hf-token", "hf_ARGSECRET"],
        ["--grid", "api_key=hf_ARGSECRET"],
        ["--grid=api_key=hf_ARGSECRET"],
        ["--grid", "lr=1", "api_key=other,hf_ARGSECRET"],
        ["db.password=hf_ARGSECRET"],
        ["echo hf_ARGSECRET | login"],
        ["https://me:ARGSECRET@host/?access_token=x"],
        ["http://me@corp.com:ARGSECRET@proxy"],
        ["postgresql://me:pa/ARGSECRET@host"],
        ["env", "PGPASSWORD=ARGSECRET", "prog"],
        ["--accessToken", "ARGSECRET"],
    ],
)
def test_a_secret_is_nowhere_on_the_page(words: list[str]) -> None:
    argv = ["muster", "sweep", *words]
    assert "ARGSECRET" not in command_line(argv)
    secrets = secrets_of(argv, {"space": {"grid": {"auth_token": ["sesame-1", 2]}}})
    assert "sesame-1" in secrets
    page = Page(
        title="t",
        lead=f"A sweep of c.py --x=hf_ARGSECRET {words[0]}: 1 task.",
        command="",
        state="Failed: sesame-1",
        health=Health.BAD,
        sections=section("What failed", [Listing("login with hf_ARGSECRET", "sesame-1")]),
    )
    text = to_html(page, "by", secrets).decode()
    assert "ARGSECRET" not in text and "sesame-1" not in text


def test_names_of_secrets_and_of_ordinary_things() -> None:
    secret = ("token", "wandb-key", "api_key", "APIKEY", "password", "hf.token", "aws-secret", "pw")
    plain = ("max_tokens", "pad-token", "sort_key", "key", "author", "monkey", "tokenizer", "lr")
    assert [name for name in (*secret, *plain) if is_secret_name(name)] == list(secret)


def test_a_word_that_is_a_key_in_an_address_is_hidden_there_alone() -> None:
    words = ["http://host/?key=validation&sig=abcdefgh12345678"]
    assert command_line(words) == "http://host/?key=…&sig=…"
    assert secrets_of(words) == {"abcdefgh12345678"}
