"""What a plan says of a run's tensors is, byte for byte, what the run's own ledger shows."""

import dataclasses
import gc
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections import namedtuple
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from face import Reporter, build_collector, build_env, build_policy, configure, find_recipes
from large_env import LargeEnv

import rlcli
from rlcli.build.plan import advice_for, plan
from rlcli.build.workload import envs_of
from rlcli.collectors.batch import StateClock
from rlcli.config import registry
from rlcli.data.samplers import PrioritizedSampler
from rlcli.kernels.sum_tree import tree_bytes
from rlcli.keys import DONE
from rlcli.planning.envs import EVALUATION, one_more, to_come
from rlcli.planning.plan import MemoryFit, show_plan
from rlcli.planning.tensors import planned_learner
from rlcli.vec_envs.noise import drawn_ahead

work_out = partial(plan, verb="train")
SPREAD = 8 << 20  # between two measurements of one process
SMALL = {
    "ppo_full": ["total_frames=2048"],
    "ppo_compact": ["total_frames=2048"],
    "ppo_exact": ["total_frames=2048"],
    "ppo_delta": ["total_frames=2048"],
    "ppo_kl": ["total_frames=2048"],
    "ppo_multi": ["total_frames=2048"],
    "ppo_shifted": ["total_frames=2048"],
    "ppo_gru": ["total_frames=2048"],
    "ppo_lstm": ["total_frames=2048"],
    "dqn_cartpole": ["total_frames=1024", "collector.init_random_frames=512"],
    "recipe_a": ["total_frames=2048"],
    "recipe_b": ["total_frames=2048"],
    "a2c_cartpole": ["total_frames=512", "collector.frames_per_batch=256"],
    "impala_cartpole": ["total_frames=2048"],
    "reinforce_cartpole": ["total_frames=2048", "collector.frames_per_batch=1024"],
    "ppo_halfcheetah": ["total_frames=512", "collector.frames_per_batch=256"],
    "ppo_mujoco": ["total_frames=512", "collector.frames_per_batch=256"],
    "ppo_box2d": ["total_frames=512", "collector.frames_per_batch=256"],
    "ppo_classic": ["total_frames=512", "collector.frames_per_batch=256"],
    "ppo_minigrid": ["total_frames=512", "collector.frames_per_batch=256"],
    **dict.fromkeys(
        ["ppo_pong", "ppo_atari"],
        ("env.num=2", "total_frames=64", "collector.frames_per_batch=32", "sampler.batch_size=16", "optim.epochs=1"),
    ),
    "dqn_recurrent": ["total_frames=1280", "collector.init_random_frames=640", "storage.max_size=2000"],
    "dqn_exact": ["total_frames=1024", "collector.init_random_frames=512"],
    "dqn_async": ["total_frames=1024", "collector.init_random_frames=512"],
    "sac_pendulum": ["total_frames=200", "collector.init_random_frames=150"],
    "sac_async": ["total_frames=208", "collector.init_random_frames=150"],
    **dict.fromkeys(["sac_halfcheetah", "sac_mujoco"], ("total_frames=60", "collector.init_random_frames=50")),
    **dict.fromkeys(
        ["dqn_pong", "dqn_atari"],
        ("env.num=2", "total_frames=128", "collector.init_random_frames=120", "storage.max_size=1000"),
    ),
    "collect_random": ["total_frames=4096", "collector.frames_per_batch=2048"],
}
QUIET = ["console=off", "logger=none"]
BUFFERED_STATE = ("buffer", "recurrent_state")
UNTRIED = [*QUIET, "run.eval_episodes=0"]  # of training


@pytest.fixture(scope="module", autouse=True)
def _imported_by_plans_stays():
    """The first plan imports what the others find: each would look through it for garbage, half of its time."""
    rlcli.plan(["policy=gru", *QUIET])
    gc.collect()
    gc.freeze()


@pytest.fixture
def seen(monkeypatch):
    """Ends inside the last batch that a run reported."""
    counts = []
    batch = Reporter.batch

    def watched(self, data, *args, **kwargs):
        done = np.atleast_2d(data.get(DONE).squeeze(-1).numpy())
        counts.append(int(done[:, :-1].sum()))
        return batch(self, data, *args, **kwargs)

    monkeypatch.setattr(Reporter, "batch", watched)
    monkeypatch.setattr("rlcli.report.reporter.LEDGER_EVERY", 0.0)  # the ledger is that of the last batch
    return counts


def _bytes(entries, ledger):
    return {
        (e["component"], e["key"]): (e["bytes"], e["shape"] if ledger == "rollout" else None)
        for e in entries
        if e["component"] == ledger
    }


def _same(run, planned, ends):
    told = planned.as_dict()["entries"]
    per_end = 0
    for component in ("rollout", "params+optim"):
        said, held = _bytes(told, component), _bytes(run.summary["memory"]["entries"], component)
        for (_, key), (nbytes, shape) in held.items():
            planned_bytes, planned_shape = said.pop((component, key))
            following = planned.next_obs == "exact" and key == "next.observation"
            few = key.startswith("recurrent_state") and planned_bytes < math.prod(shape) * 4  # not of every row
            width = 4 * math.prod(shape[2:]) if following or few else 0
            more = ends * (width + 4 * following)
            per_end += more // max(ends, 1)
            assert (planned_bytes + more, planned_shape if nbytes else shape) == (nbytes, shape), key
        assert not said, said
    assert not ends or per_end == planned.per_end
    if planned.component("buffer"):
        held = _bytes(run.summary["memory"]["entries"], "buffer")
        assert held.keys() == _bytes(planned.as_dict()["entries"], "buffer").keys()
        for name, told in _bytes(planned.as_dict()["entries"], "buffer").items():
            if name[1] == "index":  # depends on episodes
                assert told[0] > 0
            elif run.config["storage"]["kind"] != "compressed":
                assert held[name][0] == told[0], name


