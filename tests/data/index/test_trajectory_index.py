"""The index against a scan in plain Python, over random writes, wraps, reloads and clears."""

import itertools

import numpy as np
import pytest
from face import Ring
from ring_model import Model, Streams, batch_of, check, compare, next_bits

from rlcli.data.index import RandomStream
from rlcli.data.storages import LazyTensorStorage

KINDS = ("exact", "full", "compact")


def a_batch(rng, streams, lanes, kind, ids, longest):
    """A random batch, perhaps mangled, and what the model is to write."""
    steps = int(rng.integers(1, longest + 1)) if rng.random() < 0.7 else 1
    if lanes > 1:
        played = [streams.play(env, steps) for env in range(lanes)]
    else:
        envs = rng.permutation(streams.envs)[: rng.integers(1, streams.envs + 1)]
        played = [streams.play(int(env), steps) for env in envs]
    mangle = rng.random()
    if mangle < 0.1:  # steps out of order
        played = [[lane[i] for i in rng.permutation(steps)] for lane in played]
    elif mangle < 0.2:  # something is lost
        for env in range(streams.envs):
            streams.play(env, 1)
    flat = lanes == 1 and (len(played) == 1 or rng.random() < 0.3)
    shape = [len(played) * steps] if flat else [len(played), steps]
    td, lists = batch_of(
        played, shape, next_obs=kind != "compact", ids=ids, rows=kind == "exact" and rng.random() < 0.5
    )
    count = len(played) * steps
    length = steps if lanes > 1 else count
    per_env = count if flat else steps
    return td, (*lists, length, per_env if lanes == 1 else length)


def reloaded(ring, rows):
    """Another ring with the same contents, as a dump would bring it back."""
    other = Ring(LazyTensorStorage(ring.storage.max_size, ndim=ring.storage.ndim))
    other.take_over(other.read_state(ring.state_dict()), cut=True)
    other.storage.scatter(rows, ring.storage.gather(rows))
    return other


def overwritten(rng, ring, model, kind, ids):
    """Some rows get other contents, some are written over with their own."""
    live = model.live()
    chosen = rng.choice(sorted(live), int(rng.integers(1, 4)))
    if rng.random() < 0.3:
        ring.overwrite(chosen, ring.read(chosen))
    else:
        strangers = Streams(rng, 1, values="letters", end=0.3, ids="reused").play(0, len(chosen))
        td, (obs, following, traj_ids, done) = batch_of([strangers], [len(chosen)], next_obs=kind != "compact", ids=ids)
        ring.overwrite(chosen, td)
        last = {n: i for i, n in enumerate(chosen.tolist())}
        for n in sorted(last, key=lambda n: live[n].step):
            model.overwrite(n, obs[last[n]], following[last[n]], traj_ids[last[n]], done[last[n]])
    check(ring)
    rows, live = compare(ring, model)
    if kind != "compact":
        assert next_bits(ring, rows) == [live[n].next for n in rows.tolist()]


def drawn(rng, ring, model, stream):
    """Slices are rows that follow each other in the model, whole where they must be."""
    live = model.live()
    longest = int(ring.index.trajectories()["length"].max())
    slice_len, strict = int(rng.integers(1, longest + 1)), bool(rng.random() < 0.5)
    drawn, lengths = ring.index.draw(
        stream, 3, slice_len, strict, rng.random() < 0.3, rng.choice(["transition", "trajectory"])
    )
    for rows in np.split(drawn, np.cumsum(lengths)[:-1]):
        assert 1 <= len(rows) <= slice_len
        for row, following in itertools.pairwise(rows.tolist()):
            assert live[row].succ is live[following]


def go(seed, writes=40):
    rng = np.random.default_rng(seed)
    kind, ids = KINDS[rng.integers(3)], bool(rng.random() < 0.7)
    lanes, steps = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 7, 8, 20, 61]))
    if rng.random() < 0.4:
        lanes = 1
    envs = lanes if lanes > 1 else int(rng.integers(1, 4))
    streams = Streams(
        rng, envs, values=rng.choice(["letters", "floats", "bytes"]), end=rng.choice([0.02, 0.15, 0.5]),
        ids=rng.choice(["unique", "reused", "env"]),
    )  # fmt: skip
    ndim = 1 if lanes == 1 else 2
    ring = Ring(
        LazyTensorStorage(steps * lanes + int(rng.integers(lanes)), ndim=ndim),
        next_obs="exact" if kind == "exact" else "full",
    )
    model = Model(steps, lanes, has_ids=ids, known=kind != "compact")
    longest, stream = int(rng.choice([3, 10, 30])), RandomStream(seed)
    for _ in range(writes):
        td, given = a_batch(rng, streams, lanes, kind, ids, longest)
        rows = ring.extend(td)
        model.write(*given)
        check(ring)
        live_rows, live = compare(ring, model)
        assert ring.exact == (kind == "exact")
        newest = [r for r in rows.tolist()[-1:] if r in live]
        assert newest and [live[newest[0]].obs] == [given[0][-1]]
        if kind != "compact":
            assert next_bits(ring, live_rows) == [live[n].next for n in live_rows.tolist()]
        drawn(rng, ring, model, stream)
        if rng.random() < 0.25:
            overwritten(rng, ring, model, kind, ids)
        dice = rng.random()
        if dice < 0.1:
            ring = reloaded(ring, live_rows)
            model.cut()
            check(ring)
            compare(ring, model)
        elif dice < 0.12:
            ring.clear()
            model = Model(steps, lanes, has_ids=ids, known=kind != "compact")


@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("block", range(5))
def test_every_answer_is_that_of_a_scan(block):
    for seed in range(block * 12, block * 12 + 12):
        go(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not followed by their own")
def test_a_million_steps_of_writing_wrapping_reloading_and_sampling():
    for seed in range(1000, 4000):
        go(seed)
