"""Batches that keep a recurrent state in few rows: which rows, and that nothing learned from them is another."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from face import Config, Recurrence, Rows, Update, refused

from rlcli.build.collector import state_stride
from rlcli.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rlcli.config.choices.collect import BatchOptions, ExactOptions
from rlcli.data.collected.batches import batch_of, layout_of, tensors_of
from rlcli.data.files.state import flatten, restore
from rlcli.data.next_obs import concat, move
from rlcli.envs import GymEnv, SerialEnv
from rlcli.errors import ArgumentError
from rlcli.keys import COLLECTOR_MASK
from rlcli.modules import build_actor_critic, set_recurrent_mode
from rlcli.objectives import ClipPPOLoss
from rlcli.objectives.value import GAE
from rlcli.report.ledger import batch_entries

CELLS = {"gru": ["recurrent_state"], "lstm": ["recurrent_state_h", "recurrent_state_c"]}
KEYS = ["observation", "action", "sample_log_prob", "is_init", ("next", "reward"), ("next", "done"),
        ("next", "terminated"), ("next", "truncated")]  # fmt: skip
STEPS = 40


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def serial(lanes):
    return SerialEnv(lanes, cartpole) if lanes else cartpole()


def networks(kind="gru", units=8, layers=2):
    env = cartpole()
    return build_actor_critic(
        env.observation_spec, env.action_spec, hidden=[8], recurrence=Recurrence(kind, units, layers, {}), generator=0
    )


def collector(stride, *, lanes=3, kind="gru", **options):
    options = {"next_obs": "exact", "seed": 0} | options
    return Collector(
        serial(lanes), networks(kind).actor, frames_per_batch=(lanes or 1) * STEPS, recurrent_state_stride=stride,
        **options,
    )  # fmt: skip


def kept_rows(batches, stride):
    """Of the batches of one collector `[N, T]`, one after the other: first rows, and every k-th of an episode."""
    since, found = None, []
    for batch in batches:
        begun = batch["is_init"].reshape(-1, batch.shape[-1])
        rows = torch.zeros_like(begun)
        since = [0] * len(begun) if since is None else since
        for lane, t in np.ndindex(*begun.shape):
            since[lane] = 0 if begun[lane, t] else since[lane]
            rows[lane, t] = t == 0 or since[lane] % stride == 0
            since[lane] += 1
        found.append(rows.reshape(batch.shape))
    return found


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("mode", ["exact", "full", "compact"])
@pytest.mark.every(3)
def test_rows_that_are_kept_are_those_of_a_batch_that_keeps_all_and_no_other_is_a_number(mode, lanes, kind):
    with collector(1, lanes=lanes, kind=kind, next_obs=mode) as whole, \
            collector(7, lanes=lanes, kind=kind, next_obs=mode) as few:  # fmt: skip
        pairs = [(whole.rollout(), few.rollout()) for _ in range(3)]
    for (full, batch), rows in zip(pairs, kept_rows([full for full, _ in pairs], 7), strict=True):
        for key in CELLS[kind]:
            column = batch[key]
            assert isinstance(column, Rows) and torch.equal(~column.full().isnan().flatten(batch.ndim).any(-1), rows)
            assert torch.equal(column.full()[rows], full[key][rows])
        for key in batch.keys(True, True):
            if key not in CELLS[kind]:
                assert torch.equal(batch[key], full[key]), key


def test_one_in_every_row_is_a_plain_column():
    with collector(1) as whole:
        assert type(whole.rollout()["recurrent_state"]) is torch.Tensor


def learned(stride, **options):
    """Parameters after three updates on three batches, and the last batch's advantages."""
    policy = networks()
    env, options = serial(3), {"next_obs": "exact"} | options
    mode, whole = options.pop("next_obs"), options.pop("whole", False)
    with Collector(
        env, policy.actor, frames_per_batch=3 * STEPS, next_obs=mode, seed=0, recurrent_state_stride=stride,
    ) as batches:  # fmt: skip
        estimator = GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic, **options)
        update = Update(ClipPPOLoss(policy.actor, policy.critic), epochs=2, batch_size=3 * STEPS if whole else 30)
        for _ in range(3):
            batch = estimator(batches.rollout())
            update(batch)
            batches.update_policy_weights_()
    return torch.cat([p.detach().flatten() for p in update.loss.parameters()]), batch["advantage"]