def test_every_training_and_collecting_recipe_is_in_this_file():
    others = {"collect_policy", "ppo_ray"}  # need a run, below, and Ray: the tensors are those of ppo_multi
    unknown = set(find_recipes()) - set(SMALL) - others
    assert not unknown


@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.every(5)
def test_tensor_bytes_are_those_of_the_run(recipe, seen, tmp_path):
    verb = "collect" if recipe.startswith("collect") else "train"
    overrides = [f"recipe={recipe}", *SMALL[recipe], *(QUIET if verb == "collect" else UNTRIED)]
    planned = rlcli.plan(overrides, verb=verb)
    run = getattr(rlcli, verb)([*overrides, f"run.dir={tmp_path / 'run'}"])
    _same(run, planned, seen[-1])
    said = run.summary["memory"]["process"]
    assert said["planned"] > said["imported"] > 0


@pytest.mark.parametrize(
    "extra",
    [
        ["memory=full", "optim=rmsprop", "optim.momentum=0.9"],
        ["memory=compact", "optim=sgd", "policy.shared=true"],
        ["memory=delta"],
        ["memory=delta", "memory.delta_dtype=int8", "env.frame_stack=2"],
        ["memory=delta", "memory.on_overflow=keep", "total_frames=256"],
        ["value.shifted=true", "value.shifted_budget=3"],
        ["memory=compact", "value.shifted=true", "value.num_chunks=4", "loss=ppo_kl"],
        ["memory=compact", "loss=reinforce", "value=td1", "loss.baseline=false"],
        ["loss=reinforce", "value=td1", "loss.baseline=false"],
        ["recipe=dqn_cartpole", "sampler=prioritized", "memory=full", "storage.ndim=2"],
        ["env.transforms=[StepCounter]", "memory.keep=[step_count]"],
        ["env.normalize_observation=true", "env.normalize_reward=true"],
        ["env.frame_stack=3", "env.num=4"],
        ["env.num=16", "policy.hidden=[7]"],  # the native engine
        ["env.id=Pendulum-v1", "env.num=2", "value.two_calls=true"],
        ["collector.trajs_per_batch=2", "collector.frames_per_batch=512"],
        ["recipe=ppo_multi", "memory=compact", "collector.preemptive_threshold=0.99"],  # of two: both
    ],
)
@pytest.mark.every(3)
def test_options_do_not_surprise_the_plan(extra, seen, tmp_path):
    overrides = ["total_frames=1024", "collector.frames_per_batch=256", *extra, *UNTRIED]
    planned = rlcli.plan(overrides)
    run = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"])
    _same(run, planned, seen[-1])


@pytest.mark.parametrize("policy", ["mlp", "gru"])
def test_an_update_holds_the_same_where_rows_may_be_left_out(policy):
    words = [f"policy={policy}", "env.num=4", "collector=multi_sync", "collector.num_workers=2", *QUIET]
    (whole,), (some,) = (
        [peak for peak in rlcli.plan([*words, *extra]).peaks if peak.stage == "update"]
        for extra in ([], ["collector.preemptive_threshold=0.5"])
    )
    assert some == whole and not some.unknown


def test_a_policy_from_a_run_can_be_planned_for(seen, tmp_path):
    trained = rlcli.train(
        ["total_frames=512", "collector.frames_per_batch=256", *UNTRIED, f"run.dir={tmp_path / 'run'}"]
    )
    overrides = ["recipe=collect_policy", "total_frames=2048", "collector.frames_per_batch=1024"]
    overrides += [f"policy.path={trained.path}", *QUIET]
    planned = rlcli.plan(overrides, verb="collect")
    _same(rlcli.collect([*overrides, f"run.dir={tmp_path / 'frames'}"]), planned, seen[-1])


def test_modes_are_those_of_three_runs_and_cost_more_where_it_is_said():
    each = {
        mode: rlcli.plan(["recipe=ppo_full", f"memory={mode}", *QUIET]).component("rollout")
        for mode in ("full", "exact", "compact")
    }
    planned = rlcli.plan(["recipe=ppo_full", *QUIET])
    assert {m.name: m.bytes for m in planned.modes if m.name in each} == each
    pong = {
        m.name: m
        for m in rlcli.plan(["recipe=ppo_pong", "collector.frames_per_batch=64", "sampler.batch_size=8", *QUIET]).modes
    }
    assert pong["delta"].note and not pong["exact"].note


def test_a_mode_that_costs_more_than_it_saves_is_warned_of():
    short = rlcli.plan(["memory=exact", "env.max_episode_steps=1", *QUIET])
    assert any("memory=full" in text for text in short.warnings)
    tiny = rlcli.plan(
        ["memory=exact", "env.id=FrozenLake-v1", "collector.frames_per_batch=8", "sampler.batch_size=8", *QUIET]
    )
    assert any("needs no less than full" in text for text in tiny.warnings)
    assert not rlcli.plan(["recipe=ppo_exact", *QUIET]).warnings
    assert any("V(s) in place of V(s')" in text for text in rlcli.plan(["recipe=ppo_compact", *QUIET]).warnings)


@pytest.mark.parametrize("mode", ["parallel", "serial"])  # auto would leave it to the clock
@pytest.mark.every(2)
def test_what_does_not_fit_is_told_with_overrides_that_make_it_fit(monkeypatch, mode):
    monkeypatch.setattr("rlcli.planning.fit.free_memory", lambda: (4 << 30, 8 << 30))
    overrides = ["recipe=ppo_pong", "memory=full", "env.num=64", "collector.frames_per_batch=32768", *QUIET]
    overrides.append(f"env.mode={mode}")
    planned = rlcli.plan(overrides)
    assert not planned.fits and planned.advice
    tried = [line.split(" ")[0] for line in planned.advice if "not enough" not in line]
    assert tried and all(rlcli.plan([*overrides, override]).fits for override in tried)
    assert rlcli.plan(["recipe=ppo_pong", *QUIET]).fits


