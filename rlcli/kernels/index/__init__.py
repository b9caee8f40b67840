"""The trajectory index of a ring as compiled passes over plain arrays: which number stands where in them.

`write` follows new rows, `read` looks rows up, `draw` draws slices. This file loads no compiler.

```
lane 0   a0 a1 a2|b0 b1|a3 a4 a5 c0|     runs: maximal stretches of rows that go on, each known by its last step
run      0         1     2        3      (END, POS, TRAJ, NXT, WHERE), a ring of runs per lane, numbered from 0 on
```
`scalars` [..]      one number each, below
`runs`    [5, P, C] run number e of lane p lies at `[:, p, e & (C - 1)]`; ascending by END, every live row in one
`lanes`   [2, P]    the numbers of the oldest run, and of the one after the newest
`trajs`   [5, K]    trajectories; freed ones are chained through FIRST
`hashed`  [M]       numbers of the open trajectories whose last row is not the newest of its lane, by (lane, id)
`slots`   [F]       a stack of free slots of the side pool
`bits`    [R / 8]   one bit a row: it is the last of its run
"""

from rlcli.exports import lazily

__getattr__ = lazily(__name__)[0]  # names of files

# scalars
CURSOR, STEPS, LANES, KNOWN, EXACT, HAS_IDS, MANY = range(7)
TRAJ_HIGH, TRAJ_FREE, TRAJ_LIVE, HASHED, SLOT_HIGH, SLOT_FREE, POOL, SLOT_WIDTH = range(7, 15)
NEED_RUNS, PAIRED, UNFOLLOWED = range(15, 18)
SCALARS = 18
# runs: last step; its position in the trajectory; trajectory; the run it goes on in; where its next observation is
END, POS, TRAJ, NXT, WHERE = range(5)
# where: a slot from 0 on, or
BELOW, LINKED = -1, -2
# lanes
HEAD, TAIL = range(2)
# trajectories
ID, LANE, FIRST, LAST, STATE = range(5)
FREE, CLOSED, OPEN, PARKED = range(4)  # OPEN: its last row is its lane's newest; PARKED: other rows came after it
# of a row and the one above it: the trajectory goes on, the bytes follow, nothing is to be noted
GOES, SAME, PLAIN_ROW = 1, 2, 4
