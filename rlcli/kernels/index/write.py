"""Following new rows: where runs end, which trajectory goes on, and which next observations must be kept apart.

A batch is `[lanes, steps]` with time last. In a flat ring (one lane) `[P, T]` is one lane of P * T rows, with a
border every T of them. Nothing is changed before all capacities are known to do.
"""

from __future__ import annotations

import numpy as np

from rlcli.kernels import index as ix
from rlcli.kernels.compiled import compiled, copy_bytes, read_8, same_bytes
from rlcli.kernels.index.table import free_slot, new_slot, new_traj, parked, unpark

# how next observations are given: a column of their own, Rows with an index, Rows of a whole batch with its ends
PLAIN, INDEXED, ENDS = range(3)
BLOCK = 64  # rows that are compared at one look
EIGHT_PLAIN = 0x0101010101010101 * ix.PLAIN_ROW
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
    notes[first:stop] = ix.SAME
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
            if notes[row] == ix.SAME:
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
    at = scalars[ix.POOL] + slot * scalars[ix.SLOT_WIDTH]
    for key in range(pairs.shape[1]):
        width = pairs[WIDTH, key]
        if not same_bytes(at + pairs[OFFSET, key], pairs[OBS, key] + row * width, width):
            return False
    return True


@compiled(borrows=True)
def keep(scalars: np.ndarray, slots: np.ndarray, pairs: np.ndarray, row: int, form: int, index: np.ndarray) -> int:
    """Copy the next observation of a row of the batch to a new slot; return it."""
    slot = new_slot(scalars, slots)
    at = scalars[ix.POOL] + slot * scalars[ix.SLOT_WIDTH]
    for key in range(pairs.shape[1]):
        copy_bytes(at + pairs[OFFSET, key], next_at(pairs, key, row, form, index), pairs[WIDTH, key])
    return slot