def test_the_table_of_modes_says_of_the_chosen_one_what_the_ledger_says():
    for overrides in (["recipe=recipe_a"], ["recipe=recipe_b"], ["recipe=ppo_exact"], ["recipe=reinforce_cartpole"]):
        planned = rlcli.plan(overrides)
        (chosen,) = [mode for mode in planned.modes if mode.name == planned.next_obs]
        assert chosen.bytes == planned.component("rollout"), overrides


def test_advice_begins_where_the_run_is(monkeypatch):
    def advice(place, *overrides):
        planned = rlcli.plan(overrides)
        at = next(each for each in planned.places if each.name == place)
        held = planned.component("buffer") or sum(peak.bytes for peak in planned.peaks if peak.stage == "values")
        free = {"RAM": 1 << 50, "disk": 1 << 50, place: at.need - held // 2}
        monkeypatch.setattr("rlcli.planning.fit.free_memory", lambda: (free["RAM"], 1 << 50))
        monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 50, 0, free["disk"]))
        return " ".join(rlcli.plan(overrides).advice)

    small = ["recipe=dqn_cartpole", "total_frames=10_000_000", "storage.max_size=100_000_000"]
    found = re.search(r"storage\.max_size=(\d+)", advice("RAM", *small))
    assert found and int(found[1]) < 10_000_000, "of rows that are never written none can be saved"
    on_disk = advice("disk", "recipe=dqn_cartpole", "storage.max_size=10_000", "run.keep=3")
    found = re.search(r"storage\.max_size=(\d+)", on_disk)
    assert found and 8_000 < int(found[1]) < 10_000, "checkpoints hold the rows too"
    assert "storage=memmap" not in advice("RAM", "recipe=recipe_a")
    chunked = advice("RAM", "recipe=ppo_full", "value.num_chunks=4", "env.num=64", "collector.frames_per_batch=65536")
    assert "num_chunks=2" not in chunked


def test_advice_for_ram_is_of_what_lies_in_ram():
    words = ["recipe=ppo_full", "env.num=64", "collector.frames_per_batch=65536", "sampler.batch_size=4096"]
    rlcli.plan(words)  # the first of a process imports what later ones find, which is more than a mode saves here
    planned = rlcli.plan(words)
    on_gpu = dataclasses.replace(
        planned,
        entries=[dataclasses.replace(each, device="cuda:0") for each in planned.entries],
        peaks=[dataclasses.replace(each, device="cuda:0") for each in planned.peaks],
    )
    ram = next(each for each in planned.places if each.name == "RAM")
    tight = dataclasses.replace(ram, free=ram.need - (10 << 20))

    def moved(cfg):  # to a GPU that is not there
        found = work_out(cfg)
        (ram,) = (place for place in found.places if place.name == "RAM")
        return dataclasses.replace(found, places=[dataclasses.replace(ram, name="cuda:0")])

    def unmoved(cfg):  # whatever changes, changes on the GPU
        return dataclasses.replace(on_gpu, places=[tight])

    cases = ((on_gpu, "RAM", unmoved, False), (on_gpu, "cuda:0", moved, True), (planned, "RAM", work_out, True))
    for held, name, again, expected in cases:
        short = dataclasses.replace(held, places=[dataclasses.replace(tight, name=name)])
        advice = advice_for(configure("train", words), short, again)
        assert any("frames_per_batch" in line for line in advice) is expected
        assert any("memory=exact" in line for line in advice) is expected


def test_a_storage_on_disk_saves_the_rows_and_not_their_index():
    words = ["recipe=dqn_cartpole", "sampler=prioritized"]
    planned = rlcli.plan(words)
    ram = next(each for each in planned.places if each.name == "RAM")
    tight = dataclasses.replace(ram, free=ram.need - 1000)
    advice = advice_for(configure("train", words), dataclasses.replace(planned, places=[tight]), work_out)
    on_disk = rlcli.plan([*words, "storage=memmap"])
    saved = sum(each.bytes for each in on_disk.entries if each.device == "disk")
    (line,) = (line for line in advice if line.startswith("storage=memmap"))
    assert saved_by(line) == pytest.approx(saved, abs=SPREAD)


def test_nothing_of_the_runs_size_is_allocated():
    from rlcli.processes.memory import process_memory

    rlcli.plan(["recipe=ppo_pong", *QUIET])
    before = process_memory()
    planned = rlcli.plan(["recipe=ppo_pong", "env.num=128", "collector.frames_per_batch=65536", *QUIET])
    assert planned.total > 5 << 30
    assert process_memory()[1] - before[1] < 200 << 20


def test_a_network_that_looks_at_numbers_is_told_and_not_fatal(monkeypatch):
    from rlcli.planning import forecast

    def looks(*args):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(forecast, "update_peak", looks)
    planned = rlcli.plan(["recipe=ppo_exact", *QUIET])
    assert any("memory of stage update is not known" in text for text in planned.warnings)


def test_planning_leaves_random_streams_as_they_were():
    import torch

    torch.manual_seed(5)
    before = torch.get_rng_state()
    plan(configure("train", QUIET), "train")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_of_stored_slices_loads_the_buffers_kernels_as_its_run_does(monkeypatch):
    loaded = []
    monkeypatch.setattr("rlcli.build.buffer.load_buffer_compiler", loaded.append)
    rlcli.plan(QUIET)
    assert not loaded
    rlcli.plan(["storage=tensor", "sampler=slice", "sampler.slice_len=16", *QUIET])
    assert len(loaded) == 1


