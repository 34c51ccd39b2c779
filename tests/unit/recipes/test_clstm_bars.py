"""Reading bars: every way of writing them, and every mistake with its row."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.recipes.clstm_files import HEADER, MONDAY, days, written

from muster import UsageError
from muster_recipes.clstm_ppo.bar_checks import check_gaps
from muster_recipes.clstm_ppo.bar_files import read_bars
from muster_recipes.clstm_ppo.bars import (
    VOLATILITY_FLOOR,
    Bars,
    calendar_of,
    estimated_volatility,
)

GOOD = [
    "2024-01-02,AAA,10,11,9,10.5,1000",
    "2024-01-03,AAA,10.5,12,10,11,2000",
    "2024-01-04,AAA,11,11.5,10.5,10.75,0",
]


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose own zone is not UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_bars(path)
    return str(caught.value)


def test_csv_is_read(tmp_path: Path) -> None:
    bars = read_bars(written(tmp_path, [HEADER, *GOOD]))
    assert bars.symbols == ("AAA",)
    assert bars.close.tolist() == [10.5, 11.0, 10.75]
    assert bars.volume.tolist() == [1000.0, 2000.0, 0.0]
    assert bars.time.tolist() == [1704153600, 1704240000, 1704326400]


def test_names_in_any_case_and_order_other_columns_and_no_symbol(tmp_path: Path) -> None:
    lines = ["Volume;CLOSE;Adj Close;low; High ;Open;Date", "5;2;1.9;1;3;1.5;2024-01-02"]
    bars = read_bars(written(tmp_path, lines, "SPY.csv"))
    assert bars.symbols == ("SPY",)
    assert (bars.open[0], bars.high[0], bars.low[0], bars.close[0]) == (1.5, 3.0, 1.0, 2.0)


def test_a_byte_order_mark_quotes_and_crlf_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + f'{HEADER}\r\n"2024-01-02","A, B",1,2,1,"2",3\r\n\r\n'.encode()
    )
    assert read_bars(path).symbols == ("A, B",)


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-02",
        "20240102",
        "2024-01-02 00:00:00",
        "2024-01-02T00:00:00Z",
        "2024-01-02T01:00:00+01:00",
        "2024-01-01 19:00:00-05:00",
        "1704153600",
        "1704153600.0",
        "1704153600000",
        "1704153600000000",
        "1704153600000000000",
    ],
)
def test_timestamps_in_every_form_are_the_same_moment(
    tmp_path: Path, text: str, far_away: None
) -> None:
    bars = read_bars(written(tmp_path, [HEADER, f"{text},A,1,2,1,2,3"]))
    assert bars.time.tolist() == [1704153600]


MOMENT = datetime(2024, 1, 2, 14, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([MOMENT], pa.timestamp("ns", "America/New_York")), 1704205800),
        (pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("s")), 1704205800),
        (pa.array([date(2024, 1, 2)]), 1704153600),
        (pa.array(["2024-01-02T14:30:00"]), 1704205800),
        (pa.array([1704205800]), 1704205800),
        (pa.array([1704205800000]), 1704205800),
        (pa.array([20240102]), 1704153600),
        (pa.array([20240102.0]), 1704153600),
        (pa.array([datetime(1970, 1, 2)], pa.timestamp("ns")), 86400),
    ],
)
def test_parquet_is_read_with_every_type_of_timestamp(
    tmp_path: Path, column: pa.Array, expected: int, far_away: None
) -> None:
    numbers = {name: [1.0] for name in ("open", "high", "low", "close")} | {"volume": [7]}
    pq.write_table(pa.table({"Timestamp": column, **numbers}), tmp_path / "QQQ.parquet")
    bars = read_bars(tmp_path / "QQQ.parquet")
    assert bars.symbols == ("QQQ",) and bars.time.tolist() == [expected]
    assert bars.volume.tolist() == [7.0]


def test_symbols_may_be_mixed_and_are_put_together(tmp_path: Path) -> None:
    lines = [
        f"2024-01-0{day},{symbol},{day},{day},{day},{day},1" for day in (2, 3) for symbol in "BA"
    ]
    bars = read_bars(written(tmp_path, [HEADER, *lines]))
    assert bars.symbols == ("A", "B")
    assert bars.symbol.tolist() == [0, 0, 1, 1] and bars.close.tolist() == [2, 3, 2, 3]
    assert bars.ranges() == [slice(0, 2), slice(2, 4)]


def test_missing_columns_are_named_with_what_is_there_and_what_is_near(tmp_path: Path) -> None:
    text = refusal(written(tmp_path, ["stamp,open,high,low,closing,volume", "1,2,3,4,5,6"]))
    assert "lacks the columns timestamp, close; it has 'stamp', 'open'" in text
    assert "is 'closing' meant as 'close'?" in text


def test_values_that_are_none_are_told_by_row_and_line(tmp_path: Path) -> None:
    lines = [HEADER, GOOD[0], "", "2024-01-03,AAA,x,12,,nan,inf", "soon,,1,2,1,2,3"]
    text = refusal(written(tmp_path, lines))
    assert "has 6 problems:" in text
    # The empty line counts as a line and not as a row.
    for problem in (
        "row 2 (line 4): open is 'x', not a number",
        "row 2 (line 4): low is empty",
        "row 2 (line 4): close is missing (nan)",
        "row 2 (line 4): volume is 'inf', not a number",
        "row 3 (line 5): symbol is empty",
        "and 1 more",
    ):
        assert problem in text


def test_a_line_within_quotes_does_not_shift_the_line_numbers(tmp_path: Path) -> None:
    lines = [HEADER + ",note", GOOD[0] + ',"two\nlines"', GOOD[1].replace("12", "?") + ",x"]
    assert "row 2 (line 4): high is '?', not a number" in refusal(written(tmp_path, lines))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("2024-01-03,AAA,0,12,9,11,1", "open is 0, but a price must be greater than 0"),
        ("2024-01-03,AAA,10,12,-1,11,1", "low is -1, but a price must be greater than 0"),
        ("2024-01-03,AAA,10,9,12,11,1", "high 9 is below low 12"),
        ("2024-01-03,AAA,10,12,9,13,1", "close 13 is outside low 9 to high 12"),
        ("2024-01-03,AAA,8,12,9,11,1", "open 8 is outside low 9 to high 12"),
        ("2024-01-03,AAA,10,12,9,11,-5", "volume is -5, but it cannot be negative"),
        ("2024-01-03,AAA,10,12,9,11,1_000", "volume is '1_000', not a number"),
        ("20240132,AAA,10,12,9,11,1", "timestamp is '20240132', no date or time"),
        ("20240132.0,AAA,10,12,9,11,1", "timestamp is '20240132.0', no date or time"),
        ("2024-01-03,AAA,10,12,9,11", "6 values, but the header has 7 columns"),
        ("2024-01-32,AAA,10,12,9,11,1", "timestamp is '2024-01-32', no date or time"),
        (",AAA,10,12,9,11,1", "timestamp is empty"),
        ("1e300,AAA,10,12,9,11,1", "timestamp is '1e300', no date or time"),
        ("9" * 30 + ",AAA,10,12,9,11,1", f"timestamp is '{'9' * 30}', no date or time"),
        ("3024-01-02,AAA,10,12,9,11,1", "timestamp is '3024-01-02', no date or time"),
        ("2024-01-02,AAA,10,12,9,11,1", "2024-01-02 of AAA is there already in row 1 (line 2)"),
        (
            "2024-01-01,AAA,10,12,9,11,1",
            "2024-01-01 of AAA comes after 2024-01-02 in row 1 (line 2)",
        ),
    ],
)
def test_a_bad_row_is_refused_by_its_number(tmp_path: Path, row: str, problem: str) -> None:
    text = refusal(written(tmp_path, [HEADER, GOOD[0], row, GOOD[2]]))
    assert f"row 2 (line 3): {problem}" in text
    assert "has a problem:" in text


def test_order_is_checked_within_each_symbol(tmp_path: Path) -> None:
    days_and_symbols = ["03 B", "01 A", "04 B", "02 A", "02 B", "02 A", "05 B", "03 A"]
    rows = [f"2024-01-{pair[:2]},{pair[3:]},1,1,1,1,1" for pair in days_and_symbols]
    text = refusal(written(tmp_path, [HEADER, *rows]))
    assert "has 2 problems:" in text
    assert "row 5 (line 6): 2024-01-02 of B comes after 2024-01-04 in row 3 (line 4)" in text
    assert "row 6 (line 7): 2024-01-02 of A is there already in row 4 (line 5)" in text
    assert "a column called symbol" in text


def test_parquet_has_rows_and_no_lines(tmp_path: Path) -> None:
    days = [datetime(2024, 1, 2), None, datetime(2024, 1, 4)]
    close = [1.0, 1.0, math.nan]
    numbers = {name: [1.0] * 3 for name in ("open", "high", "low", "volume")}
    path = tmp_path / "bars.parquet"
    pq.write_table(pa.table({"timestamp": days, "close": close, **numbers}), path)
    text = refusal(path)
    assert "row 2: timestamp is empty" in text and "row 3: close is missing (nan)" in text
    assert "line" not in text


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bars.csv", b"", "is empty"),
        ("bars.csv", HEADER.encode(), "has no rows of data"),
        ("bars.csv", b"\xff\xfe\x00timestamp", "is not text in UTF-8"),
        ("bars.csv", (HEADER + '\n"open quote').encode(), "line 2"),
        ("bars.parquet", b"PAR1 not really", "cannot be read as Parquet"),
        ("bars.parquet", b"", "cannot be read as Parquet"),
        ("bars.xlsx", b"x", "ends in .xlsx: --data must be one of .csv, .parquet, .pq"),
        ("bars", b"x", "ends in nothing"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in refusal(tmp_path / name)


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "is not a file" in refusal(tmp_path / "folder.csv")


def of_times(moments: Sequence[datetime], symbol: str = "A") -> Bars:
    time = np.array([int(moment.replace(tzinfo=UTC).timestamp()) for moment in moments])
    ones = np.ones(len(time))
    return Bars(
        source="test", symbols=(symbol,), symbol=np.zeros(len(time), dtype=np.int64), time=time,
        open=ones, high=ones, low=ones, close=ones, volume=ones,
    )  # fmt: skip


SESSION = [timedelta(hours=14, minutes=30) + timedelta(hours=hour) for hour in range(7)]


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        (days(MONDAY, 60, weekends=False), 252),
        (days(MONDAY, 60, weekends=True), 365.25),
        ([day + at for day in days(MONDAY, 20, weekends=False) for at in SESSION], 252 * 7),
        ([MONDAY + timedelta(hours=hour) for hour in range(24 * 30)], 365.25 * 24),
        ([MONDAY + timedelta(weeks=week) for week in range(30)], 365.25 / 7),
        # Midnight of Tokyo: Monday is a Sunday in UTC, but there are still five days.
        ([day - timedelta(hours=9) for day in days(MONDAY, 60, weekends=False)], 252),
        ([MONDAY], 252),
    ],
)
def test_bars_per_year_follow_from_the_spacing(moments: list[datetime], expected: float) -> None:
    assert calendar_of(of_times(moments)).bars_per_year == pytest.approx(expected)


@pytest.mark.parametrize(
    "moments",
    [
        days(MONDAY, 60, weekends=False),
        [day + at for day in days(MONDAY, 20, weekends=False) for at in SESSION],
        [MONDAY + timedelta(hours=hour) for hour in range(24 * 30)],
        [day + timedelta(hours=h) for day in days(MONDAY, 20, weekends=False) for h in range(24)],
    ],
    ids=["daily", "hourly", "around the clock", "around the clock on weekdays"],
)
def test_nights_weekends_and_holidays_are_no_gaps_but_missing_days_are(
    moments: list[datetime],
) -> None:
    bars = of_times(moments)
    calendar = calendar_of(bars)
    check_gaps(bars, calendar, 0.0)
    hole = [m for m in moments if not datetime(2024, 1, 8) <= m < datetime(2024, 1, 13)]
    with pytest.raises(UsageError) as caught:
        check_gaps(of_times(hole), calendar, 3.0)
    lost = sum(m.weekday() < 5 or len(moments) == 720 for m in moments) - sum(
        m.weekday() < 5 or len(moments) == 720 for m in hole
    )
    expected = rf"A: about {lost} bars are missing between 2024-01-0[57]\S*"
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert "--max-gap-bars" in str(caught.value)
    check_gaps(of_times(hole), calendar, float(lost))


def test_a_gap_within_a_day_is_counted_in_bars() -> None:
    moments = [day + at for day in days(MONDAY, 20, weekends=False) for at in SESSION]
    hole = [m for i, m in enumerate(moments) if not 71 <= i < 75]
    calendar = calendar_of(of_times(moments))
    check_gaps(of_times(hole), calendar, 4.0)
    with pytest.raises(UsageError, match="about 4 bars are missing between 2024-01-15 14:30:00"):
        check_gaps(of_times(hole), calendar, 3.0)


def test_a_gap_is_told_with_its_rows(tmp_path: Path) -> None:
    lines = [HEADER]
    for day in days(MONDAY, 40, weekends=False):
        for symbol in "BA":
            if symbol == "B" or not 10 <= (day - MONDAY).days < 40:
                lines.append(f"{day:%Y-%m-%d},{symbol},1,1,1,1,1")
    bars = read_bars(written(tmp_path, lines))
    rows = [number for number, line in enumerate(lines) if ",A," in line]
    gap = next(i for i in range(len(rows)) if rows[i + 1] - rows[i] > 4)
    with pytest.raises(UsageError) as caught:
        check_gaps(bars, calendar_of(bars), 10.0)
    assert (
        f"between 2024-01-10 in row {rows[gap]} (line {rows[gap] + 1}) and 2024-02-12 in row "
        f"{rows[gap + 1]} (line {rows[gap + 1] + 1})"
    ) in str(caught.value)


def level_of(past: Sequence[float]) -> float:
    """The level of implied volatility after the daily returns ``past``, from the definition."""
    squares = [r * r for r in past]
    n = len(squares)
    weights = [0.5 ** ((n - 1 - i) / 21) for i in range(n)]
    weights = [weight / sum(weights) for weight in weights]
    long = sum(squares) / n
    short = sum(w * s for w, s in zip(weights, squares, strict=True))
    spread = max(2.0, sum((s - long) ** 2 for s in squares) / n / long**2)
    error = math.sqrt((sum(w * w for w in weights) - 1 / n) * spread) if n > 1 else 0.0
    apart = math.log(short / long)
    share = 1 - (2 * error / apart) ** 2 if abs(apart) > 2 * error else 0.0
    return math.sqrt(252 * long * (short / long) ** share)


def test_volatility_is_the_long_mean_corrected_by_a_surprising_recent_one() -> None:
    returns = np.random.default_rng(0).normal(0.0, 0.01, 400)
    returns[300:] *= 3.0
    found = estimated_volatility(np.exp(np.cumsum([0.0, *returns])), 252.0)
    for bar in (1, 2, 39, 300, 320, 400):
        assert found[bar] == pytest.approx(level_of(returns[:bar].tolist())), bar
    assert found[0] == VOLATILITY_FLOOR
    assert (estimated_volatility(np.ones(5), 252.0) == VOLATILITY_FLOOR).all()
    assert estimated_volatility(np.exp(np.cumsum([0.0, *[0.02, -0.02] * 300])), 252.0)[-1] == (
        pytest.approx(0.02 * math.sqrt(252.0))
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_most_of_a_change_of_volatility_is_followed_within_two_months(factor: float) -> None:
    after = []
    for seed in range(20):
        returns = np.random.default_rng(seed).normal(0.0, 0.2 / math.sqrt(252), 542)
        returns[500:] *= factor
        close = np.exp(np.cumsum([0.0, *returns]))
        after.append(math.log(estimated_volatility(close, 252.0)[-1] / 0.2))
    assert np.mean(after) / math.log(factor) > 0.5
