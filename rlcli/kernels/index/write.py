"""Following new rows: where runs end, which trajectory goes on, and which next observations must be kept apart.

A batch is `[lanes, steps]` with time last. In a flat ring (one lane) `[P, T]` is one lane of P * T rows, with a
border every T of them. Nothing is changed before all capacities are known to do.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels.compiled import compiled, copy_bytes, read_8, same_bytes
from rlcli.kernels.index import (
    BELOW,
    CLOSED,
    CURSOR,
    END,
    EXACT,
    FIRST,
    FREE,
    GOES,
    HAS_IDS,
    HASHED,
    HEAD,
    ID,
    KNOWN,
    LANES,
    LAST,
    LINKED,
    MANY,
    NEED_RUNS,
    NXT,
    OPEN,
    PAIRED,
    PARKED,
    PLAIN_ROW,
    POOL,
    POS,
    SAME,
    SLOT_FREE,
    SLOT_HIGH,
    SLOT_WIDTH,
    STATE,
    STEPS,
    TAIL,
    TRAJ,
    TRAJ_FREE,
    TRAJ_LIVE,
    UNFOLLOWED,
    WHERE,
)
from rlcli.kernels.index.table import free_slot, new_slot, new_traj, parked, unpark

# how next observations are given: a column of their own, Rows with an index, Rows of a whole batch with its ends
PLAIN, INDEXED, ENDS = range(3)
BLOCK = 64  # rows that are compared at one look
EIGHT_PLAIN = 0x0101010101010101 * PLAIN_ROW
# one column of `pairs` for each observation key
OBS, NEXT, EXTRA, WIDTH, OFFSET, POOLED = range(6)


@compiled(borrows=True)
def next_at(pairs: np.ndarray, key: int, row: int, form: int, index: np.ndarray) -> int:
    """Return the address of the next observation of a row of the batch."""
    width = pairs[WIDTH, key]
    if form == PLAIN:
        return pairs[NEXT, key] + row * width
    if form == INDEXED:
        at, pooled = np.int64(index[row]), pairs[POOLED, key]
        return pairs[NEXT, key] + at * width if at < pooled else pairs[EXTRA, key] + (at - pooled) * width
    at = np.searchsorted(index, row)
    if at < len(index) and index[at] == row:
        return pairs[EXTRA, key] + at * width
    return pairs[NEXT, key] + (row + 1) * width


@compiled(borrows=True)
def follows(pairs: np.ndarray, row: int, below: int, form: int, index: np.ndarray) -> bool:
    """Return True if a row's next observation equals, bit for bit, the observation of row `below`."""
    for key in range(pairs.shape[1]):
        width = pairs[WIDTH, key]
        one, other = next_at(pairs, key, row, form, index), pairs[OBS, key] + below * width
        if one != other and not same_bytes(one, other, width):
            return False
    return True


@compiled(borrows=True)
def follow_all(pairs: np.ndarray, first: int, stop: int, form: int, index: np.ndarray, notes: np.ndarray) -> None:
    """Note `SAME` for the rows `[first, stop)` that follow the row above, and 0 for the others."""
    notes[first:stop] = SAME
    if form == ENDS:
        at = np.searchsorted(index, first - 1)
        while at < len(index) and index[at] < stop - 1:
            if not follows(pairs, index[at], index[at] + 1, form, index):
                notes[index[at] + 1] = 0
            at += 1
        return
    for key in range(pairs.shape[1]):
        if form == PLAIN:
            follow_blocks(pairs[OBS, key], pairs[NEXT, key], pairs[WIDTH, key], first, stop, notes)
            continue
        width, obs, after = pairs[WIDTH, key], pairs[OBS, key], pairs[NEXT, key]
        extra, pooled = pairs[EXTRA, key], pairs[POOLED, key]
        for row in range(first, stop):
            if notes[row] == SAME:
                at, current = np.int64(index[row - 1]), obs + row * width
                above = after + at * width if at < pooled else extra + (at - pooled) * width
                if above != current and not same_bytes(above, current, width):
                    notes[row] = 0


@compiled(borrows=True)
def follow_blocks(obs: int, after: int, width: int, first: int, stop: int, notes: np.ndarray) -> None:
    """Note 0 for rows of a plain key that do not follow the row above, comparing blocks first."""
    while first < stop:
        block = min(first + BLOCK, stop)
        if not same_bytes(obs + first * width, after + (first - 1) * width, (block - first) * width):
            for row in range(first, block):
                if not same_bytes(obs + row * width, after + (row - 1) * width, width):
                    notes[row] = 0
        first = block