def test_what_an_update_of_a_recurrent_network_on_slices_holds_is_planned():
    words = ["recipe=dqn_cartpole", "policy=gru", "sampler=slice", "sampler.slice_len=16", "sampler.batch_size=128"]
    peaks = []
    for burn_in in (0, 16):
        planned = rlcli.plan([*words, f"sampler.burn_in={burn_in}", *QUIET])
        (peak,) = (each for each in planned.peaks if each.stage == "update")
        assert not peak.unknown and peak.rows == 128 + 8 * burn_in
        peaks.append(peak.bytes)
    assert 0 < peaks[0] < peaks[1]


@pytest.mark.parametrize(("steps", "stride"), [(16, 16), (64, 16), (8, 64)])
def test_states_in_few_rows_of_a_buffer_are_those_of_episodes_that_are_anywhere_when_batches_begin(steps, stride):
    words = [
        *UNTRIED, "policy=gru", "env.num=4", f"collector.frames_per_batch={4 * steps}", "storage=tensor",
        "storage.max_size=4096", "sampler=slice", "sampler.slice_len=8", f"memory.recurrent_state_stride={stride}",
    ]  # fmt: skip
    (state,) = [e for e in rlcli.plan(words).as_dict()["entries"] if (e["component"], e["key"]) == BUFFERED_STATE]
    planned = state["bytes"] / ((64 * 4 + 16) * 9 / 8) / 4096
    clock, kept, batches = StateClock(64, stride), 0, 200
    clock.load_state_dict(np.random.default_rng(0).integers(1, stride + 1, 64).tolist())
    for _ in range(batches):
        due = [len(clock.tick()) for _ in range(steps)]
        kept += 64 + sum(due[:-1])  # the last one is for the next batch's first row
    assert planned == pytest.approx(kept / (64 * batches * steps), rel=0.05)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], 512),  # a minibatch ends with the sequence that fills it
        (["env.num=4"], 256),
        (["sampler.slice_len=16"], 256),
        (["sampler.slice_len=100"], 300),
        (["sampler.slice_len=4096"], 512),
    ],
    ids=str,
)
def test_a_minibatch_of_sequences_is_planned_as_long_as_they_are(words, rows):
    planned = rlcli.plan(["recipe=ppo_gru", "env.num=1", *words, *QUIET])
    assert [(peak.rows, peak.unknown) for peak in planned.peaks if peak.stage == "update"] == [(rows, "")]


@pytest.mark.parametrize("cut", ["collector.split_trajs=true", "collector.trajs_per_batch=2"])
def test_the_value_stage_of_whole_trajectories_is_not_guessed(cut):
    planned = rlcli.plan([cut])
    assert any("memory of stage values is not known" in text for text in planned.warnings)


def test_networks_are_listed_with_their_parameters():
    plain = rlcli.plan(["recipe=ppo_exact", *QUIET]).networks
    assert [each.reads for each in plain if each.reads] == ["observation", "observation"]
    assert [each.parameters for each in plain if each.network == "actor"] == [320, 0, 4160, 0, 130]
    assert sum(each.parameters for each in plain) == 9155
    shared = rlcli.plan(["recipe=ppo_exact", "policy.shared=true", *QUIET]).networks
    assert sum(each.parameters for each in shared) == 320 + 4160 + 130 + 65
    assert [each.network for each in shared if each.shared] == ["critic"] * 4
    bounded = rlcli.plan(["recipe=sac_pendulum", *QUIET]).networks
    assert {each.network for each in bounded} == {"actor", "critic"}
    assert not rlcli.plan(["policy=random", "console=off"], verb="collect").networks


def test_the_networks_are_printed(capsys):
    planned = rlcli.plan(["recipe=ppo_exact", "policy.shared=true", *QUIET])
    show_plan(planned)
    printed = capsys.readouterr().out
    assert "Linear(in_features=4, out_features=64" in printed and "shared" in printed
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith("= networks")] == ["4,675"]
    assert planned.as_dict()["networks"][0]["parameters"] == 320


def test_a_learner_that_cannot_be_copied_is_planned_all_the_same():
    policy = torch.nn.utils.weight_norm(torch.nn.Linear(2, 3))  # keeps a tensor that deepcopy refuses
    policy(torch.ones(1, 2))
    policy.lock = threading.Lock()
    plain = torch.nn.ParameterList(torch.nn.Parameter(p.detach()) for p in policy.parameters())
    entries, expected = (planned_learner(x, torch.nn.ModuleList([x]), "adam", {}) for x in (policy, plain))
    assert entries == expected
    held = sum(p.nbytes for p in plain)
    assert {entry.key: entry.bytes for entry in entries}.items() >= {"parameters": held, "gradients": held}.items()


