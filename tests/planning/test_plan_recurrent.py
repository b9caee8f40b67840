"""What a plan says of recurrent policies is what their runs hold, whatever cell, layers, stride and backend."""

import pytest
import torch
from face import Update
from tensordict import TensorDict

import rlcli
from rlcli.keys import IS_INIT
from rlcli.learning.minibatches import shuffled_sequences, whole_sequences
from rlcli.modules import GRUModule, set_recurrent_mode
from rlcli.modules.recurrent.sequences import sequences
from rlcli.planning.forecast import Answers
from rlcli.report.peaks import LiveBytes

QUIET = ["console=off", "run.eval_episodes=0", "logger=none"]
# no episode ends inside a batch: they are 200 steps long
BATCHES = [
    "env.id=Pendulum-v1", "env.num=8", "total_frames=512", "collector.frames_per_batch=512", "optim.epochs=1",
    "sampler.batch_size=256",
]  # fmt: skip
SLICES = [*BATCHES[:2], "total_frames=1536", *BATCHES[3:], "storage=tensor", "sampler=slice", "sampler.slice_len=16"]
DQN = [
    "recipe=dqn_recurrent", "env.id=MountainCar-v0", "env.wrappers=[]", "total_frames=1024",
    "collector.init_random_frames=512", "storage.max_size=4000", "sampler.span=false", "optim.updates_per_frame=0.05",
]  # fmt: skip
UNITS, GATES = 64, 4  # floats of a unit and step that are kept without recompute: three gates of a GRU and what r
# multiplies, four gates of an LSTM


def planned_and_run(words, tmp_path):
    words = [*words, *QUIET]
    planned = rlcli.plan(words)
    return planned, rlcli.train([*words, f"run.dir={tmp_path / 'run'}"]).summary["memory"]


def stage(planned, name):
    (peak,) = (peak for peak in planned.peaks if peak.stage == name)
    assert not peak.unknown
    return peak


@pytest.mark.parametrize(
    "words",
    [
        [*BATCHES, "policy=gru"],
        [*BATCHES, "policy=gru", "policy.recurrent_layers=2", "memory.recurrent_recompute=true"],
        [*BATCHES, "policy=lstm", "memory=compact", "memory.recurrent_state_stride=1"],
        [*BATCHES, "policy=lstm", "policy.recurrent_layers=3", "memory.recurrent_recompute=true", "threads=2"],
        # step by step: half as many
        [
            *BATCHES, "policy=gru", "policy.recurrent_backend=reference", "memory.recurrent_state_stride=4",
            "total_frames=256", "collector.frames_per_batch=256",
        ],
        [*BATCHES, "policy=lstm", "policy.recurrent_backend=scan", "memory=delta", "value.num_chunks=2"],
        [*SLICES, "policy=gru"],
    ],
)  # fmt: skip
@pytest.mark.every(2)
def test_stages_hold_what_the_plan_says(words, tmp_path):
    planned, memory = planned_and_run(words, tmp_path)
    values, update = stage(planned, "values"), stage(planned, "update")
    assert memory["value_stage"]["planned"] == values.bytes, "asked before or at the start"
    assert memory["value_stage"]["measured"] == pytest.approx(values.bytes, rel=0.005)
    assert memory["backward"]["measured"] == memory["backward"]["planned"] == update.saved > 0


@pytest.mark.parametrize(("cell", "layers"), [("gru", 1), ("lstm", 3)])
def test_plan_and_run_show_what_recompute_saves(cell, layers, tmp_path):
    words = [*BATCHES, f"policy={cell}", f"policy.recurrent_size={UNITS}", f"policy.recurrent_layers={layers}"]
    planned, memory = planned_and_run(words, tmp_path / "kept")
    few, less = planned_and_run([*words, "memory.recurrent_recompute=true"], tmp_path / "again")
    of_gates = 256 * layers * GATES * UNITS * 4
    assert stage(planned, "update").spared == stage(few, "update").spared == of_gates
    assert memory["backward"]["measured"] - less["backward"]["measured"] == of_gates == less["backward"]["saved"]
    assert "saved" not in memory["backward"]
    (line,) = (
        x for x in (tmp_path / "again" / "run" / "report.md").read_text().splitlines() if "recurrent activations |" in x
    )
    assert line.split("|")[-2].strip() == f"{of_gates >> 10} KiB"


