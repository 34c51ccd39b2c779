"""An LSTM over sequences in which episodes begin anew, in few fused calls.

A row's state is emptied before each step where ``starts`` is True. There are three ways, equal but
for rounding, and a cost model takes the cheapest one:

stretches  One call over all rows for each stretch between steps at which any row starts anew.
segments   Every row is cut at its starts; the segments become rows of their own, ordered by length,
           and run side by side: calls that get narrower as segments end.
packed     The same without padding, in one call: cuDNN's sequences of different lengths.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from muster.rl.sequence_layout import Costs, Layout, cpu_costs, lay_out, segments_of, stretches_of

#: h and c, [B, H] each.
LstmState = tuple[Tensor, Tensor]


class SequencePlan:
    """How ``starts`` [T, B] cuts the sequences of a batch, known to the host."""

    def __init__(self, starts: NDArray[np.bool_]) -> None:
        self.starts = starts
        self._layouts: dict[tuple[Costs | None, bool], Layout | None] = {}

    def select(self, envs: Tensor) -> SequencePlan:
        """The plan of a minibatch of environments, int64 [b] on the CPU (elsewhere it syncs)."""
        return SequencePlan(np.ascontiguousarray(self.starts[:, envs.cpu().numpy()]))

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """First step, and step after the last, of stretches in which no row starts anew."""
        return stretches_of(self.starts)

    def layout(self, costs: Costs | None, needs_final: bool) -> Layout | None:
        """Segments side by side, where that is cheaper than stretches; always without costs.

        With ``needs_final`` a call ends where the last segment of any row does.
        """
        key = (costs, needs_final)
        if key not in self._layouts:
            self._layouts[key] = lay_out(segments_of(self.starts), costs, needs_final)
        return self._layouts[key]


def plan_sequences(starts: Tensor) -> SequencePlan:
    """Plan a rollout with ``starts`` bool [T, N]. The host waits for the device here, once."""
    return SequencePlan(starts.cpu().numpy())


def run_lstm(
    lstm: nn.LSTM, inputs: Tensor, state: LstmState, starts: Tensor, plan: SequencePlan | None
) -> tuple[Tensor, LstmState]:
    """Outputs [T, B, H] for ``inputs`` [T, B, F], and the state after the last step.

    ``state``: before the first step. ``lstm``: one layer, one direction, with biases, not
    batch_first. ``plan``: made of ``starts`` bool [T, B]; computed here when None.
    """
    outputs, final = _run(lstm, inputs, state, starts, plan, needs_final=True)
    assert final is not None
    return outputs, final


def lstm_outputs(
    lstm: nn.LSTM, inputs: Tensor, state: LstmState, starts: Tensor, plan: SequencePlan | None
) -> Tensor:
    """The outputs of ``run_lstm`` alone, in fewer calls, as no final state is needed."""
    return _run(lstm, inputs, state, starts, plan, needs_final=False)[0]


def step_lstm(lstm: nn.LSTM, inputs: Tensor, state: LstmState, starts: Tensor) -> LstmState:
    """One step: ``inputs`` [B, F], ``starts`` bool [B]; the new h is the output.

    By ``lstm_cell``: on a CPU core 20 us for 8 rows of 64 units where a fused call of length 1
    takes 70 us (21 November 2026, torch 2.13); on CUDA three kernels.
    """
    _require_plain(lstm)
    return _cell(lstm, inputs, _emptied(state, starts))


def _run(
    lstm: nn.LSTM,
    inputs: Tensor,
    state: LstmState,
    starts: Tensor,
    plan: SequencePlan | None,
    *,
    needs_final: bool,
) -> tuple[Tensor, LstmState | None]:
    _require_plain(lstm)
    if plan is None:
        plan = plan_sequences(starts)
    if plan.starts.shape != inputs.shape[:2] or starts.shape != inputs.shape[:2]:
        raise ValueError(
            f"inputs {list(inputs.shape)}, starts {list(starts.shape)} and a plan of "
            f"{list(plan.starts.shape)} do not belong together: expected [T, B, F] and [T, B]."
        )
    stretches = plan.stretches
    is_cuda = inputs.device.type == "cuda"
    layout = None
    if len(stretches) > 1:
        costs = None if is_cuda else cpu_costs(lstm.input_size, lstm.hidden_size)
        layout = plan.layout(costs, needs_final and not is_cuda)
    if layout is None:
        return in_stretches(lstm, inputs, state, starts, stretches)
    return in_segments(lstm, inputs, state, layout, is_packed=is_cuda, needs_final=needs_final)


def in_stretches(
    lstm: nn.LSTM,
    inputs: Tensor,
    state: LstmState,
    starts: Tensor,
    stretches: list[tuple[int, int]],
) -> tuple[Tensor, LstmState]:
    """Outputs and the state after the last step: one call per stretch."""
    pieces = []
    # split, not slices: their gradients would each be as large as all inputs.
    parts = torch.split_with_sizes(inputs, [end - begin for begin, end in stretches])
    for (begin, _), part in zip(stretches, parts, strict=True):
        outputs, state = _call(lstm, part, _emptied(state, starts[begin]))
        pieces.append(outputs)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)), state


def in_segments(
    lstm: nn.LSTM,
    inputs: Tensor,
    state: LstmState,
    layout: Layout,
    *,
    is_packed: bool,
    needs_final: bool,
) -> tuple[Tensor, LstmState | None]:
    """Outputs, and with ``needs_final`` the state after the last step.

    That needs a ``layout`` made with ``needs_final`` or, as does ``is_packed``, one without costs.
    """
    steps, rows = inputs.shape[:2]
    gather, scatter, initial, final = (_to_device(a, inputs.device) for a in layout.places)
    flat = inputs.reshape(steps * rows, -1).index_select(0, gather)
    h, c = (_with_empty_row(part).index_select(0, initial) for part in state)
    ended: list[LstmState] = []
    if is_packed:
        widths = torch.from_numpy(layout.widths)
        data, h, c = torch.lstm(
            flat, widths, (h.unsqueeze(0), c.unsqueeze(0)), _weights(lstm), True, 1, 0.0,
            lstm.training, False,
        )  # fmt: skip
        ended.append((h.squeeze(0), c.squeeze(0)))
    else:
        pieces = []
        sizes = [length * width for length, width, _ in layout.calls]
        parts = torch.split_with_sizes(flat, sizes)
        for (length, width, num_left), part in zip(layout.calls, parts, strict=True):
            outputs, (h, c) = _call(lstm, part.view(length, width, -1), (h, c))
            pieces.append(outputs.reshape(length * width, -1))
            # The shortest segments are the last rows: they are complete.
            h, ended_h = torch.split_with_sizes(h, [num_left, width - num_left])
            c, ended_c = torch.split_with_sizes(c, [num_left, width - num_left])
            ended.append((ended_h, ended_c))
        data = torch.cat(pieces)
    outputs = data.index_select(0, scatter).view(steps, rows, -1)
    if not needs_final:
        return outputs, None
    # A later call ends longer segments, and their rows come first.
    all_h, all_c = (torch.cat(parts) for parts in zip(*reversed(ended), strict=True))
    return outputs, (all_h.index_select(0, final), all_c.index_select(0, final))


def _call(lstm: nn.LSTM, inputs: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
    """One call over [t, b, F]; a single step is cheaper as a cell."""
    if len(inputs) == 1:
        state = _cell(lstm, inputs[0], state)
        return state[0].unsqueeze(0), state
    outputs, (h, c) = lstm(inputs, (state[0].unsqueeze(0), state[1].unsqueeze(0)))
    return outputs, (h.squeeze(0), c.squeeze(0))


def _cell(lstm: nn.LSTM, inputs: Tensor, state: LstmState) -> LstmState:
    h, c = torch.lstm_cell(inputs, state, *_weights(lstm))
    return h, c


def _weights(lstm: nn.LSTM) -> list[Tensor]:
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    return [getattr(lstm, name) for name in names]


def _emptied(state: LstmState, starts: Tensor) -> LstmState:
    # Not a product: a memory that is infinite or NaN must not survive its episode.
    which = starts.unsqueeze(-1)
    return state[0].masked_fill(which, 0.0), state[1].masked_fill(which, 0.0)


def _with_empty_row(part: Tensor) -> Tensor:
    return torch.cat([part, part.new_zeros(1, part.shape[1])])


def _to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _require_plain(lstm: nn.LSTM) -> None:
    if lstm.num_layers != 1 or lstm.bidirectional or lstm.proj_size or lstm.batch_first:
        raise ValueError(
            f"{lstm} is not supported: one layer, one direction, no projection, not batch_first."
        )
    if not lstm.bias:
        raise ValueError(f"{lstm} is not supported: it needs biases.")