def test_the_disk_that_a_storage_in_files_asks_for_is_foretold(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("rlcli.data.files.disk.Disk.require", lambda self, folder, needed: asked.append(needed))
    overrides = ["recipe=dqn_cartpole", "storage=memmap", "storage.max_size=1_000_000", *SMALL["dqn_cartpole"]]
    disk = next(place for place in rlcli.plan([*overrides, *UNTRIED]).places if place.name == "disk")
    rlcli.train([*overrides, *UNTRIED, f"run.dir={tmp_path / 'run'}"])
    assert 16_000_000 < asked[0] <= disk.need < 1.2 * asked[0]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no second disk")
def test_rows_in_a_scratch_folder_are_asked_of_its_own_disk(tmp_path, monkeypatch):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("the second disk is the first")
    overrides = [
        "recipe=dqn_cartpole",
        "storage=memmap",
        "storage.max_size=1_000_000",
        *SMALL["dqn_cartpole"],
        *UNTRIED,
    ]
    monkeypatch.chdir(tmp_path)
    plans = [rlcli.plan([*overrides, *more]) for more in ([], ["storage.scratch_dir=/dev/shm/rows"])]
    one, two = ({place.name: place for place in planned.places} for planned in plans)
    assert "scratch disk" not in one and two["scratch disk"].need > 16_000_000
    assert two["disk"].need + two["scratch disk"].need == one["disk"].need
    assert two["scratch disk"].total == shutil.disk_usage("/dev/shm").total
    cfg = configure("train", [*overrides, "storage.scratch_dir=/dev/shm/rows"])
    full = dataclasses.replace(two["scratch disk"], free=two["scratch disk"].need // 2)
    fitting, elsewhere = advice_for(cfg, dataclasses.replace(plans[1], places=(full,)), work_out)
    assert re.match(r"storage\.max_size=\d+ fits on the scratch disk", fitting)
    assert elsewhere == "storage.scratch_dir=... chooses another disk"


@pytest.mark.parametrize("words", [[], ["memory=full"]])
def test_the_index_of_single_rows_is_foretold(tmp_path, words):
    """In a flat storage every row of several envs is a trajectory of its own: of batches of one step, without ids."""
    overrides = ["recipe=dqn_cartpole", *SMALL["dqn_cartpole"], *UNTRIED, "env.num=4", "collector.frames_per_batch=4"]
    overrides += ["storage.max_size=5000", "total_frames=2000", "optim.updates_per_frame=0.001", *words]
    told = next(e.bytes for e in rlcli.plan(overrides).entries if e.key == "index")
    ledger = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"]).summary["memory"]["entries"]
    held = next(entry["bytes"] for entry in ledger if entry["key"] == "index")
    assert told == pytest.approx(held, rel=0.15)


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65, 1000, 4097])
def test_priorities_are_counted_as_a_sampler_holds_them(rows):
    PrioritizedSampler(rows, 0.6, 0.4, seed=0)  # what the first one imports is not counted
    tracemalloc.start()
    try:
        sampler = PrioritizedSampler(rows, 0.6, 0.4, seed=0)
        held = sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size >= 128)
    finally:
        tracemalloc.stop()
    assert sampler.max_capacity == rows
    assert tree_bytes(rows) <= held <= tree_bytes(rows) + 4096  # beside it: some hundred bytes of other objects


def test_the_priorities_of_a_run_are_in_its_plan_and_in_its_ledger(tmp_path):
    overrides = [
        "recipe=dqn_cartpole",
        "sampler=prioritized",
        "storage.max_size=5000",
        *SMALL["dqn_cartpole"],
        *UNTRIED,
    ]
    planned = rlcli.plan(overrides)
    run = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"])
    for entries in (planned.as_dict()["entries"], run.summary["memory"]["entries"]):
        assert [e["bytes"] for e in entries if e["key"] == "priorities"] == [tree_bytes(5000)]
    plain = rlcli.plan([*overrides, "sampler=random"])
    assert planned.component("buffer") - plain.component("buffer") == tree_bytes(5000)


def worker_processes():
    return set(psutil.Process().children(recursive=True))


@pytest.fixture
def large_env(monkeypatch):
    monkeypatch.setattr(registry, "_users", {kind: dict(names) for kind, names in registry._users.items()})
    rlcli.register_env("large")(LargeEnv)


@pytest.mark.parametrize("words", [[], ["env.id=large"], ["env.id=large", "env.kwargs.helper=true"]])
def test_worker_processes_are_counted_as_they_are_measured(large_env, words):
    overrides = ["total_frames=512", "env.num=6", "env.workers=3", *words]
    planned = rlcli.plan(overrides)
    before = worker_processes()
    env = build_env(configure("train", overrides).env)
    try:
        env.rollout(4)
        made = worker_processes() - before
        workers = [psutil.Process(worker.pid) for worker in env.vec_env.group.workers]
        started = [child for worker in workers for child in worker.children(recursive=True)]
        assert len(workers) == 3 and len(started) == (6 if len(words) == 2 else 0)
        forked_from = {process.parent() for process in workers} - {psutil.Process()}
        held = sum(p.memory_full_info().uss for p in [*workers, *started])
        held += sum(p.memory_info().rss for p in forked_from)
        assert made <= {*workers, *started, *forked_from}
    finally:
        env.close()
    assert planned.workers == pytest.approx(held, rel=0.2)


def test_the_weights_that_workers_act_with_are_counted():
    overrides = ["total_frames=512", "env.num=2", "collector=multi_sync", "collector.num_workers=2"]
    small, large = rlcli.plan(overrides), rlcli.plan([*overrides, "policy.hidden=[1000,1000]"])
    cfg = configure("train", [*overrides, "policy.hidden=[1000,1000]"])
    env = build_env(cfg.env)
    with build_collector(cfg, env, build_policy(cfg, env), None) as collector:
        collector.rollout()
        collector.update_policy_weights_()
        collector.rollout()
        workers = [psutil.Process(worker.pid) for worker in collector.processes.workers]
        held = sum(process.memory_full_info().uss for process in workers)
        held += sum(p.memory_info().rss for p in {process.parent() for process in workers} - {psutil.Process()})
        assert large.workers == pytest.approx(held, rel=0.2)
    more = large.process["weights, for workers"] - small.process["weights, for workers"]
    assert more > 2 * 4 * 1000 * 1000  # two versions at least


