"""Policy gradients from slices of stored rows: they learn, resume bit for bit, and read what was stored."""

from __future__ import annotations

import random

import pytest
import torch
from face import algorithm_of, build_collector, build_env, build_policy, configure, refused
from test_off_policy_runs import decided
from test_resume import final_state, same, stop_after

from rlcli.build import resume
from rlcli.build.algorithm import build_parts
from rlcli.errors import ConfigError
from rlcli.keys import ADVANTAGE, OBSERVATION, VALUE_TARGET, under_next
from rlcli.learning.buffered import BufferedOnPolicy
from rlcli.learning.loops import Hooks
from rlcli.runs.folder import create

BASE = [
    "env.num=4", "collector.frames_per_batch=128", "policy.hidden=[16]", "run.eval_episodes=0", "console=off",
    "logger=none", "optim.epochs=2",
]  # fmt: skip
SLICES = [*BASE, "storage=tensor", "storage.max_size=512", "sampler=slice", "sampler.slice_len=16", "total_frames=640"]
SLICES += ["sampler.batch_size=64"]
TASKS = {
    "exact": SLICES,
    "gru, few states": [*SLICES, "policy=gru", "policy.recurrent_size=8", "memory.recurrent_state_stride=5"],
    "gru, few states, strict": [
        *SLICES, "policy=gru", "policy.recurrent_size=8", "sampler.strict_length=true", "sampler.slice_len=4",
    ],
    "lstm, few states, memmap": [*SLICES, "policy=lstm", "policy.recurrent_size=8", "storage=memmap"],
    "full, two dims": [*SLICES, "memory=full", "storage.ndim=2"],
    "compact shifted chunks, memmap": [
        *SLICES, "memory=compact", "storage=memmap", "value.shifted=true", "value.num_chunks=4",
    ],
    "delta shifted, memmap": [*SLICES, "memory=delta", "storage=memmap", "value.shifted=true", "sampler.span=true"],
    "strict shifted compact": [
        *SLICES, "sampler.strict_length=true", "sampler.slice_len=4", "value.shifted=true", "memory=compact",
    ],
    "penalty, running scale": [*SLICES, "loss=ppo_kl", "value.normaliser=running", "sampler.weighting=trajectory"],
    "a2c vtrace": [*SLICES, "loss=a2c", "value=vtrace"],
    "stacks": [*SLICES, "env.frame_stack=3"],
}  # fmt: skip
KINDS = {
    "ppo_kl": [*BASE, "total_frames=640", "sampler.batch_size=64", "loss=ppo_kl"],
    "running": [*BASE, "total_frames=640", "sampler.batch_size=64", "value.normaliser=running"],
    "popart": [*BASE, "total_frames=640", "sampler.batch_size=64", "value.normaliser=popart", "value=td_lambda"],
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
@pytest.mark.every(3)
def test_stopped_and_resumed_equals_uninterrupted(run, task):
    whole = decided(run("run.dir=whole", *task))
    with stop_after(random.Random(str(task)).randrange(1, 5)):
        run("run.dir=cut", *task)
    same(decided(resume("cut")), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loss_and_a_normaliser_learned_on_the_way_is_resumed(run, kind):
    state = final_state(run("run.dir=whole", *KINDS[kind]))
    with stop_after(3):
        run("run.dir=cut", *KINDS[kind])
    held = final_state(resume("cut"))
    same(held, state)
    if kind == "ppo_kl":
        assert (
            2.0**-5 <= float(held["update"]["loss.beta"]) <= 2.0**5 and held["update"]["loss.beta"] != 1
        )  # once a batch
    else:
        assert float(held["loop"]["estimator"]["value_norm.weight"]) > 0


def test_exact_and_full_rows_learn_the_same_weights(run):
    """The slices that are drawn, and what they read, do not depend on how next observations are kept."""
    states = [
        final_state(run(f"run.dir={mode}", *SLICES, f"memory={mode}", "value.two_calls=true"))
        for mode in ("exact", "full")
    ]
    same(states[0]["policy"], states[1]["policy"])


def walk_of(tmp_path, name: str, *words: str) -> BufferedOnPolicy:
    """A loop whose buffer holds three batches of a policy that does not learn."""
    words = (*SLICES, *words)
    cfg = configure("train", list(words))
    env = build_env(cfg.env, gamma=cfg.value.gamma)
    torch.manual_seed(0)
    policy = build_policy(cfg, env)
    run = create({}, verb="train", recipe=None, seed=0, directory=str(tmp_path / name))
    algorithm = algorithm_of(cfg)
    loop = algorithm.loop(build_parts(cfg, algorithm, env, policy, run), policy, Hooks())
    for _ in range(3):
        loop.buffer.extend(loop.collector.rollout(loop.collector.steps_left()))
    return loop


def test_every_way_to_keep_next_observations_draws_the_same_rows(tmp_path):
    loops = {mode: walk_of(tmp_path, mode, f"memory={mode}") for mode in ("full", "exact", "delta", "compact")}
    for _ in range(5):
        samples = {mode: loop.buffer.sample() for mode, loop in loops.items()}
        want = samples["full"]
        after = want[under_next(OBSERVATION)]
        for mode, sample in samples.items():
            for key in (OBSERVATION, "action", "sample_log_prob", ("next", "done"), ("next", "reward")):
                assert torch.equal(sample[key], want[key]), (mode, key)
            got = sample[under_next(OBSERVATION)]
            known = ~got.isnan().any(-1)
            if mode == "compact":
                assert torch.equal(got[known], after[known]) and known.float().mean() > 0.8
            else:
                assert known.all() and (got - after).abs().max() <= (0 if mode == "exact" else 1e-3)
        values = {mode: loops[mode].estimator(samples[mode])["advantage"] for mode in samples}
        assert torch.allclose(values["full"], values["exact"], atol=1e-5)
        assert (values["full"] - values["delta"]).abs().max() < 1e-2
        unknown = samples["compact"][under_next(OBSERVATION)].isnan().any(-1) & ~want["next", "terminated"].squeeze(-1)
        assert loops["compact"].estimator.last_approximated == int(unknown.sum())
        assert loops["exact"].estimator.last_approximated == loops["delta"].estimator.last_approximated == 0


def test_strict_slices_are_valued_side_by_side(tmp_path):
    loop = walk_of(
        tmp_path, "a", "sampler.strict_length=true", "sampler.slice_len=4", "value.shifted=true", "memory=compact"
    )
    assert loop.slice_len == 4
    found = loop.estimator(loop.buffer.sample().reshape(-1, loop.slice_len))
    assert found.shape == (16, 4) and loop.estimator.last_dropped == 0
    assert torch.isfinite(found[ADVANTAGE]).all() and torch.isfinite(found[VALUE_TARGET]).all()


def test_an_epoch_draws_about_as_many_rows_as_a_batch_holds(run):
    strict = [*SLICES, "sampler.strict_length=true", "sampler.slice_len=4"]
    for record in run("run.dir=a", *strict).metrics()[:-1]:
        assert record["rows_drawn"] == 2 * 128 and record["epochs"] == 2


@pytest.mark.parametrize(
    "words",
    [
        [], ["loss=ppo_kl"], ["loss=a2c"], ["loss=reinforce", "value=td1"], ["value=vtrace"],
        ["loss=reinforce", "value=td1", "loss.baseline=false"], ["loss.clip_value=0.2"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("memory", ["full", "compact"])
@pytest.mark.every(3)
def test_a_batch_holds_what_loss_and_estimator_read_and_nothing_else(words, memory):
    cfg = configure("train", [*BASE, "sampler.batch_size=64", f"memory={memory}", *words])
    env = build_env(cfg.env, gamma=cfg.value.gamma)
    policy, algorithm = build_policy(cfg, env), algorithm_of(cfg)
    estimator, loss = algorithm.estimator(policy), algorithm.loss(policy, env)
    collector = build_collector(cfg, env, policy, algorithm.keys(loss, estimator, env))
    batch = collector.rollout(4)
    stored = set(batch.keys(True, True))
    read = ({*loss.in_keys, *estimator.in_keys} - {*estimator.out_keys}) | {("next", "done"), ("next", "truncated")}
    after = under_next(OBSERVATION)
    if memory == "compact":
        read.discard(after)
    elif OBSERVATION in read:
        read.add(after)
    assert stored == read
    assert set(loss.in_keys) <= set(estimator(batch).keys(True, True))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampler=slice"], ["storage=none has none; use storage=tensor | memmap"]),
        ([*SLICES, "storage.max_size=100"], ["storage.max_size=100 is less than collector.frames_per_batch=128"]),
        ([*SLICES, "sampler.slice_len=null"], ["needs sampler.slice_len or sampler.num_slices; give one"]),
        ([*SLICES, "sampler.num_slices=3"], ["are not sampler.batch_size=64 rows", "sampler.batch_size=48"]),
        ([*SLICES, "sampler.slice_len=10"], ["no multiple of sampler.slice_len=10", "sampler.batch_size=60"]),
        ([*SLICES, "sampler.slice_len=100"], ["no multiple of sampler.slice_len=100", "sampler.batch_size=100"]),
        (
            [*SLICES, "storage.ndim=2", "env.num=64", "storage.max_size=640"],
            ["a slice of 16 rows is longer than the 10 rows of an env"],
        ),
        ([*SLICES, "loss.clip_value=0.2"], ["loss.clip_value has no meaning with sampler=slice"]),
        ([*SLICES, "collector.trajs_per_batch=2"], ["collector.trajs_per_batch has no meaning with sampler=slice"]),
        ([*SLICES, "collector.track_traj_ids=false"], ["needs collector.track_traj_ids=true"]),
        ([*SLICES, "loss=reinforce", "loss.baseline=false"], ["a slice ends before its trajectory"]),
        ([*SLICES, "storage.init_from=."], ["storage.init_from has no meaning with loss=ppo_clip"]),
        (["sampler.slice_len=8"], ["sampler.slice_len has no meaning with sampler=minibatch and policy=auto"]),
        (["sampler.weighting=trajectory"], ["'sampler.weighting' with sampler=minibatch; it is an option of"]),
        ([*SLICES, "sampler.span=true", "sampler.strict_length=true"], ["strict_length wants whole ones; give one"]),
        (["loss=dqn", "storage=tensor", "sampler=slice"], ["loss=dqn learns from single rows"]),
    ],
)
def test_what_does_not_fit_is_said(words, said):
    with pytest.raises(ConfigError) as caught:
        configure("train", words)
    for part in said:
        assert part in str(caught.value)


def test_no_trajectory_as_long_as_a_strict_slice_is_a_sentence(run):
    with refused(Exception, "64 sampler.strict_length=false"):
        run("run.dir=a", *SLICES, "sampler.slice_len=64", "sampler.strict_length=true")
