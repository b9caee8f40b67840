"""Stacks stored as single frames, against the stacks that were given: bit for bit, after every write."""

import numpy as np
import pytest
import torch
from batches import same
from face import Ring, refused
from ring_model import check
from tensordict import TensorDict

from rlcli.data.files import dumps
from rlcli.data.next_obs import Rows
from rlcli.data.ring.stacks import FrameStacks, Promoted
from rlcli.data.storages import CompressedStorage, LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import ArgumentError

FRAMES = 3


class Players:
    """Envs that show stacks of frames; episodes begin with their first frame repeated, or with others."""

    def __init__(self, rng, envs, letters):
        self.rng, self.letters, self.next_id = rng, letters, 0
        self.stacks, self.ids = [None] * envs, [0] * envs
        for env in range(envs):
            self.reset(env)

    def frame(self):
        return self.rng.integers(0, self.letters, (2, 2)).astype(np.uint8)

    def reset(self, env):
        one = self.frame()
        alike = self.rng.random() < 0.7
        self.stacks[env] = np.stack([one if alike else self.frame() for _ in range(FRAMES - 1)] + [one])
        self.ids[env], self.next_id = self.next_id, self.next_id + 1

    def play(self, env, steps):
        out = []
        for _ in range(steps):
            now = self.stacks[env]
            following = np.concatenate([now[1:], self.frame()[None]])
            if self.rng.random() < 0.05:  # an env that does not only shift
                following = np.stack([self.frame() for _ in range(FRAMES)])
            done = bool(self.rng.random() < 0.1)
            out.append((now, following, self.ids[env], done))
            self.stacks[env] = following
            if done:
                self.reset(env)
        return out


def batch_of(played, shape, rng, next_obs):
    rows = [row for lane in played for row in lane]
    pixels = torch.from_numpy(np.stack([row[0] for row in rows])).reshape(*shape, FRAMES, 2, 2)
    td = TensorDict({"pixels": pixels, "action": torch.arange(len(rows)).reshape(shape)}, batch_size=shape)
    td["collector", "traj_ids"] = torch.tensor([row[2] for row in rows]).reshape(shape)
    td["next", "done"] = torch.tensor([row[3] for row in rows]).reshape(*shape, 1)
    if next_obs:
        td["next", "pixels"] = torch.from_numpy(np.stack([row[1] for row in rows])).reshape(pixels.shape)
    return td, rows


def go(seed, writes=30):
    rng = np.random.default_rng(seed)
    lanes, steps = int(rng.integers(1, 4)), int(rng.choice([1, 2, 5, 9, 30]))
    envs = lanes if lanes > 1 else int(rng.integers(1, 4))
    next_obs = bool(rng.random() < 0.7)
    players = Players(rng, envs, int(rng.choice([2, 200])))
    make = lambda: Ring(LazyTensorStorage(steps * lanes, ndim=1 if lanes == 1 else 2), frame_stack=FRAMES)  # noqa: E731
    ring, true = make(), {}
    for _ in range(writes):
        count = int(rng.integers(1, 13)) if rng.random() < 0.7 else 1
        order = range(lanes) if lanes > 1 else rng.permutation(envs)[: rng.integers(1, envs + 1)]
        played = [players.play(int(env), count) for env in order]
        if rng.random() < 0.1:
            played = [[lane[i] for i in rng.permutation(count)] for lane in played]
        td, rows = batch_of(played, [len(played), count], rng, next_obs)
        for row, given in zip(ring.extend(td).tolist(), rows, strict=True):
            true[row] = given  # of a batch longer than the ring the later rows come later in each lane
        verify(ring, true, next_obs)
        if rng.random() < 0.2:
            chosen = rng.choice(len(ring), min(len(ring), 3), replace=False)
            strangers = Players(rng, 1, 3).play(0, len(chosen))
            ring.overwrite(chosen, batch_of([strangers], [len(chosen)], rng, next_obs)[0])
            true |= dict(zip(chosen.tolist(), strangers, strict=True))
            verify(ring, true, next_obs)
        if rng.random() < 0.1:
            other, live = make(), np.arange(len(ring))
            other.take_over(other.read_state(ring.state_dict()))
            other.storage.scatter(live, ring.storage.gather(live))
            ring = other
            verify(ring, true, next_obs)