def test_the_first_env_of_an_evaluation_is_no_smaller_than_the_next(large_env, monkeypatch):
    from rlcli.planning import envs

    def back(before):  # pages of libraries went back to the system while the first was made
        monkeypatch.setattr(envs, "grown", measure)
        return 0

    measure = envs.grown
    monkeypatch.setattr(envs, "grown", back)
    cfg = configure("train", ["env.id=large", "env.num=2", "env.workers=2", "run.eval_episodes=4", "run.eval_envs=1"])
    assert envs.to_come(envs_of(cfg), reset=True)[envs.EVALUATION] == pytest.approx(40 << 20, rel=0.1)
    assert envs.grown is measure


def test_envs_in_workers_are_not_counted_twice(large_env):
    overrides = ["env.id=large", "total_frames=512", "env.num=4", "run.eval_episodes=0"]
    here, apart = rlcli.plan(overrides), rlcli.plan([*overrides, "env.workers=4"])
    assert here.process["envs"] > 4 * (40 << 20) > 10 * apart.process["envs"]
    assert apart.workers > 4 * (40 << 20) and apart.env_bytes == pytest.approx(40 << 20, rel=0.1)


@pytest.mark.parametrize("words", [[], ["env.workers=2"]])
def test_a_run_foretells_the_envs_of_its_evaluation_and_its_workers_as_its_plan_does(large_env, tmp_path, words):
    def run(episodes):
        gc.collect()  # the envs of a run before
        overrides = [*words, f"run.eval_episodes={episodes}", f"run.dir={tmp_path / str(episodes)}"]
        overrides += evaluated if episodes else []
        return rlcli.train([*small, *overrides]).summary["memory"]["process"]

    small = ["env.id=large", "total_frames=256", "collector.frames_per_batch=256", "env.num=2", *QUIET]
    evaluated = ["run.eval_envs=4", "run.eval_every=256"]  # while the run's own are there
    left = [np.ones(1000) for _ in range(12_000)]
    left = left[-1:]  # it keeps the memory of the others from going back to the system before the first run
    without, whole, planned = run(0), run(4), rlcli.plan([*small, *words, *evaluated, "run.eval_episodes=4"])
    assert len(left) == 1
    here = 0 if words else 4 * (40 << 20)
    assert whole["planned"] - without["planned"] == pytest.approx(here, rel=0.1, abs=4 << 20)
    assert planned.process["evaluation envs"] == pytest.approx(here, rel=0.1)
    assert not words or planned.workers > rlcli.plan([*small, *words, "run.eval_episodes=0"]).workers + 4 * (40 << 20)
    assert whole.get("workers", 0) == pytest.approx(planned.workers, rel=0.2)
    assert ("worker processes" in (tmp_path / "4" / "report.md").read_text()) == bool(words)


class CollectedEnv(LargeEnv):
    """Its constructor makes so many objects that garbage is collected, that of others too."""

    def __init__(self):
        super().__init__()
        self.made = [[number] for number in range(10 * gc.get_threshold()[0])]


@pytest.mark.parametrize(("words", "lanes"), [([], 4), (["env.workers=2"], 1)])
def test_what_an_earlier_run_left_does_not_lessen_what_envs_take(large_env, words, lanes):
    rlcli.register_env("collected")(CollectedEnv)
    evaluated = ["run.eval_episodes=4", f"run.eval_envs={lanes}", "run.eval_every=256"]
    cfg = configure("train", ["env.id=collected", "env.num=2", *evaluated, *words])
    to_come(envs_of(cfg), reset=True)  # imports what it needs
    gc.collect()
    left = [LargeEnv(), LargeEnv(), LargeEnv(), LargeEnv()]
    left.append(left)  # a circle
    del left
    assert to_come(envs_of(cfg), reset=True)[EVALUATION] == pytest.approx(lanes * (40 << 20), rel=0.1)
    assert gc.isenabled()


def test_memory_that_was_freed_before_does_not_hide_what_envs_take(large_env):
    cfg = configure("train", ["env.id=large", "env.num=2"])
    one_more(envs_of(cfg))  # imports what it needs
    left = [np.ones(1000) for _ in range(12_000)]
    left = left[-1:]  # it keeps the memory of the others from going back to the system
    assert one_more(envs_of(cfg)).each == pytest.approx(40 << 20, rel=0.1) and len(left) == 1


def test_half_the_workers_save_what_a_worker_takes_without_its_envs():
    overrides = ["total_frames=512", "env.num=6", "env.workers=3"]
    planned = rlcli.plan(overrides)
    ram = next(place for place in planned.places if place.name == "RAM")
    assert ram.need == planned.total + planned.workers
    assert rlcli.plan(overrides[:2]).workers == 0
    fewer = rlcli.plan([*overrides[:2], "env.workers=1"])
    tight = dataclasses.replace(planned, places=[dataclasses.replace(ram, free=ram.need - planned.worker)])
    line = advice_for(configure("train", overrides), tight, work_out)[0]
    assert line.startswith("env.workers=1 saves ") and "not enough" not in line
    assert 2 * planned.worker == pytest.approx(planned.workers - fewer.workers, rel=0.2)


# ---- in a process of its own: tests before leave memory that is freed at any time, and that would hold envs ----------
MANY = {"serial": 1_000, "native": 20_000}


def many(mode: str) -> list[str]:
    return [f"env.num={MANY[mode]}", f"env.mode={mode}", f"total_frames={MANY[mode]}", "run.eval_episodes=0"]


