"""The oldest torch that pyproject.toml allows has every name and keyword that we use of torch."""

from __future__ import annotations

import re

from tests.torch_floor import ROOT, TABLE, uses

HAS = set(TABLE.read_text().splitlines())


def test_the_oldest_torch_has_every_name_and_keyword_that_we_use() -> None:
    used = uses()
    assert {"torch.Tensor", "torch.distributed.checkpoint.state_dict_saver.save no_dist"} <= used
    lacking = sorted(used - HAS)
    assert not lacking, (
        f"{lacking} is in no table of the oldest torch. Run `python -m tests.torch_floor` with its "
        "sources: where it has them, the table is written anew; where not, ask with hasattr first, "
        "or raise the floor in pyproject.toml."
    )


def test_the_table_is_of_the_oldest_torch_that_is_allowed() -> None:
    allowed = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert allowed == [TABLE.read_text().split("\n", 1)[0].removeprefix("torch ")]