def verify(ring, true, next_obs):
    check(ring)
    live = np.arange(len(ring))
    assert ring.storage.fields["pixels"].shape == (2, 2) and ring.exact == next_obs
    td = ring.read(live)
    assert td["pixels"].numpy().tobytes() == b"".join(true[row][0].tobytes() for row in live.tolist())
    if next_obs:
        assert td["next", "pixels"].numpy().tobytes() == b"".join(true[row][1].tobytes() for row in live.tolist())
    for stacks in ring.stacks.values():  # a slot is in use or free, never both or neither
        used = [int(b) for lane in range(ring.lanes) for b in stacks.heads.of(lane)[2] if b >= 0]
        assert sorted(used + stacks.heads._free) == list(range(len(stacks.heads.memory)))


@pytest.mark.filterwarnings("ignore:.*shifted by one")
@pytest.mark.filterwarnings("ignore:.*not followed by their own")
@pytest.mark.parametrize("block", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 12))])
def test_every_stack_is_the_one_that_was_given(block):
    for seed in range(block * 10, block * 10 + 10):
        go(seed)


def test_a_stack_costs_one_frame_a_row():
    ring = Ring(LazyTensorStorage(64), frame_stack={"pixels": FRAMES})
    stack = np.zeros((FRAMES, 2, 2), np.uint8)
    rows = []
    for t in range(40):
        after = np.concatenate([stack[1:], np.full((1, 2, 2), t + 1, np.uint8)])
        rows.append((stack, after, 0, False))
        stack = after
    for first in range(0, 40, 8):
        ring.extend(batch_of([rows[first : first + 8]], [8], None, True)[0])
    stacks = ring.stacks["pixels"]
    assert len(stacks.heads.of(0)[0]) == 1 and not len(stacks.heads.memory)
    assert ring.storage.fields["pixels"].width == 4 and ring.index.slots_in_use == 1


def test_interleaved_single_steps_are_linked_and_not_copied():
    rng = np.random.default_rng(0)
    ring = Ring(LazyTensorStorage(400), frame_stack=FRAMES)
    stacks = [np.full((FRAMES, 2, 2), env, np.uint8) for env in range(4)]
    for _ in range(50):
        rows = []
        for env in range(4):
            after = np.concatenate([stacks[env][1:], rng.integers(0, 255, (1, 2, 2)).astype(np.uint8)])
            rows.append([(stacks[env], after, env, False)])
            stacks[env] = after
        ring.extend(batch_of(rows, [4, 1], None, True)[0])
    held = ring.stacks["pixels"]
    assert len(held.heads._free) == len(held.heads.memory)  # no slot is in use: 200 heads are links


STORAGES = [LazyMemmapStorage, lambda size, ndim: CompressedStorage(size, ndim=ndim, widest=1)]


@pytest.mark.parametrize("make", STORAGES)
def test_float_stacks_are_read_where_only_one_of_row_and_successor_has_frames_apart(make):
    film = torch.arange(40.0).view(10, 4).unfold(0, FRAMES, 1).mT.contiguous()  # the first one's older frames: a slot
    done = torch.zeros(7, 1, dtype=torch.bool)
    td = TensorDict({"pixels": film[:-1], "next": {"pixels": film[1:], "done": done}}, [7])
    ring = Ring(make(60, ndim=1), frame_stack=FRAMES)
    ring.extend(td)
    for rows in ([0], [1], [2], [1, 4], [5, 0]):
        same(ring.read(np.array(rows)), td[rows])