def test_a_plan_prints_what_is_saved_for_the_backward_pass(capsys):
    from rlcli.planning.plan import show_plan

    show_plan(rlcli.plan([*BATCHES, "policy=gru", *QUIET]))
    printed = capsys.readouterr().out
    (spared,) = (line.split()[-2:] for line in printed.splitlines() if "memory.recurrent_recompute" in line)
    assert spared == ["256", "KiB"] and "recurrent activations" in printed
    assert "without episode ends; with some, they need more" in printed
    show_plan(rlcli.plan([*BATCHES, *QUIET]))
    assert "recurrent" not in capsys.readouterr().out


@pytest.fixture
def updates(monkeypatch):
    """Bytes that each update held, by its rows; the first one makes the optimizer's state as well."""
    held, on = [], Update.on

    def measured(self, minibatch):
        with LiveBytes() as live:
            errors = on(self, minibatch)
        held.append((next(iter(minibatch.values())).shape[0], live.peak))
        return errors

    monkeypatch.setattr(Update, "on", measured)
    return held


@pytest.mark.parametrize(
    "words",
    [
        [*BATCHES, "policy=gru"],
        [*BATCHES, "policy=lstm", "policy.recurrent_layers=2", "memory.recurrent_recompute=true"],
        # whole sequences, of 128 steps
        [
            *BATCHES[:1],
            "env.num=2",
            "collector.frames_per_batch=256",
            "total_frames=256",
            "policy=gru",
            "sampler.batch_size=64",
        ],
        [*BATCHES, "policy=gru", "sampler.slice_len=16"],
        [*BATCHES, "policy=lstm", "sampler.slice_len=32", "sampler.batch_size=120", "memory.recurrent_state_stride=1"],
        [*SLICES, "policy=gru"],
        [*DQN, "sampler.burn_in=0"],
        DQN,
        [*DQN, "sampler.burn_in=0", "policy=lstm", "policy.recurrent_backend=reference"],
    ],
)
@pytest.mark.every(3)
def test_an_update_holds_what_the_plan_says(words, updates, tmp_path):
    planned, memory = planned_and_run(words, tmp_path)
    update = stage(planned, "update")
    rows, held = max(updates[1:])
    assert rows == update.rows
    assert held == pytest.approx(update.bytes, rel=0.01)
    assert memory["backward"]["measured"] == update.saved


def test_the_sample_of_slices_has_a_state_in_every_row(tmp_path):
    few, all_ = ([*SLICES, "policy=gru", f"memory.recurrent_state_stride={stride}", *QUIET] for stride in (8, 1))
    (sample,) = (entry for entry in rlcli.plan(all_).entries if entry.component == "sample")
    (longer,) = (entry for entry in rlcli.plan(few).entries if entry.component == "sample")
    row = sample.bytes // 256
    assert row > 4 * UNITS
    assert longer.key.endswith("at most") and longer.bytes == (256 + 16 * 7) * row


def test_what_is_counted_as_another_backend_is_said_to_be_about_right(tmp_path):
    words = [*BATCHES, "policy=gru", "policy.recurrent_backend=pad"]
    planned, memory = planned_and_run(words, tmp_path)
    assert any("pad is planned like cpu" in text for text in planned.warnings)
    assert not rlcli.plan([*BATCHES, "policy=gru", *QUIET]).warnings
    assert memory["value_stage"]["measured"] == pytest.approx(stage(planned, "values").bytes, rel=0.2)


@pytest.mark.parametrize(
    ("size", "count", "steps"), [(64, 2, 256), (256, 8, 64), (100, 9, 33), (10, 4, 10), (999, 3, 7)]
)
def test_the_first_minibatch_of_sequences_is_the_largest(size, count, steps):
    begins = torch.zeros(count, steps, 1, dtype=torch.bool)
    begins[:, 0] = True
    _, ends = shuffled_sequences({IS_INIT: begins.reshape(-1, 1)}, size, torch.Generator())
    sizes = torch.diff(torch.tensor(ends), prepend=torch.tensor([0])).tolist()
    assert sizes[0] == max(sizes) == whole_sequences(size, count, steps) * steps


def test_slices_without_memory_lie_as_slices_do():
    begins = torch.zeros(5 * 7, dtype=torch.bool)
    begins[::7] = True
    with Answers(lambda n: 5, 4, False):
        planned = sequences(begins.to("meta"))
    assert planned.begins.shape == sequences(begins).begins.shape == (5, 7)


def entry(entries, component, key):
    (found,) = (x for x in entries if (x["component"], x["key"]) == (component, key))
    return found


