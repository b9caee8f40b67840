"""A ring in plain Python: one object a row, scanned from end to end; and streams of steps to write into it.

It shares no idea with the compiled index: no runs, no bits, no slots.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from rlcli.data.next_obs import Rows
from rlcli.kernels import index as layout


class Trajectory:
    def __init__(self, traj_id):
        self.id, self.open, self.parked, self.count, self.last = traj_id, True, False, 0, None


class Row:
    def __init__(self, step, lane, obs, following, traj_id, done):
        self.step, self.lane, self.obs, self.next, self.id, self.done = step, lane, obs, following, traj_id, done
        self.traj = self.succ = None
        self.position = 0


class Model:
    """What a ring must answer.

    Rows are given as bytes: `obs` and `following` are compared with ==, whatever they hold.
    """

    def __init__(self, steps, lanes, *, has_ids, known):
        self.steps, self.lanes, self.has_ids, self.known = steps, lanes, has_ids, known
        self.rows = [[] for _ in range(lanes)]
        self.parked = [{} for _ in range(lanes)]
        self.cursor, self.many = 0, False

    def write(self, obs, following, ids, done, length, per_env):
        """Lists of `lanes * length` rows, lane after lane."""
        for start in range(0, length, self.steps):
            stop = min(start + self.steps, length)
            for lane in range(self.lanes):
                for t in range(start, stop):
                    i = lane * length + t
                    row = Row(
                        self.cursor + t - start, lane, obs[i], following[i], ids[i] if self.has_ids else 0, done[i]
                    )
                    self._append(row, first=t == 0, between=t % per_env == 0, many=per_env < length)
            self.cursor += stop - start
            self.many = per_env < length
            self._evict()

    def _append(self, row, *, first, between, many):
        lane = self.rows[row.lane]
        above = lane[-1] if lane else None
        if above is not None and not self._goes(above, row, first, between, many):
            self._leave(above)
            above = None
        elif above is None:
            pass
        if above is None and self.has_ids:
            candidate = self.parked[row.lane].get(row.id)
            if candidate is not None and (not self.known or candidate.next == row.obs):
                del self.parked[row.lane][row.id]
                candidate.traj.parked = False
                above = candidate
        if above is None:
            row.traj = Trajectory(row.id)
        else:
            row.traj, above.succ, row.position = above.traj, row, above.position + 1
        if row.done:
            row.traj.open = False
        row.traj.last = row
        lane.append(row)

    def _goes(self, above, row, first, between, many):
        if not above.traj.open or above.traj.parked:
            return False
        if self.has_ids and above.id != row.id:
            return False
        if not first and not between:
            return True
        if self.known and above.next != row.obs:
            return False
        return self.has_ids or (first and not many and not self.many)

    def _leave(self, above):
        if not above.traj.open:
            return
        if not self.has_ids:
            above.traj.open = False
            return
        before = self.parked[above.lane].get(above.id)
        if before is not None:
            before.traj.open = before.traj.parked = False
        self.parked[above.lane][above.id] = above
        above.traj.parked = True

    def _evict(self):
        base = max(0, self.cursor - self.steps)
        for lane in range(self.lanes):
            self.rows[lane] = [row for row in self.rows[lane] if row.step >= base]
            self.parked[lane] = {k: row for k, row in self.parked[lane].items() if row.step >= base}

    def cut(self):
        if not self.has_ids:
            for lane in self.rows:
                if lane:
                    lane[-1].traj.open = False

    def overwrite(self, number, obs, following, traj_id, done):
        """The row of this number gets other contents; its trajectory is cut around it."""
        row = self.live()[number]
        named = (row.id, row.done) == (traj_id if self.has_ids else 0, done)
        if named and ((row.obs, row.next) == (obs, following) or not self.known):
            row.obs, row.next = obs, following
            return
        lane = self.rows[row.lane]
        above = next((r for r in lane if r.succ is row), None)
        old, rest = row.traj, row.succ
        fresh = Row(row.step, row.lane, obs, following, traj_id if self.has_ids else 0, done)
        fresh.traj = Trajectory(fresh.id)
        fresh.traj.open = not done and row.step == self.cursor - 1
        lane[lane.index(row)] = fresh
        if above is not None:
            above.succ = None
            if rest is not None:
                new = Trajectory(old.id)
                new.open, new.parked = old.open, old.parked
                while rest is not None:
                    rest.traj, rest = new, rest.succ
            else:
                self.parked[row.lane] = {k: r for k, r in self.parked[row.lane].items() if r is not row}
            old.open = old.parked = False
        elif rest is None:
            self.parked[row.lane] = {k: r for k, r in self.parked[row.lane].items() if r is not row}

    # ---- answers -----------------------------------------------------------------------------------------------
    def live(self):
        """Row number -> Row."""
        return {row.step % self.steps * self.lanes + row.lane: row for lane in self.rows for row in lane}


def compare(ring, model):
    """Every answer about every live row."""
    live = model.live()
    rows = np.array(sorted(live), np.int64)
    number = {id(row): n for n, row in live.items()}
    index = ring.index
    assert len(ring) == len(live)
    expected = [number.get(id(live[n].succ), -1) for n in rows]
    assert index.successors(rows).tolist() == expected
    assert index.whose(rows)[1].tolist() == [live[n].position for n in rows]
    if model.has_ids:
        assert index.ids(rows).tolist() == [live[n].id for n in rows]
    ours, theirs = index.numbers(rows).tolist(), [id(live[n].traj) for n in rows]
    assert len(set(zip(ours, theirs, strict=True))) == len(set(ours)) == len(set(theirs)) == index.count
    found = index.trajectories()
    members = {}
    for n, m in zip(ours, rows.tolist(), strict=True):
        members.setdefault(n, []).append((live[m].position, m))
    for k, n in enumerate(found["number"].tolist()):
        mine = sorted(members[n])
        assert (found["position"][k], found["row"][k]) == mine[0] and found["length"][k] == len(mine)
        assert [p for p, _ in mine] == list(range(mine[0][0], mine[0][0] + len(mine)))
        assert found["closed"][k] == (not live[mine[0][1]].traj.open)
    for n in (1, 3):
        path, steps = index.walk(rows, n)
        for k, row in enumerate(rows.tolist()):
            walked = [live[row]]
            while len(walked) < n and id(walked[-1].succ) in number:
                walked.append(walked[-1].succ)
            assert steps[k] == len(walked)
            assert path[k].tolist() == [number[id(r)] for r in walked] + [number[id(walked[-1])]] * (n - len(walked))
    return rows, live


def check(ring):
    """The invariants that hold after every write, whatever was written."""
    arrays = ring.index
    runs, lanes, trajs, scalars = arrays.runs, arrays.lanes, arrays.trajs, arrays.scalars
    mask, cursor, base = runs.shape[2] - 1, arrays.cursor, arrays.base
    slots, parked = [], set()
    for lane in range(arrays.space.lanes):
        numbers = np.arange(*lanes[:, lane])
        mine = runs[:, lane, numbers & mask]
        if not cursor:
            assert not len(numbers)
            continue
        ends = mine[layout.END]
        assert (np.diff(ends) > 0).all() and ends[0] >= base and ends[-1] == cursor - 1  # 1 to 3
        for e, (end, pos, traj, following, where) in zip(numbers.tolist(), mine.T.tolist(), strict=True):
            assert trajs[layout.STATE, traj] != layout.FREE and trajs[layout.LANE, traj] == lane
            if following >= 0:
                assert (
                    e < following < lanes[layout.TAIL, lane] and runs[layout.TRAJ, lane, following & mask] == traj
                )  # 4
                first = runs[layout.END, lane, (following - 1) & mask] + 1
                assert (
                    runs[layout.POS, lane, following & mask] - pos
                    == runs[layout.END, lane, following & mask] - first + 1
                )
            else:
                assert trajs[layout.LAST, traj] == e
            if where >= 0:
                slots.append(where)
            assert where != layout.LINKED or following >= 0
            if ring.exact and end == cursor - 1:
                assert where >= 0  # 2
        step = np.arange(base, cursor)
        rows = step % arrays.space.steps * arrays.space.lanes + lane
        flags = (arrays.bits[rows >> 3] >> (rows & 7)) & 1
        assert (flags == np.isin(step, ends)).all()
    assert len(slots) == len(set(slots)) == arrays.slots_in_use and sorted(slots) == arrays.used_slots().tolist()  # 5
    live = [t for t in range(scalars[layout.TRAJ_HIGH]) if trajs[layout.STATE, t] != layout.FREE]
    assert len(live) == scalars[layout.TRAJ_LIVE]
    for traj in live:  # 6
        lane, last = trajs[layout.LANE, traj], trajs[layout.LAST, traj]
        assert lanes[layout.HEAD, lane] <= trajs[layout.FIRST, traj] <= last < lanes[layout.TAIL, lane]
        newest = last == lanes[layout.TAIL, lane] - 1
        state = trajs[layout.STATE, traj]
        assert state != layout.OPEN or newest
        assert state != layout.PARKED or not newest
        if state in (layout.OPEN, layout.PARKED) and scalars[layout.KNOWN]:
            assert runs[layout.WHERE, lane, last & mask] >= 0
        if state == layout.PARKED:
            name = (int(lane), int(trajs[layout.ID, traj]))
            assert name not in parked
            parked.add(name)
            assert traj in arrays.hashed
    assert len(parked) == scalars[layout.HASHED] == (arrays.hashed >= 0).sum()
    if not ring.exact and scalars[layout.KNOWN]:  # in `full` only open trajectories wait for their successor
        open_ones = [t for t in live if trajs[layout.STATE, t] in (layout.OPEN, layout.PARKED)]
        assert len(slots) == len(open_ones)


# ---- streams of steps ------------------------------------------------------------------------------------------
class Streams:
    """Envs that play on, each a stream of (obs, next, id, done), with everything that goes wrong on the way.

    Parameters
    ----------
    values : str
        "letters": four values, so that strangers coincide; "floats" with NaN and both zeros; "bytes".
    """

    def __init__(self, rng, envs, *, values="letters", end=0.15, ids="unique"):
        self.rng, self.envs, self.values, self.end, self.ids = rng, envs, values, end, ids
        self.next_id = 0
        self.state = [None] * envs
        for env in range(envs):
            self._reset(env)

    def _reset(self, env):
        if self.ids == "unique":
            traj_id, self.next_id = self.next_id, self.next_id + 1
        elif self.ids == "reused":
            traj_id = int(self.rng.integers(3))
        else:  # one for each env, for ever
            traj_id = env
        self.state[env] = [self._draw(), traj_id]

    def _draw(self):
        if self.values == "letters":
            return (float(self.rng.integers(2)), int(self.rng.integers(2)))
        if self.values == "bytes":
            return (float(self.rng.integers(3)), int(self.rng.integers(256)))
        special = [0.0, -0.0, float("nan"), 1.0, float(self.rng.random())]
        return (special[self.rng.integers(5)], int(self.rng.integers(3)))

    def play(self, env, steps):
        """`steps` rows (obs, next, id, done) of one env."""
        out = []
        for _ in range(steps):
            obs, traj_id = self.state[env]
            following, done = self._draw(), bool(self.rng.random() < self.end)
            out.append((obs, following, traj_id, done))
            self.state[env][0] = following
            if done:
                self._reset(env)
        return out


def batch_of(lanes, shape, *, next_obs=True, ids=True, rows=False, extra_dims=False):
    """A TensorDict `shape` of rows given lane after lane, and the lists that `Model.write` takes."""
    flat = [row for lane in lanes for row in lane]
    count = len(flat)

    def columns(at):
        first = torch.tensor([row[at][0] for row in flat], dtype=torch.float32).reshape(count, 1).repeat(1, 2)
        second = torch.tensor([row[at][1] for row in flat], dtype=torch.uint8).reshape(count, 1, 1).repeat(1, 2, 3)
        return first.reshape(*shape, 2), second.reshape(*shape, 2, 3)

    obs, following = columns(0), columns(1)
    td = TensorDict({}, batch_size=shape)
    td["observation"], td["camera", "pixels"] = obs
    td["stamp"] = torch.arange(count).reshape(shape)
    td["next", "done"] = torch.tensor([row[3] for row in flat]).reshape(*shape, 1)
    td["next", "reward"] = torch.arange(float(count)).reshape(*shape, 1)
    if ids:
        td["collector", "traj_ids"] = torch.tensor([row[2] for row in flat]).reshape(shape)
    if next_obs:
        if rows:
            now, after = keyed(obs, count), keyed(following, count)
            ends = [i for i in range(count) if i + 1 == count or now[i + 1] != after[i]]
            following = tuple(lazy(o, f, ends) for o, f in zip(obs, following, strict=True))
        td["next", "observation"], td["next", "camera", "pixels"] = following
    lists = (keyed(obs, count), keyed(following, count), [row[2] for row in flat], [row[3] for row in flat])
    return td, lists


def lazy(obs, following, ends):
    """`following` as Rows over `obs`; the rows at `ends` are extra."""
    lead = obs.ndim - (1 if obs.dtype is torch.float32 else 2)
    return Rows.from_ends(obs, torch.tensor(ends, dtype=torch.int32), following.flatten(0, lead - 1)[ends])


def keyed(columns, count):
    """One tuple of bytes a row."""
    plain = [c.full() if isinstance(c, Rows) else c for c in columns]
    columns = [bits(c.reshape(count, -1)) for c in plain]
    widths = [len(column) // count if count else 0 for column in columns]
    return [tuple(c[i * w : i * w + w] for c, w in zip(columns, widths, strict=True)) for i in range(count)]


def bits(tensor):
    return tensor.contiguous().numpy().tobytes()


def next_bits(ring, rows):
    """What a ring reads as next observations, one tuple of bytes a row."""
    td = ring.read(rows, [("next", "observation"), ("next", "camera", "pixels")])
    return keyed((td["next", "observation"], td["next", "camera", "pixels"]), len(rows))
