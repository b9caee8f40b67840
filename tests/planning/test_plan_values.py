"""What a plan says that the value stage holds for a moment is what is measured, however values are computed."""

import dataclasses

import pytest
import torch
from face import Field, build_collector, build_policy, configure
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import rlcli
from rlcli.build.pace import still
from rlcli.build.plan import learning_of
from rlcli.build.workload import workload_of
from rlcli.collectors.schema import RowSchema
from rlcli.modules import MLP
from rlcli.objectives.value import GAE
from rlcli.planning import fit
from rlcli.planning.forecast import rows_at_once, stage_peak, tensors_of
from rlcli.report.peaks import LargestPeak
from rlcli.specs.field import OWN

CARTPOLE = ["total_frames=1024", "collector.frames_per_batch=1024", "env.num=8", "optim.epochs=1"]
PONG = ["recipe=ppo_pong", "total_frames=32", "collector.frames_per_batch=32", "env.num=2", "sampler.batch_size=16"]
QUIET = ["console=off", "run.eval_episodes=0", "logger=none"]
LANES, STEPS, WIDE = 6, 16, 5


@pytest.mark.parametrize(
    "extra",
    [
        ["memory=full"],
        ["memory=exact", "value.two_calls=true"],
        ["memory=exact", "value.num_chunks=8"],
        ["memory=exact", "value.shifted=true", "value.shifted_budget=4"],
        ["memory=compact", "value.shifted=true", "value.num_chunks=4"],
        ["memory=compact", "value=vtrace"],
        ["memory=delta", "memory.on_overflow=keep", "value.normaliser=popart"],
        ["memory=exact", "loss=a2c", "value=td0", "policy.shared=true"],
        ["memory=exact", "loss=ppo_kl", "value=td_lambda", "value.value_chunk_size=3"],
        ["memory=exact", "value.compute_dtype=bfloat16", "value.num_chunks=2"],
        ["memory=compact", "loss=reinforce", "value=td1", "loss.baseline=false"],
        [*PONG, "optim.epochs=1", "memory=exact", "value.shifted=true", "value.num_chunks=2"],
        [*PONG, "optim.epochs=1", "memory=exact", "value.compute_dtype=bfloat16"],
    ],
)
@pytest.mark.every(3)
def test_the_plan_says_what_is_measured(extra, tmp_path):
    overrides = [*([] if "recipe=ppo_pong" in extra else CARTPOLE), *extra, *QUIET]
    run = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"])
    seen = run.summary["memory"]["value_stage"]
    assert seen["measured"] == pytest.approx(seen["planned"], rel=0.02, abs=64)


def test_a_plan_and_the_run_say_the_same(tmp_path):
    overrides = [*CARTPOLE, "memory=exact", "value.num_chunks=3", *QUIET]
    planned = next(peak for peak in rlcli.plan(overrides).peaks if peak.stage == "values")
    run = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"])
    assert not planned.unknown and run.summary["memory"]["value_stage"]["planned"] == planned.bytes > 0


def test_every_truncation_in_a_batch_keeps_the_plan_near(tmp_path):
    overrides = [*CARTPOLE, "memory=exact", "env.max_episode_steps=9", "value.shifted=true", "value.shifted_budget=9"]
    run = rlcli.train([*overrides, *QUIET, f"run.dir={tmp_path / 'run'}"])
    seen, summary = run.summary["memory"]["value_stage"], run.summary
    assert summary["dropped"] > 0 == summary["approximated"]
    assert seen["measured"] == pytest.approx(seen["planned"], rel=0.05)


def test_strict_slices_are_planned_as_they_are_drawn(tmp_path):
    overrides = [
        "recipe=recipe_b",
        "total_frames=1024",
        "sampler.strict_length=true",
        "env.id=MountainCar-v0",  # its episodes are longer than a slice
        "sampler.span=false",
        "optim.epochs=1",
        *QUIET,
    ]
    seen = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"]).summary["memory"]["value_stage"]
    assert seen["measured"] == pytest.approx(seen["planned"], rel=0.02)


def test_whole_slices_are_what_the_plan_allows_for(tmp_path):
    overrides = ["recipe=recipe_a", "total_frames=1024", "optim.epochs=1", *QUIET]
    seen = rlcli.train([*overrides, f"run.dir={tmp_path / 'run'}"]).summary["memory"]["value_stage"]
    assert 0 < seen["measured"] <= seen["planned"]