@pytest.mark.parametrize(
    ("stride", "fewer"),
    [(1, 0), (4, 0), (40, 0), (48, 0), (64, 0), (100, 0), (200, 8)],  # the 200th step comes in no batch of this run
)
@pytest.mark.every(2)
def test_rows_that_keep_states_are_planned_for_batches_of_any_length(stride, fewer, tmp_path, monkeypatch):
    monkeypatch.setattr("rlcli.report.reporter.LEDGER_EVERY", 0.0)
    words = [*BATCHES, "total_frames=1536", "policy=gru", f"memory.recurrent_state_stride={stride}"]  # [8, 64] thrice
    planned, memory = planned_and_run(words, tmp_path)
    told = entry(planned.as_dict()["entries"], "rollout", "recurrent_state")
    held = entry(memory["entries"], "rollout", "recurrent_state")
    assert (told["bytes"] - fewer * 4 * UNITS, told["shape"]) == (held["peak"], held["shape"])


def test_ends_put_kept_states_out_of_step_by_no_more_than_the_plan_says(tmp_path, monkeypatch, capsys):
    from rlcli.planning.plan import show_plan

    monkeypatch.setattr("rlcli.report.reporter.LEDGER_EVERY", 0.0)
    words = [*DQN, "env.max_episode_steps=40", "memory.recurrent_state_stride=16"]  # [8, 16] a batch
    planned, memory = planned_and_run(words, tmp_path)
    told = entry(planned.as_dict()["entries"], "rollout", "recurrent_state")["bytes"]
    held = entry(memory["entries"], "rollout", "recurrent_state")
    width = 4 * UNITS
    assert planned.out_of_step == 8 * width and planned.per_end == width + 4 + 4 * 2
    assert told < held["peak"] <= told + planned.out_of_step + 8 * width  # all eight envs end in one batch
    show_plan(planned)
    assert "batches after it may hold 2.0 KiB more" in capsys.readouterr().out
    assert not rlcli.plan([*BATCHES, *QUIET]).out_of_step


@pytest.mark.parametrize(
    ("storage", "size", "stride"),
    [("memmap", 1000, 4), ("tensor", 1000, 4), ("memmap", 3000, 4), ("tensor", 3000, 4), ("tensor", 2000, 300)],
)
@pytest.mark.every(2)
def test_a_buffer_holds_about_the_states_that_are_planned(storage, size, stride, tmp_path):
    words = [
        *DQN, "policy=lstm", f"memory.recurrent_state_stride={stride}", f"storage={storage}",
        f"storage.max_size={size}", f"total_frames={max(size, 2560)}", "optim.updates_per_frame=0.01",
        "collector.frames_per_batch=120", "collector.init_random_frames=0",  # 15 steps: batches begin in any phase of 4
    ]  # fmt: skip
    planned, memory = planned_and_run(words, tmp_path)
    told, held = planned.as_dict()["entries"], memory["entries"]
    for key in ("recurrent_state_h", "recurrent_state_c"):
        line = entry(told, "buffer", key)
        assert line["note"].startswith("about")
        assert line["bytes"] == pytest.approx(entry(held, "buffer", key)["bytes"], rel=0.25)
    assert entry(told, "buffer", "observation")["bytes"] == entry(held, "buffer", "observation")["bytes"]
    (note,) = {line["note"] for line in told if line["key"] == "observation" and line["component"] == "buffer"}
    assert ("whole files" in note) is (storage == "memmap" and size < 2560)


@pytest.mark.parametrize("recipe", ["ppo_gru", "dqn_recurrent"])
def test_states_are_no_next_observations(recipe):
    for stride in (1, 16):
        modes = rlcli.plan([f"recipe={recipe}", f"memory.recurrent_state_stride={stride}", *QUIET]).modes
        of = {mode.name: mode.next_obs for mode in modes}
        assert (of["full"], of["compact"], of["delta"]) == (8, 0, 4), "two floats"
        assert 4 < of["exact"] < 8 if recipe == "ppo_gru" else of["exact"] < 1  # where each lies, if something asks


@pytest.mark.parametrize("shape", [(35,), (5, 7)])
def test_a_layer_without_memory_runs_where_nobody_answers_for_it(shape):
    gru = GRUModule(3, 4, in_key="observation", out_key="features").to("meta")
    columns = {
        "observation": torch.empty(*shape, 3), "is_init": torch.empty(*shape, 1, dtype=torch.bool),
        "recurrent_state": torch.empty(*shape, 1, 4),
    }  # fmt: skip
    with set_recurrent_mode(True):
        assert gru(TensorDict(columns, shape).to("meta"))["features"].shape == (*shape, 4)