@compiled(borrows=True)
def in_slot(scalars: np.ndarray, pairs: np.ndarray, slot: int, row: int) -> bool:
    """Return True if a slot holds, bit for bit, the observation of a row of the batch."""
    at = scalars[POOL] + slot * scalars[SLOT_WIDTH]
    for key in range(pairs.shape[1]):
        width = pairs[WIDTH, key]
        if not same_bytes(at + pairs[OFFSET, key], pairs[OBS, key] + row * width, width):
            return False
    return True


@compiled(borrows=True)
def keep(scalars: np.ndarray, slots: np.ndarray, pairs: np.ndarray, row: int, form: int, index: np.ndarray) -> int:
    """Copy the next observation of a row of the batch to a new slot; return it."""
    slot = new_slot(scalars, slots)
    at = scalars[POOL] + slot * scalars[SLOT_WIDTH]
    for key in range(pairs.shape[1]):
        copy_bytes(at + pairs[OFFSET, key], next_at(pairs, key, row, form, index), pairs[WIDTH, key])
    return slot


@compiled(borrows=True)
def compare(
    scalars: np.ndarray, pairs: np.ndarray, form: int, index: np.ndarray, ids: np.ndarray, done: np.ndarray,
    length: int, per_env: int, start: int, stop: int, notes: np.ndarray,
) -> None:  # fmt: skip
    """Note how each row of `[start, stop)` follows the row above it; count the runs it takes."""
    known, exact, has_ids = scalars[KNOWN] != 0, scalars[EXACT] != 0, scalars[HAS_IDS] != 0
    need, paired, unfollowed, first = scalars[LANES], 0, 0, max(start, 1)
    for lane in range(scalars[LANES] if first < stop else 0):
        top, bottom = lane * length + first, lane * length + stop
        if exact:
            follow_all(pairs, top, bottom, form, index, notes)
            paired += bottom - top
            unfollowed += without(notes[top:bottom], SAME)
        else:
            notes[top:bottom] = 0
        go(done[top - 1 : bottom - 1], ids[top - 1 : bottom] if has_ids else ids, notes[top:bottom], exact)
        for step in range(-(-first // per_env) * per_env, stop, per_env):  # one env's rows begin below another's
            row = lane * length + step
            same = notes[row] & SAME != 0 if exact else known and follows(pairs, row - 1, row, form, index)
            goes = notes[row] & GOES != 0 and has_ids and (same or not known)
            notes[row] = GOES * goes + SAME * same + PLAIN_ROW * (goes and (same or not exact))
            if exact:
                paired, unfollowed = paired - 1, unfollowed - (not same)
        need += without(notes[top:bottom], PLAIN_ROW)
    scalars[NEED_RUNS], scalars[PAIRED], scalars[UNFOLLOWED] = need, paired, unfollowed


@compiled(borrows=True)
def go(done: np.ndarray, ids: np.ndarray, notes: np.ndarray, exact: bool) -> None:
    """Note `GOES` and `PLAIN_ROW` beside `SAME`; row i lies under `done[i]` and, if there are ids, `ids[i]`."""
    for i in range(len(notes)):
        goes = done[i] == 0
        if len(ids):
            goes = goes and ids[i] == ids[i + 1]
        plain = goes and (notes[i] != 0 or not exact)
        notes[i] |= GOES * goes + PLAIN_ROW * plain


@compiled(borrows=True)
def without(notes: np.ndarray, note: int) -> int:
    """Count the rows that do not have this note."""
    count = 0
    for i in range(len(notes)):
        count += notes[i] & note == 0
    return count


@compiled(borrows=True)
def fits(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
         slots: np.ndarray) -> bool:  # fmt: skip
    need, most = scalars[NEED_RUNS], 0
    for lane in range(scalars[LANES]):
        most = max(most, lanes[TAIL, lane] - lanes[HEAD, lane])
    return (
        most + need <= runs.shape[2]
        and scalars[TRAJ_LIVE] + need <= trajs.shape[1]
        and 2 * (scalars[HASHED] + need) <= len(hashed)
        and (scalars[KNOWN] == 0 or scalars[SLOT_HIGH] - scalars[SLOT_FREE] + need + scalars[LANES] <= len(slots))
    )


@compiled(borrows=True)
def evict(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
          slots: np.ndarray, base: int) -> None:  # fmt: skip
    """Forget runs that end before `base`."""
    mask = runs.shape[2] - 1
    for lane in range(scalars[LANES]):
        head = lanes[HEAD, lane]
        while head < lanes[TAIL, lane] and runs[END, lane, head & mask] < base:
            at = head & mask
            if runs[WHERE, lane, at] >= 0:
                free_slot(scalars, slots, runs[WHERE, lane, at])
            traj = runs[TRAJ, lane, at]
            if runs[NXT, lane, at] >= 0:
                trajs[FIRST, traj] = runs[NXT, lane, at]
            else:
                if trajs[STATE, traj] == PARKED:
                    unpark(scalars, trajs, hashed, parked(trajs, hashed, trajs[ID, traj], lane))
                trajs[STATE, traj] = FREE
                trajs[FIRST, traj] = scalars[TRAJ_FREE]
                scalars[TRAJ_FREE] = traj
                scalars[TRAJ_LIVE] -= 1
            head += 1
        lanes[HEAD, lane] = head


@compiled(borrows=True)
def leave(scalars: np.ndarray, runs: np.ndarray, trajs: np.ndarray, hashed: np.ndarray, slots: np.ndarray,
          lane: int, at: int) -> None:  # fmt: skip
    """Leave a trajectory's last run: other rows follow, and an open one may go on later, if it has an id."""
    traj = runs[TRAJ, lane, at]
    if trajs[STATE, traj] != OPEN:
        return
    if scalars[HAS_IDS] == 0:
        trajs[STATE, traj] = CLOSED
        return
    entry = parked(trajs, hashed, trajs[ID, traj], lane)
    before = hashed[entry]
    if before >= 0:  # the same id was left open before: it is the newer one that may go on
        trajs[STATE, before] = CLOSED
        old = trajs[LAST, before] & (runs.shape[2] - 1)
        if scalars[EXACT] == 0 and runs[WHERE, lane, old] >= 0:
            free_slot(scalars, slots, runs[WHERE, lane, old])
            runs[WHERE, lane, old] = BELOW
    else:
        scalars[HASHED] += 1
    hashed[entry] = traj
    trajs[STATE, traj] = PARKED


@compiled(borrows=True)
def begin(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
          slots: np.ndarray, pairs: np.ndarray, lane: int, row: int, traj_id: int) -> None:  # fmt: skip
    """Begin a run of a new trajectory, or of one that was left open and goes on in `row`."""
    mask = runs.shape[2] - 1
    run = lanes[TAIL, lane]
    at = run & mask
    runs[POS, lane, at] = -1
    traj = -1
    if scalars[HAS_IDS] != 0:
        entry = parked(trajs, hashed, traj_id, lane)
        if hashed[entry] >= 0:
            last = trajs[LAST, hashed[entry]] & mask
            slot = runs[WHERE, lane, last]
            if scalars[KNOWN] == 0 or (slot >= 0 and in_slot(scalars, pairs, slot, row)):
                traj = hashed[entry]
                unpark(scalars, trajs, hashed, entry)
                if slot >= 0:
                    free_slot(scalars, slots, slot)
                runs[WHERE, lane, last] = LINKED
                runs[NXT, lane, last] = run
                runs[POS, lane, at] = runs[POS, lane, last]
                trajs[LAST, traj], trajs[STATE, traj] = run, OPEN
    if traj < 0:
        traj = new_traj(scalars, trajs, traj_id, lane, run)
    runs[TRAJ, lane, at], runs[NXT, lane, at], runs[WHERE, lane, at] = traj, -1, BELOW
    lanes[TAIL, lane] = run + 1


@compiled(borrows=True)
def go_on(runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, lane: int, last: int) -> None:
    """Begin another run of the newest run's trajectory."""
    mask, run = runs.shape[2] - 1, last + 1
    at, to = last & mask, run & mask
    traj = runs[TRAJ, lane, at]
    runs[POS, lane, to], runs[TRAJ, lane, to] = runs[POS, lane, at], traj
    runs[NXT, lane, to], runs[WHERE, lane, to] = -1, BELOW
    runs[NXT, lane, at] = trajs[LAST, traj] = run
    lanes[TAIL, lane] = run + 1


@compiled(borrows=True)
def clear_bits(bits: np.ndarray, first: int, count: int, capacity: int) -> None:
    """Clear the bits of `count` rows from `first` on, around the end of the ring."""
    if first + count > capacity:
        clear_bits_of(bits, 0, first + count - capacity)
        count = capacity - first
    clear_bits_of(bits, first, first + count)


@compiled(borrows=True)
def clear_bits_of(bits: np.ndarray, first: int, stop: int) -> None:
    while first < stop and first & 7:
        bits[first >> 3] &= ~np.uint8(1 << (first & 7))
        first += 1
    while first + 8 <= stop:
        bits[first >> 3] = 0
        first += 8
    while first < stop:
        bits[first >> 3] &= ~np.uint8(1 << (first & 7))
        first += 1


@compiled(borrows=True)
def plain_rows(notes: np.ndarray, first: int, stop: int) -> int:
    """Count the consecutive plain rows from `first` on."""
    row, address = first, notes.ctypes.data
    while row + 8 <= stop and read_8(address + row) & EIGHT_PLAIN == EIGHT_PLAIN:
        row += 8
    while row < stop and notes[row] & PLAIN_ROW:
        row += 1
    return row - first


@compiled(borrows=True)
def record(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
    slots: np.ndarray, bits: np.ndarray, notes: np.ndarray, pairs: np.ndarray, form: int, index: np.ndarray,
    ids: np.ndarray, done: np.ndarray, length: int, per_env: int, start: int, stop: int,
) -> None:  # fmt: skip
    """Follow the steps `[start, stop)` of a batch of `length` steps a lane, which were compared and fit."""
    known, exact, has_ids = scalars[KNOWN] != 0, scalars[EXACT] != 0, scalars[HAS_IDS] != 0
    many = per_env < length
    mask, count, capacity = runs.shape[2] - 1, scalars[LANES], scalars[LANES] * scalars[STEPS]
    clear_bits(bits, scalars[CURSOR] * count % capacity, (stop - start) * count, capacity)
    for lane in range(count):
        step = start
        while step < stop:
            row, now = lane * length + step, scalars[CURSOR] + step - start
            traj_id = ids[row] if has_ids else 0
            last = lanes[TAIL, lane] - 1
            at = last & mask
            goes, same, fresh = False, False, last < lanes[HEAD, lane]
            if fresh:
                pass
            elif step == 0:  # the border between two writes
                slot, traj = runs[WHERE, lane, at], runs[TRAJ, lane, at]
                same = known and slot >= 0 and in_slot(scalars, pairs, slot, row)
                goes = trajs[STATE, traj] == OPEN and (same or not known)
                goes = goes and (trajs[ID, traj] == traj_id if has_ids else not (many or scalars[MANY] != 0))
            else:
                goes, same = notes[row] & GOES != 0, notes[row] & SAME != 0
            if fresh:
                begin(scalars, runs, lanes, trajs, hashed, slots, pairs, lane, row, traj_id)
            elif goes and (same or not exact):  # only at the first row: the run of the last write goes on
                if runs[WHERE, lane, at] >= 0:
                    free_slot(scalars, slots, runs[WHERE, lane, at])
                    runs[WHERE, lane, at] = BELOW
                above = (now - 1) % scalars[STEPS] * count + lane
                bits[above >> 3] &= ~np.uint8(1 << (above & 7))
            else:
                open_end = has_ids and trajs[STATE, runs[TRAJ, lane, at]] == OPEN and not goes
                kept = (exact and (open_end or not same)) or (known and open_end)
                if kept and runs[WHERE, lane, at] < 0:
                    runs[WHERE, lane, at] = keep(scalars, slots, pairs, row - 1, form, index)
                elif not kept and runs[WHERE, lane, at] >= 0:
                    free_slot(scalars, slots, runs[WHERE, lane, at])
                    runs[WHERE, lane, at] = BELOW
                if goes:  # the trajectory goes on, but not from these bytes
                    go_on(runs, lanes, trajs, lane, last)
                else:
                    leave(scalars, runs, trajs, hashed, slots, lane, at)
                    begin(scalars, runs, lanes, trajs, hashed, slots, pairs, lane, row, traj_id)
            stretch = plain_rows(notes, row + 1, lane * length + stop) + 1
            at = (lanes[TAIL, lane] - 1) & mask
            runs[END, lane, at] = now + stretch - 1
            runs[POS, lane, at] += stretch
            if done[row + stretch - 1]:
                trajs[STATE, runs[TRAJ, lane, at]] = CLOSED
            below = (now + stretch - 1) % scalars[STEPS] * count + lane
            bits[below >> 3] |= np.uint8(1 << (below & 7))
            step += stretch
        if exact or (known and trajs[STATE, runs[TRAJ, lane, at]] == OPEN):
            runs[WHERE, lane, at] = keep(scalars, slots, pairs, lane * length + stop - 1, form, index)
    cursor = scalars[CURSOR] + stop - start
    evict(scalars, runs, lanes, trajs, hashed, slots, cursor - scalars[STEPS])
    scalars[MANY], scalars[CURSOR] = many, cursor
