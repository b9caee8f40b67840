"""One-hot rows and frame stacks lie in a segment in few bytes, and are read as they were written, bit for bit."""

import numpy as np
import pytest
import torch
from face import Field

from rlcli.collectors import Collector
from rlcli.data import open_buffer
from rlcli.data.collected import SegmentWriter, open_segments, verify_segments
from rlcli.data.collected.batches import batch_of, folded
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.transforms import FrameStack
from rlcli.typed import Misfit

gym = pytest.importorskip("gymnasium")


class Shows(gym.Env):
    """Shows what its space samples; episodes of so many steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space, length=9):
        self.observation_space, self.length = space, length

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, False, self.t == self.length, {}


def choices(envs):
    return SerialEnv(envs, lambda: GymEnv(Shows(gym.spaces.Discrete(300))))


def stacks(envs):
    one = SerialEnv(envs, lambda: GymEnv(Shows(gym.spaces.Box(0, 255, (12, 12), np.uint8), 30)))
    return TransformedEnv(one, FrameStack(4, 2))


def written(env, folder, next_obs, steps=64, batches=3, **about):
    collector = Collector(env, None, frames_per_batch=steps * env.batch_size.numel(), seed=3, next_obs=next_obs)
    kept = [collector.rollout() for _ in range(batches)]
    with SegmentWriter(folder, {"next_obs": next_obs, **about}) as writer:
        for batch in kept:
            writer.append(batch)
    return kept, writer.nbytes


@pytest.mark.parametrize("next_obs", ["exact", "full"])
@pytest.mark.parametrize(("make", "raw"), [(choices, 2400), (stacks, 576)])
@pytest.mark.parametrize("envs", [1, 3])
def test_segments_and_buffers_give_back_what_was_collected(make, raw, envs, next_obs, tmp_path):
    kept, nbytes = written(make(envs), tmp_path, next_obs)
    frames = sum(batch.numel() for batch in kept)
    assert nbytes < raw * frames * (0.6 if next_obs == "exact" else 1.0) and verify_segments(tmp_path) == []
    for got, want in zip(open_segments(tmp_path), kept, strict=True):
        assert (got == want).all() and str(got) == str(want)
    buffer, whole = open_buffer(tmp_path), torch.cat([batch.to_tensordict() for batch in kept], -1)
    assert len(buffer) == frames
    rows = buffer[:]
    for key in ("observation", ("next", "observation"), ("next", "truncated"), "action"):
        assert torch.equal(rows[key].reshape(whole[key].shape), whole[key]) or torch.equal(
            rows[key].reshape(whole[key].transpose(0, 1).shape), whole[key].transpose(0, 1)
        )


@pytest.mark.parametrize("kind", ["stacks", "images"])
def test_a_compressed_folder_gives_back_what_was_collected(kind, tmp_path):
    pytest.importorskip("lz4")
    image = gym.spaces.Box(0, 3, (3, 12, 12), np.uint8)
    env = stacks(2) if kind == "stacks" else SerialEnv(2, lambda: GymEnv(Shows(image)))
    (tmp_path / "raw").mkdir()
    raw = written(env, tmp_path / "raw", "exact")[1]
    kept, nbytes = written(env, tmp_path / "lz4", "exact", compressed=True)
    segments = open_segments(tmp_path / "lz4")
    assert nbytes < raw if kind == "images" else nbytes < 1.01 * raw  # what is drawn at random has no shorter form
    for i, want in enumerate(kept):
        assert (segments.read(i) == want).all() and segments.holds(i, want)
    rows = open_buffer(tmp_path / "lz4")[:]["observation"]
    whole = torch.cat([batch["observation"] for batch in kept], 1)
    assert torch.equal(rows, whole) and verify_segments(tmp_path / "lz4") == []


def test_what_is_neither_stays_as_it_is():
    board, ids = torch.randint(0, 9, (4, 32, 20)), torch.eye(16, dtype=torch.int64)
    assert [*folded("x", board, torch.Size([4, 32]))] == ["x"]
    assert [*folded("x", ids, torch.Size([16, 16]))] == ["x"]
    assert [*folded("x", torch.randint(0, 255, (4, 32, 4, 8, 8), dtype=torch.uint8), torch.Size([4, 32]))] == ["x"]


@pytest.mark.parametrize("broken", ["@where/x", "@older/x", "@frame/x", "index", "order", "twice", "two folds", "few"])
def test_what_does_not_go_together_is_refused(broken):
    layout = {"x": Field((4, 8, 8), torch.uint8), "y": Field((20,), torch.int64)}
    frames = torch.randint(0, 255, (40, 8, 8), dtype=torch.uint8).unfold(0, 4, 1).permute(0, 3, 1, 2)
    ones, batch = torch.eye(20).long().repeat(2, 1)[:37], torch.Size([37])
    found = folded("x", frames, batch) | folded("y", ones, batch)
    record = {"batch_size": [37], "names": [None], "frames": 37}
    assert torch.equal(batch_of(dict(found), record, layout)["x"], frames)
    if broken == "index":
        found["@hot/y"] = found["@hot/y"] + 20
    elif broken == "order":
        found["@where/x"] = found["@where/x"] + 1
    elif broken == "twice":
        found["x"] = frames
    elif broken == "two folds":
        found["@hot/@frame/x"] = found.pop("@frame/x")
    elif broken == "few":
        found["@hot/@few/y"] = found.pop("@hot/y")
    else:
        del found[broken]
    with pytest.raises(Misfit):
        batch_of(found, record, layout)
