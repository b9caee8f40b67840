"""What `inspect` says of frames and buffers is what a plain reading of them gives."""

import weakref

import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict

import rlcli
from rlcli.data import SegmentWriter, TensorDictReplayBuffer, open_segments
from rlcli.data.collected import SegmentReader
from rlcli.data.storages import LazyMemmapStorage, LazyTensorStorage
from rlcli.errors import ArgumentError, ConfigError
from rlcli.inspection.found import BINS, Trajectories

QUIET = ["console=off", "logger=none"]


def _plain(folder):
    """id -> its rewards in time, and whether it ended; read by a loop over single rows."""
    seen, ended = {}, {}
    for batch in open_segments(folder):
        for lane in batch:
            for row in lane:
                name = int(row["collector", "traj_ids"])
                seen.setdefault(name, []).append(float(row["next", "reward"]))
                ended[name] = bool(row["next", "done"])
    return seen, ended


@pytest.fixture(scope="module", params=["exact", "full", "compact"])
def frames(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames") / "run"
    run = rlcli.collect(
        ["recipe=collect_random", f"memory={request.param}", "env.num=3", "total_frames=600",
         "collector.frames_per_batch=150", *QUIET, f"run.dir={folder}"]
    )  # fmt: skip
    return request.param, run.path


def test_trajectories_are_counted_as_a_loop_over_rows_counts_them(frames):
    mode, path = frames
    (found,) = rlcli.inspect(path)
    seen, ended = _plain(path / "data")
    t = found.trajectories
    lengths = [len(x) for x in seen.values()]
    assert found.kind == "collected frames" and found.frames == 600
    assert (t.finished, t.open, t.cut) == (sum(ended.values()), len(ended) - sum(ended.values()), 0)
    assert (t.shortest, t.longest, t.frames) == (min(lengths), max(lengths), 600)
    returns = [sum(x) for name, x in seen.items() if ended[name]]
    assert t.mean_return == pytest.approx(np.mean(returns)) and t.return_high == max(returns)
    assert sum(count for _, _, count in t.histogram()) == len(lengths)
    for low, high, count in t.histogram():
        assert count == sum(low <= n <= high for n in lengths)
    assert found.missing == (len(lengths) if mode == "compact" else 0)


def test_bytes_are_those_of_the_tensors_and_savings_those_against_full(frames):
    mode, path = frames
    (found,) = rlcli.inspect(path)
    per_frame = 16 + 8 + 8 + 4 + 3
    assert found.full == 600 * (per_frame + 16)
    ends = found.boundary
    assert (
        found.stored
        == {
            "full": found.full,
            "compact": 600 * per_frame,
            "exact": 600 * per_frame + ends * (16 + 4),
        }[mode]
    )
    values = torch.cat([batch["observation"].reshape(-1, 4) for batch in open_segments(path / "data")])
    facts = {facts.key: facts for facts in found.keys}
    assert (facts["observation"].low, facts["observation"].high) == (float(values.min()), float(values.max()))
    if mode != "compact":  # all of them, and not those alone that are kept apart
        following = torch.cat([b["next", "observation"].reshape(-1, 4) for b in open_segments(path / "data")])
        low, high = facts["next.observation"].low, facts["next.observation"].high
        assert (low, high) == (float(following.min()), float(following.max()))


def test_one_trajectory_is_shown_step_by_step(frames):
    _, path = frames
    seen, ended = _plain(path / "data")
    longest = max(seen, key=lambda name: len(seen[name]))
    (found,) = rlcli.inspect(path, trajectory=longest)
    assert found.detail["length"] == len(seen[longest]) and found.detail["return"] == sum(seen[longest])
    assert (found.detail["end"] != "open") == ended[longest]
    steps = [row["step"] for row in found.rows]
    assert steps[:5] == [0, 1, 2, 3, 4] and steps[-1] == len(seen[longest]) - 1 and len(set(steps)) == len(steps)
    with pytest.raises(ArgumentError, match=f"no trajectory 99999 .* To count them: rlcli inspect {path}"):
        rlcli.inspect(path, trajectory=99999)


def test_segments_are_read_one_at_a_time(frames, monkeypatch):
    _, path = frames
    seen, most = [], []
    read = SegmentReader.read

    def watched(self, i):
        batch = read(self, i)
        seen.append(weakref.ref(batch))
        most.append(sum(ref() is not None for ref in seen))
        return batch

    monkeypatch.setattr(SegmentReader, "read", watched)
    rlcli.inspect(path)
    assert len(most) == 4 and max(most) <= 2


def test_nans_and_infinities_are_counted_and_left_out_of_ranges(tmp_path):
    x = torch.tensor([[1.0, float("nan")], [float("inf"), -3.0], [2.0, float("-inf")]])
    with SegmentWriter(tmp_path / "data") as writer:
        for _ in range(2):
            writer.append(TensorDict({"observation": x[None], ("next", "done"): torch.zeros(1, 3, 1).bool()}, [1, 3]))
    (found,) = rlcli.inspect(tmp_path)
    (facts,) = (facts for facts in found.keys if facts.key == "observation")
    assert (facts.nans, facts.infinities, facts.low, facts.high) == (2, 4, -3.0, 2.0)
    assert found.as_dict()["keys"] and found.trajectories.open == 1 and found.trajectories.frames == 6


def test_a_histogram_has_a_bin_for_every_length():
    t = Trajectories()
    for n in [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 100, 10**6]:
        t.add(n, 0.0, "finished")
    assert sum(t.bins) == 12 and BINS[:6] == [1, 2, 3, 4, 6, 8]
    assert t.histogram()[0] == (1, 1, 1) and t.histogram()[-1][0] <= 10**6 <= t.histogram()[-1][1]
    assert Trajectories().histogram() == []


def test_a_training_run_shows_its_newest_checkpoint(tmp_path):
    run = rlcli.train(
        [
            "total_frames=512",
            "collector.frames_per_batch=256",
            "run.eval_episodes=0",
            *QUIET,
            f"run.dir={tmp_path / 'r'}",
        ]
    )
    (found,) = rlcli.inspect(run.path)
    assert found.kind == "checkpoint" and found.about == {"frames": 512}
    sizes = {facts.key: facts.stored for facts in found.keys}
    assert sizes["policy.actor.module.0.module.0.weight"] == 64 * 4 * 4
    assert rlcli.inspect(run.checkpoints[-1])[0].stored == found.stored


def test_a_folder_of_nothing_is_refused(tmp_path):
    refused(ConfigError, "inspect", lambda: rlcli.inspect(tmp_path))
    refused(ConfigError, "gone", lambda: rlcli.inspect(tmp_path / "gone"))


@pytest.mark.parametrize("next_obs", ["full", "exact"])
def test_a_buffer_is_read_as_it_was_dumped(tmp_path, next_obs):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4, next_obs=next_obs)
    obs = torch.arange(80.0).reshape(80, 1)
    ids = torch.repeat_interleave(torch.arange(8), 10)
    done = torch.zeros(80, 1, dtype=torch.bool)
    done[9::10] = True
    data = TensorDict(
        {
            "observation": obs,
            "next": {"observation": obs + 1, "reward": torch.ones(80, 1), "done": done, "terminated": done},
            "collector": {"traj_ids": ids},
        },
        [80],
    )
    for part in data.split(20):
        buffer.extend(part)
    buffer.dumps(tmp_path / "dump")
    (found,) = rlcli.inspect(tmp_path / "dump", trajectory=4)
    t = found.trajectories
    assert found.kind == "buffer" and found.frames == 50
    assert (t.finished, t.open, t.terminated, t.shortest, t.longest) == (5, 0, 5, 10, 10)
    assert t.mean_return == 10.0 and found.boundary == 5
    facts = {facts.key: facts for facts in found.keys}
    assert (facts["observation"].low, facts["observation"].high, facts["next.observation"].high) == (30.0, 79.0, 80.0)
    assert found.detail["length"] == 10 and found.detail["end"] == "terminated"
    assert [row["observation"] for row in found.rows] == [float(x) for x in range(40, 50)]
    if next_obs == "exact":
        assert facts["next.observation"].stored < facts["next.observation"].full == 200
    refused(ArgumentError, "trajectory", lambda: rlcli.inspect(tmp_path / "dump", trajectory=99))


