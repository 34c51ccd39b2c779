"""What the screen says of records: never fewer than none."""

from muster.api.maps.progress import RecordCount
from muster.farm.view import RunView


def view_of(**numbers: float) -> RunView:
    return RunView(
        "map-x", 4, 0, 0, 0, 2, 0, 1.0, None, None, "running", (), (), numbers=numbers
    )  # fmt: skip


def test_rows_that_were_rejected_twice_leave_no_count_below_zero() -> None:
    count = RecordCount(total=300, before=20, rejected_before=20)
    view = count.of(view_of(records=300, rejected=281))
    assert (view.num_done, view.num_failed) == (0, 300)
    assert count.of(view_of(records=10, rejected=4)).num_done == 6
