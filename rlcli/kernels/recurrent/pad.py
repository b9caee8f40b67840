"""Trajectories as sequences of their own, through torch's own GRU and LSTM: cuDNN on a GPU, oneDNN or ATen on a CPU.

Torch takes sequences of many lengths as the rows of their first steps, then of their second, and so on, the longest
first: no step is made up. It gives back an LSTM's state at every step but its cell only at the last, so the cells are
computed from the states, which are all known then: the gates of all steps by one product each, the cells by one scan.

The host waits for the lengths. What a backward pass keeps is torch's to say, so `recompute` changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlcli.kernels.scan import scan


def unroll(x: Tensor, states: tuple[Tensor, ...], source: Tensor, weights: Any) -> tuple[Tensor, ...]:
    packed = pack(source)
    flat, has_bias = _flat(weights)
    first: Any = tuple(s.index_select(0, packed.rows)[None] for s in states)
    run, first = (torch._VF.gru, first[0]) if len(states) == 1 else (torch._VF.lstm, first)  # type: ignore[attr-defined]
    h = packed.get(run(packed.put(x), packed.widths, first, flat, has_bias, 1, 0.0, True, False)[0], x)
    return (h,) if len(states) == 1 else (h, _cells(x, states, source, weights, h))


class PackedSteps(NamedTuple):
    """Indices that pack the steps of ``[B, T]``."""

    order: Tensor  # [B * T], the flat index of every packed step
    place: Tensor  # [B * T], the packed index of every flat step
    widths: Tensor  # [longest], on the CPU, how many trajectories have that many steps
    rows: Tensor  # [N], the state that each trajectory begins with, the longest first

    def put(self, x: Tensor) -> Tensor:
        """Pack steps ``[B * T, I]``."""
        return x.reshape(-1, x.shape[2]).index_select(0, self.order)

    def get(self, h: Tensor, like: Tensor) -> Tensor:
        """Unpack to ``[B, T, H]``."""
        return h.index_select(0, self.place).view(*like.shape[:2], -1)


def pack(source: Tensor) -> PackedSteps:
    """The trajectories of ``[B, T]``, by length."""
    row = source.flatten()
    begins = (row >= 0).nonzero().flatten()
    lengths = torch.diff(begins, append=begins.new_tensor([len(row)]))
    lengths, longest_first = lengths.sort(descending=True, stable=True)
    steps = int(lengths[0])
    # trajectories of more than k steps, for every k
    widths = torch.bincount(lengths - 1, minlength=steps).flip(0).cumsum(0).flip(0)
    starts = widths.cumsum(0) - widths
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(rank), device=rank.device)
    of = (row >= 0).cumsum(0) - 1  # the trajectory of every step
    packed = starts[torch.arange(len(row), device=row.device) - begins[of]] + rank[of]
    order = torch.empty_like(packed)
    order[packed] = torch.arange(len(packed), device=packed.device)
    return PackedSteps(order, packed, widths.cpu(), row[begins[longest_first]])


def _flat(weights: Any) -> tuple[list[Tensor], bool]:
    """Return weights as torch's functions take them: both biases or none."""
    biases = [weights.bias_ih, weights.bias_hh]
    if all(b is None for b in biases):
        return [weights.ih, weights.hh], False
    return [weights.ih, weights.hh, *(weights.ih.new_zeros(len(weights.ih)) if b is None else b for b in biases)], True


def _cells(x: Tensor, states: tuple[Tensor, ...], source: Tensor, weights: Any, h: Tensor) -> Tensor:
    """Return the cells of every step, given the states of every step."""
    state, cell = states
    row, begins = source.clamp(min=0), (source >= 0)[..., None]
    before = torch.where(begins, state[row], torch.cat([h[:, :1], h[:, :-1]], 1))
    units = h.shape[2]
    three: list[Any] = [None if w is None else w[: 3 * units] for w in weights]  # no output gates
    gates = linear(x, three[0], three[2]) + linear(before, three[1], three[3])
    i, f, g = gates.chunk(3, -1)
    forget = torch.sigmoid(f)
    new = torch.sigmoid(i) * torch.tanh(g) + torch.where(begins, forget * cell[row], 0.0)
    # the scan runs from the end: `x_t = reward_t + decay_t x_{t+1}`, cut where a trajectory begins
    new, forget, cut = (y.flip(1) for y in (new, forget, begins.expand_as(h)))
    ends, zero = torch.ones_like(cut), new.new_zeros(()).expand_as(new)
    return scan(new, ends, cut, zero, zero, 0.0, forget)[0].flip(1)