class Recurrent(nn.Module):
    """A sum that starts anew where a trajectory does."""

    in_keys = ("observation", "is_init")
    out_keys = ("state_value",)
    recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDE, 32)

    def forward(self, td):
        x, start = self.net(td["observation"]), td["is_init"]
        states = [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(torch.where(start[:, t], x[:, t], torch.tanh(states[-1] + x[:, t])))
        return td.set("state_value", torch.stack(states, 1).mean(-1, keepdim=True))


def _rows():
    one = torch.Size((1,))
    flags = {("next", name): Field(one, torch.bool) for name in ("done", "terminated")}
    observation = Field((WIDE,), torch.float32, next=OWN)
    fields = {
        "observation": observation,
        "is_init": Field(one, torch.bool),
        ("next", "reward"): Field(one, torch.float32),
    }
    return RowSchema(LANES, fields | flags, steps=STEPS)


def _batch(rows):
    shape = (rows.lanes, rows.steps)
    batch = TensorDict({}, shape)
    for key, field in {**rows.fields, **rows.successors}.items():
        batch.set(key, torch.zeros(*shape, *field.shape, dtype=field.dtype))
    batch["is_init"][:, 0] = True
    return batch


@pytest.mark.parametrize("options", [{}, {"num_chunks": 3}, {"shifted": True, "shifted_budget": 2}])
@pytest.mark.parametrize("recurrent", [False, True])
def test_recurrent_networks_are_counted_by_sequences(options, recurrent):
    net = Recurrent() if recurrent else TensorDictModule(MLP(WIDE, 1, [32]), ["observation"], ["state_value"])
    estimator, rows = GAE(gamma=0.9, lmbda=0.9, value_network=net, **options), _rows()
    estimator(_batch(rows))  # kernels are loaded
    batch, measured = _batch(rows), LargestPeak()
    with measured.of(LANES * STEPS):
        estimator(batch)
    assert measured.bytes == pytest.approx(stage_peak(estimator, rows, "full").bytes, rel=0.02)


def test_rows_of_one_call():
    net = TensorDictModule(MLP(WIDE, 1, [4]), ["observation"], ["state_value"])

    def at_once(flat=False, **options):
        return rows_at_once(GAE(gamma=0.9, lmbda=0.9, value_network=net, **options), _rows(), flat)

    assert at_once() == LANES * STEPS
    assert at_once(shifted=True, shifted_budget=2) == LANES * (STEPS + 2)
    assert at_once(num_chunks=4) == LANES * STEPS // 4 and at_once(value_chunk_size=4) == 4 * STEPS
    assert at_once(flat=True, num_chunks=4) == LANES * STEPS // 4


def test_convolutions_of_a_value_stage_hold_more_on_a_gpu():
    cfg = configure("train", [*PONG, "collector.frames_per_batch=1024", "env.num=8"])
    env = still(cfg)
    policy = build_policy(cfg, env)
    learning, keep = learning_of(cfg, env, policy)
    rows = build_collector(cfg, env, policy, keep).rows(8, 128)
    here, there = (stage_peak(learning.estimator, rows, "exact", device=device).bytes for device in ("cpu", "cuda:0"))
    assert there / here == pytest.approx(1.45, abs=0.01), "as it was measured on an H100"


def test_a_graph_keeps_a_minibatch_and_what_a_step_makes(monkeypatch):
    """Beside what plain calls take, and CUDA's context, and a workspace of each of two streams."""
    cfg = configure("train", ["recipe=ppo_exact"])
    env = still(cfg)
    policy = build_policy(cfg, env)
    learning, keep = learning_of(cfg, env, policy)
    collector = build_collector(cfg, env, policy, keep)
    run = workload_of(cfg)

    def planned(device, graphs=True):
        there = dataclasses.replace(run, updates=dataclasses.replace(run.updates, device=device, graphs=graphs))
        _, entries, peaks = tensors_of(there, collector, learning)
        update = next(peak for peak in peaks if peak.stage == "update")
        return [entry for entry in entries if entry.component == "graphs"], update.bytes

    assert planned("cpu")[0] == planned("cuda:0", graphs=False)[0] == []
    (pool,), step = planned("cuda:0")
    rows = cfg.sampler.batch_size
    assert pool.device == "cuda:0" and step + rows * 20 < pool.bytes < step + rows * 100
    plan = rlcli.plan(["recipe=ppo_exact"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 32 << 20)
    place = fit.places_of(run, dataclasses.replace(plan, entries=[pool], peaks=[]))[-1]
    assert place.name == "cuda:0" and place.need == fit.GPU_PROCESS + (64 << 20) + pool.bytes
    assert place.free == (70 << 30) + fit.GPU_PROCESS + (32 << 20)