@compiled(borrows=True)
def compare(
    scalars: np.ndarray, pairs: np.ndarray, form: int, index: np.ndarray, ids: np.ndarray, done: np.ndarray,
    length: int, per_env: int, start: int, stop: int, notes: np.ndarray,
) -> None:  # fmt: skip
    """Note how each row of `[start, stop)` follows the row above it; count the runs it takes."""
    known, exact, has_ids = scalars[ix.KNOWN] != 0, scalars[ix.EXACT] != 0, scalars[ix.HAS_IDS] != 0
    need, paired, unfollowed, first = scalars[ix.LANES], 0, 0, max(start, 1)
    for lane in range(scalars[ix.LANES] if first < stop else 0):
        top, bottom = lane * length + first, lane * length + stop
        if exact:
            follow_all(pairs, top, bottom, form, index, notes)
            paired += bottom - top
            unfollowed += without(notes[top:bottom], ix.SAME)
        else:
            notes[top:bottom] = 0
        go(done[top - 1 : bottom - 1], ids[top - 1 : bottom] if has_ids else ids, notes[top:bottom], exact)
        for step in range(-(-first // per_env) * per_env, stop, per_env):  # one env's rows begin below another's
            row = lane * length + step
            same = notes[row] & ix.SAME != 0 if exact else known and follows(pairs, row - 1, row, form, index)
            goes = notes[row] & ix.GOES != 0 and has_ids and (same or not known)
            notes[row] = ix.GOES * goes + ix.SAME * same + ix.PLAIN_ROW * (goes and (same or not exact))
            if exact:
                paired, unfollowed = paired - 1, unfollowed - (not same)
        need += without(notes[top:bottom], ix.PLAIN_ROW)
    scalars[ix.NEED_RUNS], scalars[ix.PAIRED], scalars[ix.UNFOLLOWED] = need, paired, unfollowed


@compiled(borrows=True)
def go(done: np.ndarray, ids: np.ndarray, notes: np.ndarray, exact: bool) -> None:
    """Note `GOES` and `PLAIN_ROW` beside `SAME`; row i lies under `done[i]` and, if there are ids, `ids[i]`."""
    for i in range(len(notes)):
        goes = done[i] == 0
        if len(ids):
            goes = goes and ids[i] == ids[i + 1]
        plain = goes and (notes[i] != 0 or not exact)
        notes[i] |= ix.GOES * goes + ix.PLAIN_ROW * plain


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
    need, most = scalars[ix.NEED_RUNS], 0
    for lane in range(scalars[ix.LANES]):
        most = max(most, lanes[ix.TAIL, lane] - lanes[ix.HEAD, lane])
    return (
        most + need <= runs.shape[2]
        and scalars[ix.TRAJ_LIVE] + need <= trajs.shape[1]
        and 2 * (scalars[ix.HASHED] + need) <= len(hashed)
        and (
            scalars[ix.KNOWN] == 0
            or scalars[ix.SLOT_HIGH] - scalars[ix.SLOT_FREE] + need + scalars[ix.LANES] <= len(slots)
        )
    )


@compiled(borrows=True)
def evict(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
          slots: np.ndarray, base: int) -> None:  # fmt: skip
    """Forget runs that end before `base`."""
    mask = runs.shape[2] - 1
    for lane in range(scalars[ix.LANES]):
        head = lanes[ix.HEAD, lane]
        while head < lanes[ix.TAIL, lane] and runs[ix.END, lane, head & mask] < base:
            at = head & mask
            if runs[ix.WHERE, lane, at] >= 0:
                free_slot(scalars, slots, runs[ix.WHERE, lane, at])
            traj = runs[ix.TRAJ, lane, at]
            if runs[ix.NXT, lane, at] >= 0:
                trajs[ix.FIRST, traj] = runs[ix.NXT, lane, at]
            else:
                if trajs[ix.STATE, traj] == ix.PARKED:
                    unpark(scalars, trajs, hashed, parked(trajs, hashed, trajs[ix.ID, traj], lane))
                trajs[ix.STATE, traj] = ix.FREE
                trajs[ix.FIRST, traj] = scalars[ix.TRAJ_FREE]
                scalars[ix.TRAJ_FREE] = traj
                scalars[ix.TRAJ_LIVE] -= 1
            head += 1
        lanes[ix.HEAD, lane] = head


@compiled(borrows=True)
def leave(scalars: np.ndarray, runs: np.ndarray, trajs: np.ndarray, hashed: np.ndarray, slots: np.ndarray,
          lane: int, at: int) -> None:  # fmt: skip
    """Leave a trajectory's last run: other rows follow, and an open one may go on later, if it has an id."""
    traj = runs[ix.TRAJ, lane, at]
    if trajs[ix.STATE, traj] != ix.OPEN:
        return
    if scalars[ix.HAS_IDS] == 0:
        trajs[ix.STATE, traj] = ix.CLOSED
        return
    entry = parked(trajs, hashed, trajs[ix.ID, traj], lane)
    before = hashed[entry]
    if before >= 0:  # the same id was left open before: it is the newer one that may go on
        trajs[ix.STATE, before] = ix.CLOSED
        old = trajs[ix.LAST, before] & (runs.shape[2] - 1)
        if scalars[ix.EXACT] == 0 and runs[ix.WHERE, lane, old] >= 0:
            free_slot(scalars, slots, runs[ix.WHERE, lane, old])
            runs[ix.WHERE, lane, old] = ix.BELOW
    else:
        scalars[ix.HASHED] += 1
    hashed[entry] = traj
    trajs[ix.STATE, traj] = ix.PARKED


@compiled(borrows=True)
def begin(scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
          slots: np.ndarray, pairs: np.ndarray, lane: int, row: int, traj_id: int) -> None:  # fmt: skip
    """Begin a run of a new trajectory, or of one that was left open and goes on in `row`."""
    mask = runs.shape[2] - 1
    run = lanes[ix.TAIL, lane]
    at = run & mask
    runs[ix.POS, lane, at] = -1
    traj = -1
    if scalars[ix.HAS_IDS] != 0:
        entry = parked(trajs, hashed, traj_id, lane)
        if hashed[entry] >= 0:
            last = trajs[ix.LAST, hashed[entry]] & mask
            slot = runs[ix.WHERE, lane, last]
            if scalars[ix.KNOWN] == 0 or (slot >= 0 and in_slot(scalars, pairs, slot, row)):
                traj = hashed[entry]
                unpark(scalars, trajs, hashed, entry)
                if slot >= 0:
                    free_slot(scalars, slots, slot)
                runs[ix.WHERE, lane, last] = ix.LINKED
                runs[ix.NXT, lane, last] = run
                runs[ix.POS, lane, at] = runs[ix.POS, lane, last]
                trajs[ix.LAST, traj], trajs[ix.STATE, traj] = run, ix.OPEN
    if traj < 0:
        traj = new_traj(scalars, trajs, traj_id, lane, run)
    runs[ix.TRAJ, lane, at], runs[ix.NXT, lane, at], runs[ix.WHERE, lane, at] = traj, -1, ix.BELOW
    lanes[ix.TAIL, lane] = run + 1


@compiled(borrows=True)
def go_on(runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, lane: int, last: int) -> None:
    """Begin another run of the newest run's trajectory."""
    mask, run = runs.shape[2] - 1, last + 1
    at, to = last & mask, run & mask
    traj = runs[ix.TRAJ, lane, at]
    runs[ix.POS, lane, to], runs[ix.TRAJ, lane, to] = runs[ix.POS, lane, at], traj
    runs[ix.NXT, lane, to], runs[ix.WHERE, lane, to] = -1, ix.BELOW
    runs[ix.NXT, lane, at] = trajs[ix.LAST, traj] = run
    lanes[ix.TAIL, lane] = run + 1


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
    while row < stop and notes[row] & ix.PLAIN_ROW:
        row += 1
    return row - first


@compiled(borrows=True)
def record(
    scalars: np.ndarray, runs: np.ndarray, lanes: np.ndarray, trajs: np.ndarray, hashed: np.ndarray,
    slots: np.ndarray, bits: np.ndarray, notes: np.ndarray, pairs: np.ndarray, form: int, index: np.ndarray,
    ids: np.ndarray, done: np.ndarray, length: int, per_env: int, start: int, stop: int,
) -> None:  # fmt: skip
    """Follow the steps `[start, stop)` of a batch of `length` steps a lane, which were compared and fit."""
    known, exact, has_ids = scalars[ix.KNOWN] != 0, scalars[ix.EXACT] != 0, scalars[ix.HAS_IDS] != 0
    many = per_env < length
    mask, count, capacity = runs.shape[2] - 1, scalars[ix.LANES], scalars[ix.LANES] * scalars[ix.STEPS]
    clear_bits(bits, scalars[ix.CURSOR] * count % capacity, (stop - start) * count, capacity)
    for lane in range(count):
        step = start
        while step < stop:
            row, now = lane * length + step, scalars[ix.CURSOR] + step - start
            traj_id = ids[row] if has_ids else 0
            last = lanes[ix.TAIL, lane] - 1
            at = last & mask
            goes, same, fresh = False, False, last < lanes[ix.HEAD, lane]
            if fresh:
                pass
            elif step == 0:  # the border between two writes
                slot, traj = runs[ix.WHERE, lane, at], runs[ix.TRAJ, lane, at]
                same = known and slot >= 0 and in_slot(scalars, pairs, slot, row)
                goes = trajs[ix.STATE, traj] == ix.OPEN and (same or not known)
                goes = goes and (trajs[ix.ID, traj] == traj_id if has_ids else not (many or scalars[ix.MANY] != 0))
            else:
                goes, same = notes[row] & ix.GOES != 0, notes[row] & ix.SAME != 0
            if fresh:
                begin(scalars, runs, lanes, trajs, hashed, slots, pairs, lane, row, traj_id)
            elif goes and (same or not exact):  # only at the first row: the run of the last write goes on
                if runs[ix.WHERE, lane, at] >= 0:
                    free_slot(scalars, slots, runs[ix.WHERE, lane, at])
                    runs[ix.WHERE, lane, at] = ix.BELOW
                above = (now - 1) % scalars[ix.STEPS] * count + lane
                bits[above >> 3] &= ~np.uint8(1 << (above & 7))
            else:
                open_end = has_ids and trajs[ix.STATE, runs[ix.TRAJ, lane, at]] == ix.OPEN and not goes
                kept = (exact and (open_end or not same)) or (known and open_end)
                if kept and runs[ix.WHERE, lane, at] < 0:
                    runs[ix.WHERE, lane, at] = keep(scalars, slots, pairs, row - 1, form, index)
                elif not kept and runs[ix.WHERE, lane, at] >= 0:
                    free_slot(scalars, slots, runs[ix.WHERE, lane, at])
                    runs[ix.WHERE, lane, at] = ix.BELOW
                if goes:  # the trajectory goes on, but not from these bytes
                    go_on(runs, lanes, trajs, lane, last)
                else:
                    leave(scalars, runs, trajs, hashed, slots, lane, at)
                    begin(scalars, runs, lanes, trajs, hashed, slots, pairs, lane, row, traj_id)
            stretch = plain_rows(notes, row + 1, lane * length + stop) + 1
            at = (lanes[ix.TAIL, lane] - 1) & mask
            runs[ix.END, lane, at] = now + stretch - 1
            runs[ix.POS, lane, at] += stretch
            if done[row + stretch - 1]:
                trajs[ix.STATE, runs[ix.TRAJ, lane, at]] = ix.CLOSED
            below = (now + stretch - 1) % scalars[ix.STEPS] * count + lane
            bits[below >> 3] |= np.uint8(1 << (below & 7))
            step += stretch
        if exact or (known and trajs[ix.STATE, runs[ix.TRAJ, lane, at]] == ix.OPEN):
            runs[ix.WHERE, lane, at] = keep(scalars, slots, pairs, lane * length + stop - 1, form, index)
    cursor = scalars[ix.CURSOR] + stop - start
    evict(scalars, runs, lanes, trajs, hashed, slots, cursor - scalars[ix.STEPS])
    scalars[ix.MANY], scalars[ix.CURSOR] = many, cursor
