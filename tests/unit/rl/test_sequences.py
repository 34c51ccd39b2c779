"""Every way of running an LSTM over sequences with resets, against its equations step by step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.examples import examples
from torch import Tensor, nn

from muster.rl.sequence_layout import Costs, cpu_costs, lay_out, segments_of
from muster.rl.sequences import (
    in_segments,
    in_stretches,
    lstm_outputs,
    plan_sequences,
    run_lstm,
    step_lstm,
)

FEATURES, UNITS = 3, 4
#: What padding costs against a call, from nothing to everything.
PADDING = [0.0, 0.3, 3.0, 1e9]


def costs(row: float, arrange: float = -1e15) -> Costs:
    return Costs(call=1.0, step=0.0, row=row, cell=1.0, cell_row=row, copy=0.0, arrange=arrange)


def reference(
    lstm: nn.LSTM, inputs: Tensor, h: Tensor, c: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hochreiter and Schmidhuber's cell with forget gates, row by row and step by step."""
    w_input, w_hidden = lstm.weight_ih_l0, lstm.weight_hh_l0
    bias = lstm.bias_ih_l0 + lstm.bias_hh_l0
    all_outputs, all_h, all_c = [], [], []
    for row in range(inputs.shape[1]):
        hidden, cell, outputs = h[row], c[row], []
        for step in range(inputs.shape[0]):
            if bool(starts[step, row]):
                hidden, cell = torch.zeros_like(hidden), torch.zeros_like(cell)
            gates = w_input @ inputs[step, row] + w_hidden @ hidden + bias
            take, keep, new, show = gates.chunk(4)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(take) * torch.tanh(new)
            hidden = torch.sigmoid(show) * torch.tanh(cell)
            outputs.append(hidden)
        all_outputs.append(torch.stack(outputs))
        all_h.append(hidden)
        all_c.append(cell)
    return torch.stack(all_outputs, 1), torch.stack(all_h), torch.stack(all_c)


