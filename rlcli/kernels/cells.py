"""A step of GRU or LSTM layers on the rows of a batch: from the states in row t to those in row t+1, no tensor made.

The oracle is the module's own step, and its bits are kept: these are the operations of `torch.gru_cell` and
`torch.lstm_cell` in their order, on memory that lies as theirs does. A product of rows that lie apart, or at odd
places, may differ in the last bit, and so may `sigmoid` and `tanh` in the last few numbers of a row. What is contiguous
there is contiguous here, and gates share a call only where no row has such a rest.

A GPU is given the fused cells that torch has for CUDA alone: three operations a layer, and a copy for each state.

Shape letters: `N` rows, `L` layers, `I` inputs, `H` units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcli.kernels.recurrent import Weights

Rows = list[Tensor]
_VECTOR = 32  # numbers that the widest loop over a row takes at once
_ALIGNED = 16  # bytes, of whatever numpy and torch allocate


def on_rows(
    weights: list[Weights], source: Rows, before: list[Rows], after: list[Rows], features: Rows | None = None,
    *, on_gpu: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return `run(t)`: states `after[:][t]` [N, L, H] from inputs `source[t]` [N, I] and states `before[:][t]`."""
    if on_gpu:
        return _fused(weights, source, before, after, features)
    make = _gru if len(before) == 1 else _lstm
    runs: list[Callable[[int], Any]] = []
    before = [_in_one_piece(before[0], runs), *before[1:]]
    for layer, layer_weights in enumerate(weights):
        old, new = ([[row[:, layer] for row in rows] for rows in states] for states in (before, after))
        runs.append(make(layer_weights, _in_one_piece(source, runs), *old, *new))
        source = new[0]
    if features is not None:
        runs.append(lambda t: features[t].copy_(source[t]))
    if len(runs) == 1:
        return runs[0]

    def run(t: int) -> None:
        for one in runs:
            one(t)

    return run


def _fused(
    weights: list[Weights], source: Rows, before: list[Rows], after: list[Rows], features: Rows | None
) -> Callable[[int], None]:
    def run(t: int) -> None:
        x = source[t]
        for layer, (ih, hh, bias_ih, bias_hh) in enumerate(weights):
            h, *cell = (rows[t][:, layer] for rows in before)
            given, gates = _affine(x, ih, bias_ih), _affine(h, hh, bias_hh)
            if cell:
                x, c, _ = torch.ops.aten._thnn_fused_lstm_cell(given, gates, *cell)
                after[1][t][:, layer].copy_(c)
            else:
                x, _ = torch.ops.aten._thnn_fused_gru_cell(given, gates, h)
            after[0][t][:, layer].copy_(x)
        if features is not None:
            features[t].copy_(x)

    return run


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    transposed = weight.detach().t()
    return x.mm(transposed) if bias is None else torch.addmm(bias.detach(), x, transposed)


def _in_one_piece(rows: Rows, runs: list[Callable[[int], Any]]) -> Rows:
    """Return aligned, contiguous rows: where they lie otherwise, one that a copy appended to `runs` fills."""
    if all(row.is_contiguous() and row.data_ptr() % _ALIGNED == 0 for row in rows):
        return rows
    piece = rows[0].new_empty(rows[0].shape)
    runs.append(lambda t: piece.copy_(rows[t]))
    return [piece] * len(rows)


def _product(weight: Tensor, bias: Tensor | None, rows: Rows) -> Callable[[int, Tensor], Any]:
    """Return `product(t, out)` of row t and the weight; `W.t()` must stay a view, see `mlp.on_rows`."""
    transposed = weight.detach().t()
    times = torch.mm if bias is None else partial(torch.addmm, bias.detach())
    return lambda t, out: times(rows[t], transposed, out=out)


def _gru(weights: Weights, source: Rows, before: Rows, after: Rows) -> Callable[[int], None]:
    """Return a layer's step on states `[N, H]`."""
    n, units = before[0].shape
    of_input = _product(weights.ih, weights.bias_ih, source)
    of_state = _product(weights.hh, weights.bias_hh, before)
    given, gates = (weights.hh.new_empty(n, 3 * units) for _ in range(2))  # what input and state say
    given_both, given_new = given[:, : 2 * units], given[:, 2 * units :]
    both, candidate = gates[:, : 2 * units], gates[:, 2 * units :]
    reset, update = both.split(units, 1)
    opened = [both] if units % _VECTOR == 0 else [reset, update]
    new = weights.hh.new_empty(n, units)
    add, sub = torch.add, torch.sub

    def run(t: int) -> None:
        of_input(t, given)
        of_state(t, gates)
        both.add_(given_both)
        for gate in opened:
            gate.sigmoid_()
        add(given_new, candidate.mul_(reset), out=new).tanh_()
        sub(before[t], new, out=after[t]).mul_(update).add_(new)

    return run


def _lstm(
    weights: Weights, source: Rows, before: Rows, cell_before: Rows, after: Rows, cell_after: Rows
) -> Callable[[int], None]:
    """Return a layer's step on states and cells `[N, H]`."""
    n, units = before[0].shape
    of_input = _product(weights.ih, weights.bias_ih, source)
    of_state = _product(weights.hh, weights.bias_hh, before)
    given, gates = (weights.hh.new_empty(n, 4 * units) for _ in range(2))
    enter, forget, candidate, leave = gates.split(units, 1)
    opened = [gates[:, : 2 * units], leave] if units % _VECTOR == 0 else [enter, forget, leave]
    cell, output = (weights.hh.new_empty(n, units) for _ in range(2))
    mul, tanh = torch.mul, torch.tanh

    def run(t: int) -> None:
        of_input(t, given)
        of_state(t, gates)
        gates.add_(given)
        for gate in opened:
            gate.sigmoid_()
        candidate.tanh_()
        mul(forget, cell_before[t], out=cell).add_(candidate.mul_(enter))
        cell_after[t].copy_(cell)
        mul(leave, tanh(cell, out=output), out=after[t])

    return run
