"""`on_overflow="keep"`: rows that no difference can hold keep their next observation, bit for bit, wherever they go."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from face import refused
from tensordict import TensorDict
from test_next_observation_delta import Leaping, flags

from rlcli.collectors import Collector
from rlcli.data import LazyMemmapStorage, LazyTensorStorage, Rows, TensorDictReplayBuffer
from rlcli.data.collected import SegmentWriter, open_segments
from rlcli.data.next_obs import concat, move, pack, unpack
from rlcli.data.samplers import SliceSampler
from rlcli.envs import GymEnv, SerialEnv, TransformedEnv
from rlcli.envs.transforms import MultiStepTransform, NextObservationDelta
from rlcli.errors import ArgumentError, MissingKeyError, NumericsError
from rlcli.objectives.value import GAE
from rlcli.transforms.delta_codec import rebuilt

KEPT = ("next", "delta_kept", "observation")
NEXT_OBS = ("next", "observation")
JUMPS = {torch.float16: (0.0, 1e6), torch.bfloat16: (-3e38, 3e38), torch.int8: (-3e38, 3e38)}


def jumping(seed, *shape, often=0.2, code=torch.float16, dtype=torch.float32):
    """A batch whose observations jump in some rows; and which."""
    rng = np.random.default_rng(seed)
    obs = torch.from_numpy(rng.normal(size=(*shape, 3))).to(dtype)
    after = torch.from_numpy(rng.normal(size=(*shape, 3))).to(dtype)
    rows = torch.from_numpy(rng.random(shape) < often)
    low, high = JUMPS[code]
    at = int(rng.integers(3))
    obs[..., at] = torch.where(rows, torch.as_tensor(low, dtype=dtype), obs[..., at])
    after[..., at] = torch.where(rows, torch.as_tensor(high, dtype=dtype), after[..., at])
    ids = torch.zeros(shape, dtype=torch.int64) + torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    td = TensorDict({"observation": obs, "next": {"observation": after, **flags(*shape)}}, batch_size=shape)
    return td.set(("collector", "traj_ids"), ids), rows


def same_next(got, full, rows, bound=0.01):
    """Kept rows bit for bit, the others as a difference gives them."""
    assert torch.equal(got[rows], full[rows])
    assert (got - full)[~rows].abs().max() < bound if (~rows).any() else True


@pytest.mark.parametrize("code", list(JUMPS))
def test_rows_that_overflow_are_kept_and_counted_and_no_others(code):
    full, rows = jumping(0, 4, 25, code=code)
    delta = NextObservationDelta(delta_dtype=code, on_overflow="keep")
    coded = delta.compress(full)
    bound = delta.figures()["observation"]["bound"]
    assert delta.figures()["observation"]["kept"] == int(rows.sum()) > 0 and bound < 0.1
    same_next(delta(coded.clone())["next", "observation"], full[NEXT_OBS], rows, bound)
    refused(NumericsError, "on_overflow=keep", lambda: NextObservationDelta(delta_dtype=code).compress(full))


@pytest.mark.parametrize("change", [40_000, -32_768, -32_769, 2**40])
def test_whole_numbers_are_exact_with_and_without_a_difference(change):
    obs = torch.arange(8).reshape(4, 2) * 3
    after = obs + 1
    after[2, 1] += change - 1
    td = TensorDict({"observation": obs, "next": {"observation": after, **flags(4)}}, batch_size=[4])
    delta = NextObservationDelta(on_overflow="keep")
    coded = delta.compress(td)
    assert coded["next", "delta", "observation"].dtype is torch.int16
    assert torch.equal(delta(coded)[NEXT_OBS], after) and delta.figures()["observation"]["kept"] == 1


def test_a_difference_that_looks_like_the_mark_is_kept_too():
    obs, after = torch.zeros(3, 2), torch.tensor([[1.0, 2.0], [-65504.0, 0.0], [0.0, 65504.0]])
    td = TensorDict({"observation": obs, "next": {"observation": after, **flags(3)}}, batch_size=[3])
    delta = NextObservationDelta(on_overflow="keep")
    assert torch.equal(delta(delta.compress(td))[NEXT_OBS], after) and delta.figures()["observation"]["kept"] == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_all_the_same(value):
    full, _ = jumping(0, 6)
    full[NEXT_OBS][2, 1] = value
    refused(NumericsError, "finite", lambda: NextObservationDelta(on_overflow="keep").compress(full))


def test_another_word_is_refused():
    refused(ArgumentError, "on_overflow clip", lambda: NextObservationDelta(on_overflow="clip"))


def collected(mode, **options):
    env = SerialEnv(3, lambda: GymEnv(Leaping(leap=1e6)))
    collector = Collector(env, frames_per_batch=60, total_frames=180, next_obs=mode, seed=1, **options)
    with collector:
        return collector, [batch.clone(recurse=False) for batch in collector]


def test_a_collection_is_that_of_full_and_its_figures_say_how_many_rows_were_kept():
    _, full = collected("full")
    collector, coded = collected("delta", on_overflow="keep")
    jumps = [(f["next", "place"] - f["place"]).abs().amax(-1) > 65504 for f in full]
    figures = collector.figures()["delta"]
    assert figures["place"]["kept"] == sum(int(rows.sum()) for rows in jumps) > 9 and figures["count"]["kept"] == 0
    for want, got, rows in zip(full, coded, jumps, strict=True):
        kept = got["next", "delta_kept", "place"]
        assert isinstance(kept, Rows) and len(kept.extra) == int(rows.sum())  # no memory for the other rows
        back = NextObservationDelta()(got.copy())
        same_next(back["next", "place"], want["next", "place"], rows, figures["place"]["bound"])
        assert set(back.keys(True, True)) == set(want.keys(True, True))
    with pytest.raises(NumericsError):
        collected("delta")


def test_steps_of_an_env_give_the_same_next_observations():
    def rollout(*transforms):
        env = GymEnv(Leaping(leap=1e6))
        for transform in transforms:
            env = TransformedEnv(env, transform)
        env.set_seed(0)
        torch.manual_seed(0)
        return env.rollout(12, break_when_any_done=False)

    full, coded = rollout(), rollout(NextObservationDelta(on_overflow="keep"))
    assert torch.equal(full["place"], coded["place"])
    rows = (full["next", "place"] - full["place"]).abs().amax(-1) > 65504
    same_next(NextObservationDelta()(coded)["next", "place"], full["next", "place"], rows)


def test_values_of_kept_rows_are_those_of_full():
    full, rows = jumping(3, 3, 20)
    coded = NextObservationDelta(on_overflow="keep").compress(full)
    from rlcli.modules import ValueOperator

    net = ValueOperator(torch.nn.Linear(3, 1))
    want, got = (GAE(gamma=0.9, lmbda=0.0, value_network=net)(td.copy())["advantage"] for td in (full, coded))
    assert rows.any() and torch.allclose(want, got, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("few", [0.0, 0.3])
def test_packing_moving_joining_and_pickling_carry_the_few_rows_alone(few):
    from rlcli.data.next_obs.sparse import sparse_where

    parts = [jumping(seed, 3, 7, often=few)[0] for seed in range(3)]
    coded = [NextObservationDelta(on_overflow="keep").compress(td, sparse_where) for td in parts]
    want = [NextObservationDelta()(td.clone())[NEXT_OBS] for td in coded]
    for td, right in zip(coded, want, strict=True):
        packed = pack(td)
        assert KEPT not in packed.batch.keys(True, True)
        for back in (unpack(packed), unpack(pickle.loads(pickle.dumps(packed))), move(td, "cpu"), td.reshape(-1)):
            assert isinstance(back.get(KEPT), Rows)
            got = NextObservationDelta()(back.copy())[NEXT_OBS]
            assert torch.equal(got.reshape(right.shape), right)
    joined = concat(coded)
    assert isinstance(joined.get(KEPT), Rows) and joined.shape == (3, 21)
    assert torch.equal(NextObservationDelta()(joined)[NEXT_OBS], torch.cat(want, 1))


def test_segments_on_disk_hold_the_few_rows(tmp_path):
    from rlcli.data.next_obs.sparse import sparse_where

    parts = [jumping(seed, 3, 7, often=often)[0] for seed, often in enumerate((0.0, 0.4, 0.0))]
    coded = [NextObservationDelta(on_overflow="keep").compress(td, sparse_where) for td in parts]
    with SegmentWriter(tmp_path / "data", {"next_obs": "delta"}) as writer:
        for td in coded:
            writer.append(td)
    reader = open_segments(tmp_path / "data")
    for i, td in enumerate(coded):
        want = NextObservationDelta()(td.clone())[NEXT_OBS]
        assert torch.equal(reader.read_with_next(i)[NEXT_OBS], want)
    assert reader.verify() == []


# ---- in a buffer ---------------------------------------------------------------------------------------------------
def buffers(tmp_path, ndim, tier):
    def make(name, *transforms):
        folder = {} if tier == "tensor" else {"scratch_dir": tmp_path / name, "commit_seconds": 0.0}
        storage = (LazyTensorStorage if tier == "tensor" else LazyMemmapStorage)(24, ndim=ndim, **folder)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, sampler=SliceSampler(slice_len=2, seed=0))
        for transform in transforms:
            buffer.append_transform(transform)
        return buffer

    return make


@pytest.mark.parametrize("tier", ["tensor", "disk"])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("side", ["env", "buffer"])
@pytest.mark.every(2)
def test_a_ring_of_differences_gives_what_a_full_one_gives_however_it_is_written(tmp_path, ndim, tier, side):
    make, rng = buffers(tmp_path, ndim, tier), np.random.default_rng(ndim)
    delta = NextObservationDelta(on_overflow="keep")
    full, coded = make("full"), make("coded", delta)
    for step in range(25):
        if step % 4 == 3:
            rows = rng.integers(0, len(full), 5)
            td, _ = jumping(step, 5, often=0.5)
            full[rows], coded[rows] = td, td
        td, _ = jumping(step, 2, int(rng.integers(1, 10)), often=float(rng.choice([0, 0.3, 1])))
        full.extend(td)
        coded.extend(NextObservationDelta(on_overflow="keep").compress(td) if side == "env" else td)
        if step % 5 == 4:
            again = make(f"again {step}", NextObservationDelta(on_overflow="keep"))
            if step % 2:
                again.load_state_dict(coded.state_dict())
            else:
                coded.dumps(tmp_path / "dumps")
                again.loads(tmp_path / "dumps")
            coded.close()
            coded = again
        want, got = full[:], coded[:]
        rows = (want[NEXT_OBS] - want["observation"]).abs().amax(-1) > 65504
        same_next(got[NEXT_OBS], want[NEXT_OBS], rows)
        live = {number for _, numbers, _ in coded.ring.contents.sparse.state_dict(0) for number in numbers.tolist()}
        assert {n for n in live if n >= coded.ring.base * coded.ring.lanes} == set(
            coded.ring.space.numbers_of(rows_of(rows.movedim(-1, 0).flatten()), coded.ring.cursor)
        )
        assert set(got.keys(True, True)) == set(want.keys(True, True))
    (column,) = coded.ring.contents.sparse.values()
    assert column.nbytes <= 3 * 24 * (8 + 12)  # what is dead is forgotten
    full.close(), coded.close()


def test_a_row_written_over_without_a_kept_next_observation_has_none(tmp_path):
    coded, kept = buffers(tmp_path, 1, "tensor")("coded"), NextObservationDelta(on_overflow="keep")
    td = kept.compress(jumping(0, 6, often=1.0)[0])
    plain = kept.compress(jumping(1, 6, often=0.0)[0])
    assert KEPT in td.keys(True, True)
    coded.extend(td)
    assert coded[:][KEPT].any()
    coded[[1, 2, 2]] = plain[:3].exclude(KEPT)
    assert coded[:][KEPT].any(-1).tolist() == td[KEPT].any(-1).tolist()[:1] + [False] * 2 + [True] * 3
    coded.extend(plain.exclude(KEPT))
    coded[list(range(12))] = plain[[0] * 12].exclude(KEPT)
    assert not coded[:][KEPT].any() and not any(column.nbytes for column in coded.ring.contents.sparse.values())


def rows_of(mask):
    return np.flatnonzero(mask.numpy())


def test_a_killed_writer_s_ring_on_disk_comes_back_with_the_rows_it_kept(tmp_path):
    def begin(**options):
        storage = LazyMemmapStorage(24, scratch_dir=tmp_path / "rows", commit_seconds=0.0, **options)
        return TensorDictReplayBuffer(storage=storage, batch_size=4, transform=NextObservationDelta(on_overflow="keep"))

    buffer, full = begin(), TensorDictReplayBuffer(storage=LazyTensorStorage(24), batch_size=4)
    for seed in range(6):
        td, _ = jumping(seed, 10, often=0.4)
        buffer.extend(td), full.extend(td)
        buffer.storage._journal.abandon()  # as a killed process leaves it
        buffer = begin(resume=True)
        want = full[:]
        rows = (want[NEXT_OBS] - want["observation"]).abs().amax(-1) > 65504
        assert rows.any()
        same_next(buffer[:][NEXT_OBS], want[NEXT_OBS], rows)
    buffer.close()


@pytest.mark.parametrize("first", [False, True])
def test_n_steps_ahead_may_be_a_kept_row(first):
    rings = [TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=40) for _ in range(2)]
    n_step = MultiStepTransform(3, 0.9)
    for buffer, transforms in zip(
        rings, ([], [] if first else [NextObservationDelta(on_overflow="keep")]), strict=True
    ):
        for transform in (*transforms, MultiStepTransform(3, 0.9)):
            buffer.append_transform(transform)
    full, _ = jumping(5, 3, 12, often=0.4)
    rings[0].extend(full)
    coded = NextObservationDelta(on_overflow="keep").compress(full)
    rings[1].extend(coded)
    want, got = rings[0][:], rings[1][:]
    assert set(want.keys(True, True)) == set(got.keys(True, True))
    rows = want[NEXT_OBS].abs().amax(-1) > 65504
    assert rows.any()
    same_next(got[NEXT_OBS], want[NEXT_OBS], rows)
    same_next(
        n_step(coded.clone())[NEXT_OBS],
        n_step(full.clone())[NEXT_OBS],
        n_step(full.clone())[NEXT_OBS].abs().amax(-1) > 65504,
    )


# ---- what is missing beside a difference --------------------------------------------------------------------------
@pytest.mark.parametrize("code", list(JUMPS))
@pytest.mark.parametrize("reader", ["buffer side", "n steps", "values"])
def test_marked_rows_whose_kept_next_observation_is_missing_are_not_read(code, reader):
    full, _ = jumping(0, 4, 25, code=code)
    coded = NextObservationDelta(delta_dtype=code, on_overflow="keep").compress(full)
    bare = coded.exclude(KEPT)
    read = {
        "buffer side": NextObservationDelta(delta_dtype=code),
        "n steps": MultiStepTransform(n_steps=2, gamma=0.9),
        "values": lambda td: rebuilt(td, "observation"),
    }[reader]
    read(coded.clone())
    refused(MissingKeyError, "next.delta_kept.observation", lambda: read(bare))


def test_int8_without_its_scales_is_not_read():
    full, _ = jumping(0, 4, 25, often=0.0)
    delta = NextObservationDelta(delta_dtype=torch.int8)
    with refused(MissingKeyError, "next.delta_scale.observation"):
        delta(delta.compress(full).exclude(("next", "delta_scale")))


@pytest.mark.parametrize(
    ("obs", "after", "sentence"),
    [
        (torch.tensor([[65504.0]]), torch.tensor([[0.0]]), "65504 float16 65472"),
        (torch.tensor([[32768]]), torch.tensor([[0]]), "32768 int16 32767"),
    ],
)
def test_no_difference_is_written_that_looks_like_the_mark(obs, after, sentence):
    td = TensorDict({"observation": obs, "next": {"observation": after, **flags(1)}}, batch_size=[1])
    refused(NumericsError, sentence, lambda: NextObservationDelta().compress(td))
    td["observation"], td["next", "observation"] = after, obs - 1  # as far the other way is no mark
    delta = NextObservationDelta()
    delta(delta.compress(td))