@pytest.mark.filterwarnings("ignore:.*shifted by one")
@pytest.mark.parametrize("make", STORAGES)
@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_that_are_not_in_plain_memory_read_the_same(make, ndim):
    rng = np.random.default_rng(0)
    rings = [Ring(storage(60, ndim=ndim), frame_stack=FRAMES) for storage in (make, LazyTensorStorage)]
    players = Players(rng, 2, 200)
    for _ in range(6):
        td, _ = batch_of([players.play(env, 9) for env in range(2)], [2, 9], rng, True)
        for ring in rings:
            ring.extend(td)
        rows = rng.integers(0, len(rings[0]), 30)
        same(rings[0].read(rows), rings[1].read(rows))


def test_a_dump_brings_stacks_back(tmp_path):
    rng = np.random.default_rng(0)
    ring, other = (Ring(LazyTensorStorage(20), frame_stack=FRAMES) for _ in range(2))
    for _ in range(3):
        ring.extend(batch_of([Players(rng, 1, 200).play(0, 9)], [9], rng, True)[0])
    dumps.dump(ring, tmp_path)
    dumps.load(other, tmp_path)
    same(other.read(np.arange(20)), ring.read(np.arange(20)))


def test_lazy_next_stacks_are_read_as_plain_ones():
    rng = np.random.default_rng(4)
    td, _ = batch_of([Players(rng, 1, 200).play(0, 30)], [30], rng, True)
    plain = td["next", "pixels"]
    rows = Rows(td["pixels"], plain, torch.arange(30, 60))
    ring, other = (Ring(LazyTensorStorage(50), frame_stack=FRAMES) for _ in range(2))
    other.extend(td)
    ring.extend(td.clone(False).set(("next", "pixels"), rows))
    same(ring.read(np.arange(30)), other.read(np.arange(30)))


def test_what_is_no_stack_is_refused():
    td, _ = batch_of([Players(np.random.default_rng(0), 1, 9).play(0, 4)], [4], None, True)
    refused(ArgumentError, "uint8[3", lambda: Ring(LazyTensorStorage(9), frame_stack=4).extend(td))
    refused(ArgumentError, "frame_stack image", lambda: Ring(LazyTensorStorage(9), frame_stack={"image": 3}).extend(td))
    refused(ArgumentError, "pixels", lambda: Ring(LazyTensorStorage(9), frame_stack={"pixels": 2}).extend(td))


def test_stacks_that_do_not_shift_are_told_once():
    rng = np.random.default_rng(0)
    td, _ = batch_of([Players(rng, 1, 200).play(0, 100)], [100], rng, False)
    td["pixels"] = td["pixels"].flip(1)  # newest first
    with pytest.warns(UserWarning, match="93 of 100 rows of pixels are not the stack above them shifted by one"):
        Ring(LazyTensorStorage(200), frame_stack=FRAMES).extend(td)


def forget_fronts(self, storage, base, cursor, new_base):
    return Promoted([], PROMOTE(self, storage, base, cursor, new_base).links)


def forget_links(self, storage, base, cursor, new_base):
    return Promoted(PROMOTE(self, storage, base, cursor, new_base).fronts, [])


def write_over(self, storage, index, rows, stacks):
    """Only the row's own frames are kept, not those that its neighbours read."""
    steps = self.space.steps_of(rows, index.cursor)
    for row, step, stack in zip(rows.tolist(), steps.tolist(), stacks.numpy(), strict=True):
        self.heads.insert(row % self.space.lanes, {step: np.frombuffer(stack[:-1].tobytes(), np.uint8)})


def believe_the_link(self, storage, base, lane, tip, older):
    return -2 - tip if tip is not None else self.heads.slot(older)


PROMOTE = FrameStacks.promote
PLANTED = {
    "promote": [forget_fronts, forget_links],
    "overwrite": [write_over],
    "_found": [believe_the_link],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "mistake"), [(m, wrong) for m, wrongs in PLANTED.items() for wrong in wrongs])
def test_planted_mistakes_are_seen(monkeypatch, method, mistake):
    monkeypatch.setattr(FrameStacks, method, mistake)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for seed in range(40):
            go(seed)