def test_rows_that_a_storage_kept_are_inspected_where_they_lie(tmp_path):
    with SegmentWriter(tmp_path / "frames") as writer:
        for lengths in ([5, 7, 3], [20]):
            writer.append(_walk(lengths))
    storage = LazyMemmapStorage(100, scratch_dir=tmp_path / "rows")
    with TensorDictReplayBuffer(storage=storage, next_obs="exact") as buffer:
        for lengths in ([5, 7, 3], [20]):
            buffer.extend(_walk(lengths))
    before = {path: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    (found,) = rlcli.inspect(tmp_path / "rows")
    (frames,) = rlcli.inspect(tmp_path / "frames")
    assert found.kind == "buffer" and found.about["from"] == "rows of a storage" and found.frames == 35
    for name in ("finished", "terminated", "shortest", "longest", "return_sum", "bins"):
        assert getattr(found.trajectories, name) == getattr(frames.trajectories, name), name
    assert {f.key: (f.low, f.high, f.full) for f in found.keys} == {f.key: (f.low, f.high, f.full) for f in frames.keys}
    assert {path: path.read_bytes() for path in (tmp_path / "rows").iterdir()} == before


def test_a_run_that_learns_from_a_buffer_shows_its_rows_too(tmp_path):
    run = rlcli.train(
        ["recipe=dqn_cartpole", "total_frames=600", "collector.init_random_frames=300", "run.eval_episodes=0",
         f"run.dir={tmp_path}/run", *QUIET]
    )  # fmt: skip
    found = rlcli.inspect(run.path)
    assert [each.kind for each in found] == ["buffer", "checkpoint"]
    assert found[0].frames == run.summary["frames"] == found[0].trajectories.frames


def _walk(lengths):
    """Episodes of these lengths, one after another."""
    total, ends = sum(lengths), torch.zeros(sum(lengths), 1, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    x = torch.cat([torch.arange(float(n)) for n in lengths])[:, None]
    after = {"observation": x + 1, "reward": torch.ones(total, 1), "done": ends, "terminated": ends}
    return TensorDict({"observation": x, "next": after}, [total])