@pytest.mark.parametrize(
    "options",
    [{}, {"next_obs": "compact"}, {"next_obs": "full"}, {"shifted": True}, {"num_chunks": 3}, {"whole": True}],
    ids=lambda options: str(options),
)
@pytest.mark.every(2)
def test_an_update_on_policy_is_the_same_to_the_bit(options):
    for ours, theirs in zip(learned(1000, **options), learned(1, **options), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("made", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_keep_the_same_rows(made):
    options = {"frames_per_batch": 4 * STEPS, "total_frames": 4 * STEPS * 3, "seed": 0, "next_obs": "exact"}
    options |= {"cat_results": 0} if made is MultiSyncCollector else {}
    found = []
    for stride in (1, 5):
        with made([partial(serial, 2)] * 2, networks().actor, recurrent_state_stride=stride, **options) as batches:
            of = {}
            for batch in batches:
                for lane, rows in enumerate(batch.split(2)):
                    of.setdefault(int(rows["collector", "traj_ids"][0, 0]) % 2 if len(batch) == 2 else lane, []).append(
                        rows
                    )
            found.append(of)
    for lane, rows in found[1].items():
        wanted = kept_rows(rows, 5)
        for few, whole, kept in zip(rows, found[0][lane], wanted, strict=True):
            x = few["recurrent_state"].full()
            assert torch.equal(~x.isnan().flatten(2).any(-1), kept)
            assert torch.equal(x[kept], whole["recurrent_state"][kept])


CUT = {
    "end to end": {"trajs_per_batch": 3, "traj_format": "cat"},
    "padded": {"trajs_per_batch": 3},
    "split": {"split_trajs": True},
}


@pytest.mark.filterwarnings("ignore:split_trajectories pads")
@pytest.mark.parametrize("mode", ["exact", "full", "compact"])
@pytest.mark.parametrize("cut", CUT)
@pytest.mark.every(2)
def test_whole_trajectories_keep_the_states_that_their_batches_kept_and_no_others(cut, mode):
    found = []
    for stride in (1, 7):
        with collector(stride, total_frames=600, next_obs=mode, **CUT[cut]) as batches:
            found.append(list(batches))
    assert len(found[0]) == len(found[1]) >= 5
    for whole, few in zip(*found, strict=True):
        masks = [few[key] for key in ("mask", COLLECTOR_MASK) if key in few.keys(True)]
        mask = masks[0] if masks else torch.ones(few.shape, dtype=torch.bool)
        column, states = few["recurrent_state"], whole["recurrent_state"]
        assert isinstance(column, Rows) and column.sparse and column.extra.nbytes < states.nbytes / 3
        kept = ~column.full().flatten(few.ndim).isnan().any(-1)
        assert torch.equal(column.full()[kept], states[kept]) and bool(kept[few["is_init"][..., 0]].all())
        assert not column.full()[~mask].any() and not bool((kept & mask).all())
        for key in set(few.keys(True, True)) - {"recurrent_state"}:
            assert torch.equal(few[key] + 0, whole[key] + 0), key


@pytest.mark.filterwarnings("ignore:split_trajectories pads")
@pytest.mark.parametrize("cut", CUT)
def test_an_update_on_whole_trajectories_is_the_same_to_the_bit(cut):
    found = []
    for stride in (1, 1000):
        policy = networks()
        options = {"frames_per_batch": 120, "total_frames": 600, "seed": 0, "next_obs": "exact"} | CUT[cut]
        estimator = GAE(gamma=0.99, lmbda=0.9, value_network=policy.critic)
        update = Update(ClipPPOLoss(policy.actor, policy.critic), epochs=2, batch_size=30)
        with Collector(serial(3), policy.actor, recurrent_state_stride=stride, **options) as batches:
            for batch in batches:
                update(estimator(batch))
                batches.update_policy_weights_()
        found.append(torch.cat([p.detach().flatten() for p in update.loss.parameters()]))
    assert torch.equal(*found)


def test_open_trajectories_go_on_after_a_checkpoint_with_what_they_kept():
    options = {"total_frames": 600, "episode_seeds": True, "deliver_leftovers": True} | CUT["end to end"]
    with collector(7, **options) as one, collector(7, **options) as other:
        assert one.remember_episodes(500) and other.remember_episodes(500)
        next(iter(one))
        other.load_state_dict(restore(*flatten(one.state_dict())))
        pairs = [(a["recurrent_state"], b["recurrent_state"]) for a, b in zip(one, other, strict=True)]
    assert len(pairs) >= 5
    for a, b in pairs:
        torch.testing.assert_close(a.full(), b.full(), rtol=0, atol=0, equal_nan=True)


def test_a_batch_goes_on_counting_after_a_checkpoint():
    with collector(7, episode_seeds=True) as one, collector(7, episode_seeds=True) as other:
        assert one.remember_episodes(500) and other.remember_episodes(500)
        one.rollout()
        assert other.load_state_dict(one.state_dict()) == []
        a, b = one.rollout()["recurrent_state"].full(), other.rollout()["recurrent_state"].full()
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_a_batch_moved_joined_and_written_to_a_file_keeps_what_it_kept():
    with collector(7) as few:
        first, second = few.rollout(), few.rollout()
    both = concat([first, second])["recurrent_state"]
    parts = torch.cat([first["recurrent_state"].full(), second["recurrent_state"].full()], 1)
    moved = move(first, "cpu")["recurrent_state"]
    for x, y in ((both, parts), (moved, first["recurrent_state"].full())):
        assert isinstance(x, Rows)
        assert torch.equal(x.full().isnan(), y.isnan()) and torch.equal(x.full().nan_to_num(), y.nan_to_num())
    layout, files = layout_of(first), tensors_of(first)
    record = {"batch_size": list(first.shape), "names": first.names, "frames": first.numel()}
    back = batch_of(dict(files), record, layout)["recurrent_state"]
    assert isinstance(back, Rows) and torch.equal(back.full().isnan(), first["recurrent_state"].full().isnan())
    assert sum(x.nbytes for name, x in files.items() if "recurrent" in name) < first["recurrent_state"].nbytes / 3


def test_sequences_that_begin_where_none_is_kept_are_refused_and_those_that_begin_elsewhere_run():
    policy = networks()
    with collector(1000) as few:
        batch = few.rollout()
    with set_recurrent_mode(True), torch.no_grad():
        policy.actor(batch.select(*policy.actor.in_keys))
        refused(ArgumentError, "sequence", lambda: policy.actor(batch[:, 3:].select(*policy.actor.in_keys)))


@pytest.mark.parametrize("keep", [None, [*KEYS, "recurrent_state"], KEYS], ids=["all", "listed", "no state"])
def test_a_frame_of_a_gru_of_128_units_takes_a_tenth_of_the_bytes_of_torchrl(keep):
    policy = networks(units=128, layers=1)
    with Collector(
        cartpole(), policy.actor, frames_per_batch=200, seed=0, next_obs="compact", keep_keys=keep,
        recurrent_state_stride=200,
    ) as few:  # fmt: skip
        batch = few.rollout()
    if keep is not None:  # with every key, networks' outputs of 128 numbers a row are among them
        assert sum(entry.bytes for entry in batch_entries(batch)) <= 319_800 / 10
    entries = {entry.key: entry for entry in batch_entries(batch)}
    if "recurrent_state" in entries:
        assert entries["recurrent_state"].bytes < 200 * 512 / 5
        assert entries["recurrent_state"].saved == 200 * 512 - entries["recurrent_state"].bytes


@pytest.mark.parametrize("cut", [{}, {"trajs_per_batch": 3}, {"split_trajs": True}], ids=["batches", "whole", "split"])
def test_a_run_on_batches_keeps_first_rows_alone_unless_asked(cut):
    cfg = Config(collector=BatchOptions(frames_per_batch=96, **cut))
    assert state_stride(cfg) == 96
    assert state_stride(dataclasses.replace(cfg, memory=ExactOptions(recurrent_state_stride=5))) == 5