MEASURED = """
import json
import mmap
import os
import sys

import psutil
import rlcli
from large_env import LargeEnv
from rlcli.build.env import build_env
from rlcli.build.workload import envs_of
from rlcli.config.compose import configure
from rlcli.planning.envs import one_more
from rlcli.processes.memory import process_memory

kept = []
for words in json.loads(sys.argv[2]):
    planned = rlcli.plan(words)
    before = process_memory()[0]
    kept.append(build_env(configure("train", words).env))
    kept[-1].reset()
    print(planned.env_bytes, process_memory()[0] - before)

rlcli.register_env("large")(LargeEnv)
envs, made = envs_of(configure("train", ["env.id=large", "env.num=2"])), LargeEnv.__init__

def taken(meanwhile):
    LargeEnv.__init__ = lambda env: made(env) or meanwhile()
    print(one_more(envs).each)

left = [LargeEnv(), LargeEnv()]  # memory that others free
taken(left.clear)
if hasattr(os, "posix_fadvise"):  # pages of files that the system takes back
    with open(sys.argv[1], "rb") as file:
        library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert sum(library[:: mmap.PAGESIZE]) == 0  # its pages are here
    rss = psutil.Process().memory_info().rss
    taken(lambda: library.madvise(mmap.MADV_DONTNEED))
    assert psutil.Process().memory_info().rss < rss
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """For each of MANY: what was planned for one, what all take; what one takes while other memory is freed."""
    # the first process of a new checkout compiles kernels, and what that frees would hold envs
    overrides = ["env.num=1", "env.mode=serial", "total_frames=64", "run.eval_episodes=0"]
    rlcli.plan(overrides)
    build_env(configure("train", overrides).env).reset()
    library = tmp_path_factory.mktemp("library") / "library"
    library.write_bytes(bytes(100 << 20))
    program = [sys.executable, "-c", MEASURED, library, json.dumps([many(mode) for mode in MANY])]
    answer = subprocess.run(program, capture_output=True, text=True, cwd=os.path.dirname(__file__))
    assert answer.returncode == 0, answer.stderr
    lines = [list(map(int, line.split())) for line in answer.stdout.splitlines()]
    return dict(zip(MANY, lines, strict=False)), lines[len(MANY) :]


def test_what_goes_meanwhile_does_not_hide_what_envs_take(measured):
    _, meanwhile = measured
    assert meanwhile
    for (each,) in meanwhile:
        assert each == pytest.approx(40 << 20, rel=0.1)


@pytest.mark.parametrize("mode", MANY)
def test_very_many_envs_are_planned_as_they_are_measured_and_the_advice_names_them(mode, measured):
    overrides, count = many(mode), MANY[mode]
    each, held = measured[0][mode]
    drawn = drawn_ahead(1)
    assert each - drawn == pytest.approx(held / count, rel=0.3)

    planned = dataclasses.replace(rlcli.plan(overrides), env_bytes=each)
    assert planned.process["random numbers, drawn ahead"] == count * drawn
    ram = next(place for place in planned.places if place.name == "RAM")
    tight = dataclasses.replace(planned, places=[dataclasses.replace(ram, free=ram.need - held // 2)])

    def again(cfg):  # as if measured in that process
        fewer = ram.need - each * (count - cfg.env.num)
        return dataclasses.replace(planned, places=[dataclasses.replace(ram, need=fewer)])

    advice = advice_for(configure("train", overrides), tight, again)
    assert advice[0].startswith("env.num=") and "not enough" not in advice[0]
    assert not any(" saves 0 B" in line for line in advice)


@pytest.mark.parametrize("size", [5_000_000_000, 50_000_000_000])
def test_a_size_that_is_said_to_fit_on_the_disk_does(tmp_path, monkeypatch, size):
    words = ["recipe=dqn_cartpole", "storage=memmap", "total_frames=100_000", f"run.dir={tmp_path / 'run'}"]
    disk = next(place for place in rlcli.plan([*words, f"storage.max_size={size}"]).places if place.name == "disk")
    free = disk.need // 3
    monkeypatch.setattr("rlcli.planning.fit.free_memory", lambda: (1 << 50, 1 << 50))
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 50, 0, free))
    line, *_ = rlcli.plan([*words, f"storage.max_size={size}"]).advice
    fitting = re.match(r"(storage\.max_size=\d+) fits on the disk", line)[1]
    again = next(place for place in rlcli.plan([*words, fitting]).places if place.name == "disk")
    assert free / 2 < again.need <= free


# ---- advice, as it is followed ---------------------------------------------------------------------------------------
Usage = namedtuple("Usage", "total used free")
SLICES = [
    "recipe=ppo_exact", "storage=tensor", "storage.max_size=100_000", "total_frames=100_000", "sampler=slice",
    "sampler.batch_size=65536",
]  # fmt: skip
SEQUENCES = [  # of 1024 steps
    "env.id=Pendulum-v1", "env.num=8", "collector.frames_per_batch=8192", "total_frames=16384", "policy=gru",
    "policy.recurrent_size=256",
]  # fmt: skip
BUFFERED = ["recipe=dqn_cartpole", "storage.max_size=300_000_000", "total_frames=300_000_000"]


def chosen(plan):
    """Bytes of RAM that follow from the options. The system may take pages of libraries back between two plans."""
    return plan.places[0].need - plan.process["after imports"] - plan.process["compiler and kernels"]


def saved_by(line):
    number, unit = re.search(r"saves ([\d.]+) ([KMG]i)?B", line).groups()
    return float(number) * {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}[unit]


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (0.5, BUFFERED),
        (0.5, [*BUFFERED, "memory=full"]),
        (0.5, ["recipe=sac_pendulum", "memory=full", *BUFFERED[1:]]),
        (0.98, [*BUFFERED, "sampler=prioritized"]),
        (0.8, ["recipe=ppo_full", "env.num=64", "collector.frames_per_batch=65536"]),
        (0.7, [*SLICES, "sampler.num_slices=2048", "sampler.slice_len=32"]),
        (0.7, [*SLICES, "sampler.num_slices=2048", "sampler.slice_len=null"]),
        (0.7, [*SLICES, "sampler.num_slices=null", "sampler.slice_len=32"]),
        (0.8, ["recipe=ppo_multi", "collector.num_workers=4"]),
        (0.9, [*SEQUENCES, "sampler.batch_size=64"]),
        (0.9, [*SEQUENCES, "sampler.batch_size=1024"]),
    ],
)
@pytest.mark.every(3)
def test_advice_for_ram_is_taken_and_saves_what_it_says(monkeypatch, free, words):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 50, 0, 1 << 50))
    before = rlcli.plan([*words, *QUIET])
    needed = before.places[0].need
    there = int(needed - (1 - free) * chosen(before))  # whatever this process holds of earlier tests
    monkeypatch.setattr("rlcli.planning.fit.free_memory", lambda: (there, needed))
    planned = rlcli.plan([*words, *QUIET])
    over, keys = planned.places[0].need - planned.places[0].free, []
    for line in planned.advice:
        overrides = line.partition(" saves ")[0].split()
        again = rlcli.plan([*words, *QUIET, *overrides])  # is not refused
        saved = chosen(planned) - chosen(again)
        assert saved == pytest.approx(saved_by(line), rel=0.06, abs=SPREAD), line
        assert saved_by(line) > over / 25 and ("not enough" in line) == (saved_by(line) < 0.95 * over), line
        assert all(place.fits for place in again.places[1:])
        keys.append(" ".join(override.partition("=")[0] for override in overrides))
    assert len(set(keys)) == len(keys) > 0
    if "memory=full" in words:
        (line,) = (line for line in planned.advice if line.startswith("memory="))
        assert saved_by(line) > 3 << 30
    if words[:-1] == SEQUENCES:  # longer than half a minibatch: fewer rows alone would change nothing
        assert any(key.startswith("sampler.slice_len") for key in keys)


def test_where_nothing_saves_much_the_most_is_said():
    words = ["recipe=ppo_full", "collector.frames_per_batch=100_000", *QUIET]
    planned = rlcli.plan(words)
    ram = next(each for each in planned.places if each.name == "RAM")
    far = dataclasses.replace(planned, places=[dataclasses.replace(ram, need=ram.need + (1 << 40), free=ram.need)])

    def again(cfg):
        rows = cfg.collector.frames_per_batch
        return dataclasses.replace(
            far, places=[dataclasses.replace(far.places[0], need=far.places[0].need + rows - 100_000)]
        )

    (line,) = advice_for(configure("train", words), far, again)
    assert line.startswith("collector.frames_per_batch=") and line.endswith("not enough alone: 1.0 TiB are missing")


@pytest.mark.parametrize(
    ("free", "verb", "words", "keys"),
    [
        (1 << 30, "train", BUFFERED, ["storage.max_size", "run.dir"]),
        (1 << 30, "train", [*BUFFERED, "storage=memmap", "sampler=prioritized"], ["storage.max_size", "run.dir"]),
        (30 << 30, "train", [*BUFFERED, "run.keep=9"], ["storage.max_size", "run.keep", "run.dir"]),
        (20_000, "train", BUFFERED, ["run.dir"]),
        (0, "train", BUFFERED, ["run.dir"]),
        (20_000, "train", ["recipe=ppo_exact"], ["run.dir"]),
        (0, "collect", ["recipe=collect_random"], ["run.dir"]),
        (1 << 20, "collect", ["recipe=collect_random"], ["total_frames", "run.dir"]),
    ],
)
@pytest.mark.every(2)
def test_advice_for_a_disk_is_taken_and_fits(monkeypatch, free, verb, words, keys):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 40, 0, free))
    advice = rlcli.plan([*words, *QUIET], verb=verb).advice
    assert [line.partition("=")[0] for line in advice] == keys
    for line in advice[:-1]:
        (disk,) = rlcli.plan([*words, *QUIET, line.split()[0]], verb=verb).places[1:]
        assert disk.need <= free


def test_advice_that_changes_no_update_tries_it_once(monkeypatch):
    from rlcli.planning import forecast

    tried, update_peak = [], forecast.update_peak
    monkeypatch.setattr(forecast, "update_peak", lambda *args: tried.append(args) or update_peak(*args))
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 40, 0, 1 << 30))
    planned = rlcli.plan([*BUFFERED, *QUIET])
    assert len(planned.advice) == 2 and len(tried) == 1


def test_what_lies_on_another_disk_does_not_count_for_that_of_the_run(tmp_path):
    words = [*BUFFERED, "storage=memmap", f"storage.scratch_dir={tmp_path}", *QUIET]
    two = MemoryFit("disk", 10 << 30, 1 << 30, 1 << 40), MemoryFit("scratch disk", 1 << 40, 1 << 50, 1 << 60)
    planned = rlcli.plan(words)

    def again(cfg):  # a tenth of the rows takes a tenth of the disks
        share = cfg.storage.max_size / 300_000_000
        return dataclasses.replace(planned, places=[dataclasses.replace(p, need=int(p.need * share)) for p in two])

    fitting, _ = advice_for(configure("train", words), dataclasses.replace(planned, places=two), again)
    assert fitting == "storage.max_size=30000000 fits on the disk"


@pytest.mark.parametrize("words", [["env.num=4", "collector.frames_per_batch=16"], ["collector.frames_per_batch=800"]])
def test_the_disk_that_frames_take_is_foretold_with_what_is_written_beside_them(tmp_path, words):
    words = ["recipe=collect_random", "total_frames=4000", "console=off", *words]
    disk = next(place for place in rlcli.plan(words, verb="collect").places if place.name == "disk")
    folder = rlcli.collect([*words, f"run.dir={tmp_path / 'run'}"]).path
    held = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    assert held <= disk.need * 1.05 and disk.need < 2 * held