@st.composite
def starts_of_any_kind(draw: st.DrawFn) -> Tensor:
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 4)))
    kind = draw(st.sampled_from(["any", "none", "all", "first", "rare"]))
    starts = np.zeros(shape, bool)
    if kind == "any":
        starts = draw(hnp.arrays(bool, shape))
    elif kind == "all":
        starts[:] = True
    elif kind == "first":
        starts[0] = True
    elif kind == "rare":
        starts[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = True
    return torch.from_numpy(starts)


class Case:
    """An LSTM, a batch and what the reference makes of it."""

    def __init__(self, starts: Tensor, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        steps, rows = starts.shape
        self.starts = starts
        self.lstm = nn.LSTM(FEATURES, UNITS).to(dtype)
        self.inputs = torch.randn(steps, rows, FEATURES, dtype=dtype, requires_grad=True)
        self.h = torch.randn(rows, UNITS, dtype=dtype, requires_grad=True)
        self.c = torch.randn(rows, UNITS, dtype=dtype, requires_grad=True)
        self.weights = [torch.randn(steps, rows, UNITS, dtype=dtype)]
        self.weights += [torch.randn(rows, UNITS, dtype=dtype) for _ in range(2)]
        self.leaves = [self.inputs, self.h, self.c, *self.lstm.parameters()]
        self.expected = reference(self.lstm, self.inputs, self.h, self.c, starts)

    def check(self, *got: Tensor, atol: float) -> None:
        expected = self.expected[: len(got)]
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
        for mine, theirs in zip(self.grads(got), self.grads(expected), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=10 * atol, atol=10 * atol)

    def grads(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        pairs = zip(results, self.weights, strict=False)
        loss = sum((result * weight).sum() for result, weight in pairs)
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, self.leaves, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(leaf) if grad is None else grad
            for grad, leaf in zip(grads, self.leaves, strict=True)
        ]


@examples(40)
@given(starts=starts_of_any_kind(), row=st.sampled_from(PADDING))
def test_every_way_equals_the_equations(starts: Tensor, row: float) -> None:
    case = Case(starts, torch.float64)
    lstm, inputs, state = case.lstm, case.inputs, (case.h, case.c)
    plan = plan_sequences(starts)

    outputs, (h, c) = in_stretches(lstm, inputs, state, starts, plan.stretches)
    case.check(outputs, h, c, atol=1e-14)

    for is_packed in (False, True):
        layout = plan.layout(None, True)
        assert layout is not None
        outputs, final = in_segments(
            lstm, inputs, state, layout, is_packed=is_packed, needs_final=True
        )
        assert final is not None
        case.check(outputs, *final, atol=1e-14)

    for needs_final in (False, True):
        layout = plan.layout(costs(row), needs_final)
        assert layout is not None
        outputs, final = in_segments(
            lstm, inputs, state, layout, is_packed=False, needs_final=needs_final
        )
        case.check(outputs, *(final or ()), atol=1e-14)


@examples(30)
@given(starts=starts_of_any_kind())
def test_the_chosen_way_equals_the_equations(starts: Tensor) -> None:
    for dtype, atol in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        case = Case(starts, dtype)
        for plan in (None, plan_sequences(starts)):
            outputs, state = run_lstm(case.lstm, case.inputs, (case.h, case.c), starts, plan)
            case.check(outputs, *state, atol=atol)
            outputs = lstm_outputs(case.lstm, case.inputs, (case.h, case.c), starts, plan)
            case.check(outputs, atol=atol)


@examples(30)
@given(starts=starts_of_any_kind())
def test_single_steps_equal_the_equations(starts: Tensor) -> None:
    case = Case(starts, torch.float64)
    state, outputs = (case.h, case.c), []
    for step in range(len(starts)):
        state = step_lstm(case.lstm, case.inputs[step], state, starts[step])
        outputs.append(state[0])
    case.check(torch.stack(outputs), *state, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_longer_sequences_of_a_real_size(dtype: torch.dtype) -> None:
    # oneDNN and the cost model's own choice, which small cases may not reach.
    torch.manual_seed(1)
    starts = torch.rand(50, 6) < 0.1
    case = Case(starts, dtype)
    plan = plan_sequences(starts)
    assert plan.layout(cpu_costs(FEATURES, UNITS), True) is not None
    outputs, state = run_lstm(case.lstm, case.inputs, (case.h, case.c), starts, plan)
    case.check(outputs, *state, atol=2e-6 if dtype == torch.float32 else 1e-14)


@examples(20)
@given(starts=starts_of_any_kind(), data=st.data())
def test_a_plan_of_some_environments_is_the_plan_of_their_starts(
    starts: Tensor, data: st.DataObject
) -> None:
    some = data.draw(st.permutations(range(starts.shape[1])))
    envs = torch.tensor(some[: data.draw(st.integers(1, len(some)))])
    case = Case(starts, torch.float64)
    plan = plan_sequences(starts).select(envs)
    got, (h, c) = run_lstm(
        case.lstm, case.inputs[:, envs], (case.h[envs], case.c[envs]), starts[:, envs], plan
    )
    outputs, last_h, last_c = case.expected
    torch.testing.assert_close(got, outputs[:, envs], rtol=0, atol=1e-14)
    torch.testing.assert_close(h, last_h[envs], rtol=0, atol=1e-14)
    torch.testing.assert_close(c, last_c[envs], rtol=0, atol=1e-14)


@pytest.mark.parametrize("way", ["stretches", "segments", "packed"])
def test_nothing_leaks_across_a_reset(way: str) -> None:
    starts = torch.zeros(8, 2, dtype=torch.bool)
    starts[5, 0] = True
    case = Case(starts, torch.float64)
    plan = plan_sequences(starts)
    state = (case.h, case.c)
    if way == "stretches":
        outputs, _ = in_stretches(case.lstm, case.inputs, state, starts, plan.stretches)
    else:
        layout = plan.layout(None, True)
        assert layout is not None
        outputs, _ = in_segments(
            case.lstm, case.inputs, state, layout, is_packed=way == "packed", needs_final=False
        )
    after = torch.autograd.grad(outputs[5:, 0].sum(), case.leaves[:3], retain_graph=True)
    assert after[0][:5].count_nonzero() == 0
    assert after[0][:, 1].count_nonzero() == 0
    assert after[1].count_nonzero() == after[2].count_nonzero() == 0
    # Without a reset everything before matters: the test can fail.
    other = torch.autograd.grad(outputs[5:, 1].sum(), case.leaves[:3])
    assert (other[0][:, 1] != 0).all()
    assert (other[1][1] != 0).all()


def test_a_memory_that_is_not_finite_ends_with_its_episode() -> None:
    starts = torch.tensor([[True], [False], [True]])
    case = Case(starts, torch.float64)
    bad = torch.full((1, UNITS), torch.nan, dtype=torch.float64)
    outputs, _ = run_lstm(case.lstm, case.inputs, (bad, bad), starts, None)
    torch.testing.assert_close(outputs, case.expected[0])
    h, c = step_lstm(case.lstm, case.inputs[0], (bad, bad), starts[0])
    assert h.isfinite().all()
    assert c.isfinite().all()


@examples(60)
@given(
    starts=hnp.arrays(bool, st.tuples(st.integers(1, 7), st.integers(1, 4))),
    row=st.sampled_from(PADDING),
)
def test_calls_end_where_it_is_cheapest(starts: np.ndarray, row: float) -> None:
    segments = segments_of(starts)
    lengths = segments.length.tolist()
    prices = costs(row)
    best = float("inf")
    distinct = sorted(set(lengths))
    for number in range(len(distinct)):
        for cuts in itertools.combinations(distinct[:-1], number):
            edges = [0, *cuts, distinct[-1]]
            best = min(
                best,
                sum(
                    prices.of(end - begin, sum(length > begin for length in lengths))
                    for begin, end in itertools.pairwise(edges)
                ),
            )
    layout = lay_out(segments, prices, needs_final=False)
    assert layout is not None
    assert sum(prices.of(steps, rows) for steps, rows, _ in layout.calls) == pytest.approx(best)


def test_the_cost_model_prefers_what_is_cheaper() -> None:
    rare = np.zeros((64, 8), bool)
    rare[32] = True
    often = np.random.default_rng(0).random((64, 8)) < 0.2
    # One reset of all rows at once: two calls, nothing to rearrange.
    assert lay_out(segments_of(rare), costs(0.1, arrange=5.0), False) is None
    layout = lay_out(segments_of(often), cpu_costs(64, 64), False)
    assert layout is not None
    assert len(layout.calls) < len(plan_sequences(torch.from_numpy(often)).stretches)


def test_what_does_not_fit_is_refused() -> None:
    starts = torch.zeros(5, 2, dtype=torch.bool)
    case = Case(starts, torch.float64)
    other = plan_sequences(starts[:4])
    with pytest.raises(ValueError, match=r"inputs \[5, 2, 3\].*plan of \[4, 2\]"):
        run_lstm(case.lstm, case.inputs, (case.h, case.c), starts, other)
    for bad in (nn.LSTM(3, 4, num_layers=2), nn.LSTM(3, 4, batch_first=True),
                nn.LSTM(3, 4, bias=False), nn.LSTM(3, 4, bidirectional=True)):  # fmt: skip
        with pytest.raises(ValueError, match="not supported"):
            step_lstm(bad, torch.zeros(2, 3), (torch.zeros(2, 4), torch.zeros(2, 4)), starts[0])
