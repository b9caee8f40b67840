"""The arithmetic of a ring, against a list of (step, lane) that is written row by row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcli.data.ring.space import RingSpace

SPACES = st.builds(RingSpace, st.integers(1, 9), st.integers(1, 4))


def written(space, cursor):
    """Row -> (step, lane) after `cursor` steps."""
    every = [(step, lane) for step in range(cursor) for lane in range(space.lanes)]
    return {step % space.steps * space.lanes + lane: (step, lane) for step, lane in every}


@given(SPACES, st.integers(0, 40))
def test_live_rows_are_those_of_the_last_steps_oldest_first(space, cursor):
    held = written(space, cursor)
    live = space.live_rows(cursor).tolist()
    assert sorted(live) == sorted(held) and len(live) == space.count(cursor)
    assert [held[row] for row in live] == sorted(held.values())
    assert space.base(cursor) == min((step for step, _ in held.values()), default=0)
    asked = np.arange(-3, space.size + 3)
    assert space.are_live(asked, cursor).tolist() == [row in held for row in asked.tolist()]


@given(SPACES, st.integers(0, 40), st.integers(0, 9))
def test_rows_and_numbers_of_steps_are_those_of_a_batch_lane_after_lane(space, step, length):
    order = [(t, lane) for lane in range(space.lanes) for t in range(step, step + length)]
    assert space.rows(step, length).tolist() == [space.row(t, lane) for t, lane in order]
    assert space.numbers(step, length).tolist() == [t * space.lanes + lane for t, lane in order]
    assert (space.numbers(step, length) % space.size).tolist() == space.rows(step, length).tolist()


@given(SPACES, st.integers(1, 40))
def test_a_live_row_tells_its_step_and_its_number(space, cursor):
    rows = np.array(sorted(written(space, cursor)), np.int64)
    steps, lanes = zip(*(written(space, cursor)[row] for row in rows.tolist()), strict=True)
    assert space.steps_of(rows, cursor).tolist() == list(steps)
    assert space.numbers_of(rows, cursor).tolist() == [s * space.lanes + n for s, n in zip(steps, lanes, strict=True)]
