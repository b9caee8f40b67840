"""Random histories of buffers, each beside a plain model: a list of rows per lane, cut to what a ring holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from episodes import episodes
from tensordict import TensorDict

from rlcli.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rlcli.data.next_obs import build_exact
from rlcli.errors import ArgumentError

LEN = 3
SAMPLERS = {
    "random": lambda size: RandomSampler(seed=0),
    "without": lambda size: SamplerWithoutReplacement(seed=0),
    "slices": lambda size: SliceSampler(slice_len=LEN, seed=0),
    "short slices": lambda size: SliceSampler(slice_len=LEN, strict_length=False, span=True, seed=0),
    "slices without": lambda size: SliceSamplerWithoutReplacement(slice_len=LEN, seed=0),
    "priorities": lambda size: PrioritizedSampler(size, 0.7, 0.5, seed=0),
    "slice priorities": lambda size: PrioritizedSliceSampler(size, 0.7, 0.5, slice_len=LEN, seed=0),
}


class World:
    """Lanes of endless episodes; an observation says (lane, step of the lane), a reward the place in its episode."""

    def __init__(self, rng, lanes, ids, exact):
        self.rng, self.lanes, self.ids, self.exact = rng, lanes, ids, exact
        self.time = np.zeros(lanes, int)
        self.place = np.zeros(lanes, int)
        self.number = np.arange(lanes)
        self.next_number = lanes

    def batch(self, steps):
        """``[lanes, steps]``."""
        rows = [[self._step(lane) for _ in range(steps)] for lane in range(self.lanes)]
        size = [self.lanes, steps]

        def column(name, *shape, dtype=torch.float32):
            return torch.tensor([[row[name] for row in lane] for lane in rows], dtype=dtype).reshape(*size, *shape)

        td = TensorDict({"observation": column("obs", 2)}, size)
        if self.ids:
            td["collector", "traj_ids"] = column("id", dtype=torch.int64)
        done = column("done", 1, dtype=torch.bool)
        reward, following = column("place", 1), column("next", 2)
        td["next"] = TensorDict({"reward": reward, "done": done, "terminated": done, "truncated": done & False}, size)
        td["next", "observation"] = self._rows(td["observation"], following) if self.exact else following
        return td

    def _step(self, lane):
        done = bool(self.rng.random() < 0.15)
        row = {
            "obs": (lane, self.time[lane]),
            "id": self.number[lane],
            "place": self.place[lane],
            "done": done,
            "next": (lane, self.time[lane] + 0.5 if done else self.time[lane] + 1),
        }
        self.time[lane] += 1
        self.place[lane] += 1
        if done:
            self.place[lane], self.number[lane] = 0, self.next_number
            self.next_number += 1
        return row

    @staticmethod
    def _rows(obs, following):
        """Next observations as a collector in `exact` gives them."""
        lanes, steps = obs.shape[:2]
        cells = [(t, lane) for t in range(steps - 1) for lane in range(lanes)]
        places = [(t, lane) for t, lane in cells if not torch.equal(following[lane, t], obs[lane, t + 1])]
        last = {"observation": np.stack([following[lane, t].numpy() for t, lane in places])} if places else {}
        after = {"observation": following[:, -1].numpy()}
        return build_exact({"observation": obs}, after, places, last, batched=True)["observation"]


class Model:
    """What a buffer should hold: rows as lists of numbers, by row number."""

    def __init__(self, size, lanes, flat):
        self.size, self.lanes, self.flat = size, 1 if flat else lanes, flat
        self.steps = size // self.lanes
        self.cursor, self.rows = 0, {}

    def write(self, batch):
        parts = [batch.reshape(-1)] if self.flat else batch.unbind(0)
        listed = [described(part) for part in parts]
        for t in range(len(listed[0])):
            for lane in range(self.lanes):
                self.rows[(self.cursor + t) % self.steps * self.lanes + lane] = listed[lane][t]
        self.cursor += len(listed[0])


def described(rows):
    """Rows as plain numbers, without what a sampler adds."""
    after = rows["next", "observation"]
    columns = [rows["observation"], after.full() if hasattr(after, "full") else after, rows["next", "reward"]]
    columns.append(rows["next", "terminated"].float())
    return [tuple(row) for row in torch.cat(columns, -1).tolist()]


def check(sample, model, kind):
    assert [model.rows[int(row)] for row in sample["index"]] == described(sample)
    if "slices" not in kind and "slice " not in kind:
        return
    starts = sample["is_init"].squeeze(1).nonzero().squeeze(1).tolist()
    for start, stop in zip(starts, [*starts[1:], len(sample)], strict=True):
        part = sample[start:stop]
        assert stop - start == LEN or kind == "short slices"
        assert torch.equal(part["next", "observation"][:-1], part["observation"][1:])  # of one lane, in order, no end
        assert (part["next", "reward"].diff(dim=0) == 1).all()
        assert part["next", "done"].squeeze(1).tolist() == [False] * (stop - start - 1) + [True]
        assert bool(part["next", "truncated"][-1]) != bool(part["next", "terminated"][-1])


def history(kind, seed, writes, storage=LazyTensorStorage):
    rng = np.random.default_rng(seed)
    lanes, flat = int(rng.integers(1, 4)), bool(rng.integers(2))
    world = World(rng, lanes, bool(rng.integers(2)), bool(rng.integers(2)))
    size = int(rng.integers(2 * LEN, 40)) * lanes

    def made():
        return TensorDictReplayBuffer(
            storage=storage(size, ndim=1 if flat else 2), sampler=SAMPLERS[kind](size), batch_size=4 * LEN
        )

    rb, model, drawn = made(), Model(size, lanes, flat), 0
    for _ in range(writes):
        batch = world.batch(int(rng.integers(1, size // lanes + 1)))
        act = rng.random()
        if act < 0.05:
            rb.empty()
            model.cursor, model.rows = 0, {}
        elif act < 0.15:
            state, rb = rb.state_dict(), made()
            rb.load_state_dict(state)
        if act < 0.3:
            for step in batch.unbind(1):
                rb.add(step)
                model.write(step.unsqueeze(-1))
        else:
            rb.extend(batch)
            model.write(batch)
        assert len(rb) == len(model.rows)
        for _ in range(3):
            try:
                sample = rb.sample()
            except ArgumentError as error:
                assert "trajector" in str(error)
                continue
            check(sample, model, kind)
            drawn += 1
            rb.update_priority(sample["index"], torch.from_numpy(rng.random(len(sample))))
        rows = rb[:] if flat else rb[:].transpose(0, 1).reshape(-1)  # [envs, steps]
        assert described(rows) == [model.rows[row] for row in sorted(model.rows)]
    return drawn


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.every(2)
def test_samples_of_random_histories_hold_what_was_written(kind):
    assert sum(history(kind, seed, 12) for seed in range(7)) > 100


def test_samples_of_random_histories_on_a_disk_hold_what_was_written():
    assert sum(history("slices", seed, 8, LazyMemmapStorage) for seed in range(5)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samples_of_many_random_histories_hold_what_was_written(kind):
    assert sum(history(kind, seed, 40) for seed in range(1000, 1100)) > 5_000


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_ring_cursor_after_reload(storage, tmp_path):
    """Upstream's dump forgets where the ring was written last: after a reload, slices go over the border."""

    def made():
        return TensorDictReplayBuffer(storage=storage(50), sampler=SliceSampler(slice_len=5, seed=0), batch_size=500)

    rb, other = made(), made()
    rb.extend(episodes([40], ids=False))
    rb.extend(episodes([27], ids=False, first=1))  # rows 0..16 are episode 1, 17..39 episode 0
    rb.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(10):
        for part in other.sample().split(5):
            assert (part["observation"][:, 0] == part["observation"][0, 0]).all()
            assert (part["observation"][:, 1].diff() == 1).all()


def test_slice_weighting():
    """Upstream draws trajectories alike: one that holds 91 % of the rows got 9 % of the samples."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1100), sampler=SliceSampler(slice_len=5, seed=0), batch_size=5000
    )
    rb.extend(episodes([1000, *[10] * 10]))
    share = (rb.sample()["observation"][:, 0] == 0).float().mean()
    assert abs(share - 1000 / 1100) < 0.05


def test_prioritized_sampler_after_a_torch_upgrade():
    """It needs no extension compiled against one version of torch."""
    from rlcli.kernels.sum_tree import cpu

    sums, offsets = np.array([1.0, 3, 0, 0, 0, 0, 0, 0]), np.array([0, 8])
    plain = cpu.draw.py_func  # the loop itself, which runs without any compiler
    assert plain(sums, offsets, np.array([0.0, 0.24, 0.26, 0.99])).tolist() == [0, 0, 1, 1]
