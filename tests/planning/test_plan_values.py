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
from rlcli.collectors.actors import on_device
from rlcli.collectors.schema import RowSchema
from rlcli.data.buffer.replay_buffer import ReplayBuffer
from rlcli.data.storages import LazyTensorStorage
from rlcli.graphs import host
from rlcli.modules import MLP
from rlcli.objectives.value import GAE
from rlcli.objectives.value.captured import CapturedValues
from rlcli.planning import fit
from rlcli.planning.forecast import rows_at_once, stage_peak, tensors_of
from rlcli.planning.tensors import trial_batch
from rlcli.report.peaks import LargestPeak, LiveBytes
from rlcli.specs.field import OWN
from tests.graphs.standin import StandIn, act_elsewhere

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


class Forecast:
    """What `tensors_of` says of a run, were it on a GPU."""

    def __init__(self, overrides, **there):
        self.cfg = configure("train", [*overrides, *QUIET])
        self.env = still(self.cfg)
        self.policy = build_policy(self.cfg, self.env)
        self.learning, keep = learning_of(self.cfg, self.env, self.policy)
        self.collector = build_collector(self.cfg, self.env, self.policy, keep)
        run = workload_of(self.cfg, self.collector.rows())
        updates = {name: there.pop(name) for name in ("graphs", "together") if name in there}
        updates |= {"device": there.pop("learning", "cpu")}
        self.run = dataclasses.replace(run, updates=dataclasses.replace(run.updates, **updates), **there)
        self.rows, self.entries, self.peaks = tensors_of(self.run, self.collector, self.learning)

    @property
    def graphs(self):
        return {entry.key: entry.bytes for entry in self.entries if entry.component == "graphs"}


GPU, POOL = "cuda:0", "what the largest of them makes"
ON_GPU = {"device": GPU, "acting": GPU, "learning": GPU}


def test_a_graph_keeps_a_minibatch_and_all_share_what_they_make(monkeypatch):
    """Beside what plain calls take, and CUDA's context, and a workspace of each of two streams."""
    made = ["recipe=ppo_exact"]
    assert Forecast(made).graphs == Forecast(made, learning=GPU, graphs=False).graphs == {}
    there = Forecast(made, learning=GPU)
    kept, size = there.graphs, there.cfg.sampler.batch_size
    assert size * 20 < kept["a minibatch"] < size * 100 and "rows to act on" not in kept
    most = max(peak.bytes for peak in there.peaks)
    assert most <= kept[POOL] < most + there.rows.frames * 20
    plan = rlcli.plan(made)
    pools = [entry for entry in there.entries if entry.component == "graphs"]
    assert {pool.device for pool in pools} == {GPU}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 32 << 20)
    place = fit.places_of(there.run, dataclasses.replace(plan, entries=pools, peaks=[]))[-1]
    assert place.name == GPU and place.need == fit.GPU_PROCESS + (64 << 20) + sum(kept.values())
    assert place.free == (70 << 30) + fit.GPU_PROCESS + (32 << 20)


SMALL = ["collector.frames_per_batch=64", "env.num=4", "total_frames=256", "sampler.batch_size=32"]
STAYS = {"storing": torch.device("cpu"), "storing_is_elsewhere": True}


@pytest.mark.parametrize("recipe", ["ppo_exact", "ppo_pong"])
@pytest.mark.parametrize("stays", [{}, STAYS], ids=["sent again", "stays"])
def test_a_graph_that_acts_keeps_the_rows_of_a_step_and_of_a_batch_that_is_to_lie_there(recipe, stays, monkeypatch):
    overrides = [f"recipe={recipe}", *SMALL]
    told = Forecast(overrides, acting=GPU, device=GPU if stays else "cpu")
    act_elsewhere(monkeypatch, **stays)
    made = Forecast(overrides)  # nothing of it has been asked for its devices before
    with made.collector as collector:
        collector.next()
        acting = collector._engine.actor.on_device
    acting._kept = acting._kept.clone()  # made in the loop, in inference mode
    with torch.no_grad(), LiveBytes(device=GPU) as measured:
        acting._step()
    given, steps = acting._given.there, len(acting._kept)
    assert steps == (told.rows.steps if stays else 0)
    rows = (steps + 1) * sum(x.nbytes for key, x in given.items() if key != on_device._STEP)
    assert told.graphs["rows to act on"] == rows
    assert 0 <= acting._kept.nbytes + acting._given.block.nbytes - rows <= (steps + 1) * 64 * len(given)
    assert measured.peak <= told.graphs[POOL]
    if recipe == "ppo_pong":
        assert measured.peak == pytest.approx(told.graphs[POOL], rel=0.02)


@pytest.mark.parametrize(
    "more", ["memory=exact", "memory=full", "memory=compact", "value.shifted=true", "policy=gru", "memory=delta"]
)
def test_a_graph_of_the_value_stage_keeps_what_it_reads_and_what_it_gives(more, monkeypatch):
    overrides = [*SMALL, "env.id=MountainCar-v0", "value.backend=reference", more]  # no episode ends in so few steps
    told = Forecast(overrides, learning=GPU).graphs.get("a batch to value, and what that gives", 0)
    made = Forecast(overrides)
    with made.collector as collector:
        batches = [collector.next() for _ in range(4)]
    monkeypatch.setattr(host, "may_ask", lambda x: False)
    captured = CapturedValues(made.learning.estimator, StandIn.record)
    for batch in batches:
        captured(batch)
    stages = [*captured._of.values()]
    assert len(stages) == (more not in ("policy=gru", "memory=delta")) and all(x.captured.proven for x in stages)
    held = [x for stage in stages for x in (*stage.columns.values(), *stage.index, *stage.out.values())]
    held += [extra for stage in stages for _, extra in stage.extra.values()]
    held += [x for stage in stages for x in stage.counts.values() if isinstance(x, torch.Tensor)]
    # beside flags of a byte a row: where the host may not ask what is unknown, the stage writes some more
    assert 0 <= sum(x.nbytes for x in held) - told <= 3 * made.rows.frames


@pytest.mark.parametrize("frames, count", [(1, 1), (5, 5), (32, 8)])
def test_samples_that_are_read_as_one_are_held_as_one(frames, count, monkeypatch):
    overrides = ["recipe=dqn_cartpole", "env.num=1", f"collector.frames_per_batch={frames}"]
    told = Forecast(overrides, learning=GPU, together=1.0)
    (planned,) = (entry.bytes for entry in told.entries if entry.component == "sample")
    monkeypatch.setattr(host, "is_elsewhere", lambda device: True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(512), batch_size=told.cfg.sampler.batch_size)
    rows = dataclasses.replace(told.rows, steps=256)
    buffer.extend(trial_batch(rows, "full", device=torch.device("cpu")).reshape(-1))
    sample = next(buffer.samples(frames))
    columns = told.learning.loss.columns(sample)
    (held,) = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in columns.values()}.values()
    assert planned == count * sum(x.nbytes for x in columns.values()) == pytest.approx(held, rel=0.05)
