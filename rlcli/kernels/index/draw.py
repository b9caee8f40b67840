"""Drawing slices: a trajectory, then one of its legal starts, all draws uniform and independent; and their flags.

A trajectory of `len` rows has the starts `-left .. len - slice_len + right` (at least one: 0), counted from its
oldest live row; rows before the first and after the last are clipped away. "transition" weighting draws a
trajectory in proportion to `2 len + left + right`, which is uniform over rows where nothing is clipped and, with
`left = right = slice_len - 1`, makes every row exactly equally likely.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels import index as ix
from rlcli.kernels.compiled import compiled, read_1, write_1
from rlcli.kernels.index.read import span_of
from rlcli.kernels.index.table import base_of, find, first_step

TRIES = 64


@compiled(borrows=True)
def bits64(random: np.ndarray) -> np.uint64:
    """Return the next 64 bits of xoshiro256++ (Blackman and Vigna, 2019); `random` is its state, uint64 [4]."""
    s0, s1, s2, s3 = random[0], random[1], random[2], random[3]
    mixed = s0 + s3
    out = ((mixed << np.uint64(23)) | (mixed >> np.uint64(41))) + s0
    shifted = s1 << np.uint64(17)
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s3 = (s3 << np.uint64(45)) | (s3 >> np.uint64(19))
    random[0], random[1], random[2], random[3] = s0, s1, s2, s3
    return out


@compiled(borrows=True)
def below(random: np.ndarray, bound: int) -> int:
    """Draw a uniform integer in `[0, bound)`, exactly: values outside are drawn again."""
    mask = np.uint64(bound - 1)
    for shift in (1, 2, 4, 8, 16, 32):
        mask |= mask >> np.uint64(shift)
    while True:
        value = bits64(random) & mask
        if value < np.uint64(bound):
            return np.int64(value)  # type: ignore[return-value]


@compiled(borrows=True)
def integers(random: np.ndarray, bound: int, out: np.ndarray) -> None:
    for i in range(len(out)):
        out[i] = below(random, bound)


@compiled(borrows=True)
def eligible(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, least: int, both: int,
             by_rows: bool, numbers: np.ndarray, weights: np.ndarray) -> int:  # fmt: skip
    """List trajectories of at least `least` rows with cumulated weights; return how many there are."""
    count, total = 0, 0
    for traj in range(scalars[ix.TRAJ_HIGH]):
        length = span_of(scalars, runs, lanes, trajs, traj)[0]
        if length >= least:
            total += 2 * length + both if by_rows else 1
            numbers[count], weights[count] = traj, total
            count += 1
    return count


@compiled(borrows=True)
def run_at(runs: np.ndarray, trajs: np.ndarray, traj: int, position: int) -> int:
    """Find the run that holds a live position of a trajectory, from the oldest on."""
    lane, mask, run = trajs[ix.LANE, traj], runs.shape[2] - 1, trajs[ix.FIRST, traj]
    while runs[ix.POS, lane, run & mask] < position:
        run = runs[ix.NXT, lane, run & mask]
    return run


@compiled(borrows=True)
def fill(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, lane: int, run: int, position: int, count: int,
         rows: np.ndarray) -> None:  # fmt: skip
    """Write `count` rows of a trajectory from a position on, which lies in `run`."""
    mask, width, capacity = runs.shape[2] - 1, scalars[ix.LANES], scalars[ix.LANES] * scalars[ix.STEPS]
    step = runs[ix.END, lane, run & mask] - (runs[ix.POS, lane, run & mask] - position)
    written = 0
    while True:
        row = step % scalars[ix.STEPS] * width + lane
        for _ in range(min(count - written, runs[ix.END, lane, run & mask] - step + 1)):
            rows[written] = row
            written += 1
            row += width
            if row >= capacity:
                row -= capacity
        if written == count:
            break
        run = runs[ix.NXT, lane, run & mask]
        step = first_step(scalars, runs, lanes, lane, run)


@compiled(borrows=True)
def draw(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, bits: np.ndarray, random: np.ndarray,
    count: int, slice_len: int, least: int, left: int, right: int, by_rows: bool, numbers: np.ndarray,
    weights: np.ndarray, rows: np.ndarray, sizes: np.ndarray, fails: np.ndarray,
) -> int:  # fmt: skip
    """Write `count` slices end to end into `rows`; return the number of rows, or -1 if a table is needed."""
    # fails: where tries ran out; slices drawn before stay, so no draw is thrown away for its outcome
    width, live = scalars[ix.LANES], scalars[ix.CURSOR] - base_of(scalars)
    written = fails[1]
    for i in range(fails[0], count):
        traj, position, run = -1, -1, -1
        if len(numbers):
            traj = numbers[np.searchsorted(weights, below(random, weights[-1]), side="right")]
        else:
            for _ in range(TRIES):
                position = -1
                virtual = live * width * 2
                if by_rows:
                    position = below(random, virtual + (left + right) * scalars[ix.TRAJ_LIVE])
                if by_rows and position < virtual:
                    position >>= 1
                    lane, step = position % width, base_of(scalars) + position // width
                    run = find(runs, lanes, lane, step)
                    at = run & (runs.shape[2] - 1)
                    traj = runs[ix.TRAJ, lane, at]
                    position = runs[ix.POS, lane, at] - (runs[ix.END, lane, at] - step)
                else:
                    position, run = -1, -1
                    traj = below(random, scalars[ix.TRAJ_HIGH])
                    while trajs[ix.STATE, traj] == ix.FREE:
                        traj = below(random, scalars[ix.TRAJ_HIGH])
                length = span_of(scalars, runs, lanes, trajs, traj)[0]
                if length >= least:
                    break
                traj = -1
        if traj < 0:
            fails[0], fails[1] = i, written
            return -1
        length, low, _ = span_of(scalars, runs, lanes, trajs, traj)
        first, last = -left, length - slice_len + right
        if last < first:
            first = last = 0
        if left == 0 and right == 0 and 0 <= position - low <= last:
            start = position - low  # the row that chose the trajectory: uniform among its starts
        else:
            start = first + below(random, last - first + 1)
            run = -1
        stop = min(start + slice_len, length)
        start = max(start, 0)
        if run < 0:
            run = run_at(runs, trajs, traj, low + start)
        fill(scalars, runs, lanes, trajs[ix.LANE, traj], run, low + start, stop - start, rows[written:])
        written += stop - start
        sizes[i] = stop - start
    return written


@compiled(borrows=True)
def led_in(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, numbers: np.ndarray,
    positions: np.ndarray, lengths: np.ndarray, most: np.ndarray, rows: np.ndarray, added: np.ndarray,
) -> int:  # fmt: skip
    """Write slices from these positions, each begun up to `most` rows earlier; return the number of rows."""
    written = 0
    for i in range(len(lengths)):
        traj = numbers[i]
        added[i] = min(most[i], positions[i] - span_of(scalars, runs, lanes, trajs, traj)[1])
        first, count = positions[i] - added[i], added[i] + lengths[i]
        run = run_at(runs, trajs, traj, first)
        fill(scalars, runs, lanes, trajs[ix.LANE, traj], run, first, count, rows[written:])
        written += count
    return written


@compiled(borrows=True)
def mark(init: int, terminated: int, truncated: int, done: int, width: int, fresh: bool, lengths: np.ndarray) -> None:
    """Write flags `[M, width]`, a byte each, at addresses, of slices end to end; `fresh`: zero `init` first."""
    row = 0
    for i in range(lengths.sum() * width if fresh else 0):
        write_1(init + i, 0)
    for length in lengths:
        for i in range(row, row + width):
            write_1(init + i, 1)
        row += length * width
        for i in range(row - width, row):
            if read_1(terminated + i) == 0:
                write_1(truncated + i, 1)
            write_1(done + i, 1)
