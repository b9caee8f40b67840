"""device=auto: both sides are timed with the run's own objects, the faster is taken, said and kept."""

import contextlib

import pytest
import torch
from face import build_env, build_policy, configure, open_run, refused

import rlcli
from rlcli.build import collector, device_auto, pace, resume, train
from rlcli.build.collector import settled_device
from rlcli.build.device_auto import chosen, tried
from rlcli.build.trained_run import config_of
from rlcli.config import installed
from rlcli.config.resolved import to_dict
from rlcli.errors import ConfigError

TINY = [
    "recipe=ppo_exact", "total_frames=256", "collector.frames_per_batch=128", "sampler.batch_size=64", "console=off",
    "logger=none", "run.eval_episodes=0",
]  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """A GPU seems to be there, until something is to run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(installed, "torch_has_cuda", lambda: True)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def never(*_):
    raise AssertionError("this is not to be measured")


@pytest.mark.parametrize(
    ("cpu", "cuda", "kind", "line"),
    [
        (1.21e-4, 1.4e-4, "cpu", "cpu: 12.1 s per 100,000 frames of acting and learning against 14.0 s on cuda:0"),
        (3e-3, 2e-4, "cuda", "cuda:0: 20.0 s per 100,000 frames of acting and learning against 300.0 s on cpu"),
        (1e-4, 1e-4, "cpu", "cpu: 10.0 s per 100,000 frames of acting and learning against 10.0 s on cuda:0"),
    ],
)
def test_the_faster_side_is_taken_and_both_figures_are_said(monkeypatch, gpu, cpu, cuda, kind, line):
    monkeypatch.setattr(device_auto, "tried", lambda *_: [("cpu", cpu), ("cuda:0", cuda)])
    cfg, lines = settled_device(configure("train", TINY))
    assert cfg.device.kind == kind and lines == [f"device=auto -> {line}"]


@pytest.mark.parametrize(
    ("verb", "words", "what"),
    [
        ("train", ["collector=multi_sync"], "learning"),  # workers act on the CPU in any case
        ("collect", ["policy=mlp"], "acting"),
    ],
)
def test_what_is_not_done_there_is_not_spoken_of(monkeypatch, gpu, verb, words, what):
    monkeypatch.setattr(device_auto, "tried", lambda *_: [("cpu", 1.0), ("cuda:0", 2.0)])
    assert f"frames of {what} against" in chosen(configure(verb, words))[1][0]


def test_a_process_of_its_own_tries_both_sides():
    found = tried([configure("train", ["recipe=ppo_exact"])] * 2)
    assert [device for device, _ in found] == ["cpu", "cpu"] and all(0 < seconds < 0.1 for _, seconds in found)


def test_a_gpu_that_cannot_be_used_is_not_taken(gpu):
    cfg, (line,) = settled_device(configure("train", TINY))
    assert cfg.device.kind == "cpu"
    assert line.startswith("device=auto -> cpu: the GPU could not be tried: ") and "no CUDA GPU is visible" in line


def test_what_cannot_run_on_a_gpu_is_not_tried_there(monkeypatch, gpu):
    monkeypatch.setattr(device_auto, "tried", never)
    cfg, (line,) = chosen(configure("train", ["recipe=ppo_gru", "policy.recurrent_backend=cpu"]))
    assert cfg.device.kind == "cpu" and "policy.recurrent_backend=cpu does not run on device=cuda" in line


@pytest.mark.parametrize("words", [["device=cpu"], ["device=cuda"]])
def test_a_device_that_is_named_is_not_asked_for(monkeypatch, gpu, words):
    monkeypatch.setattr(device_auto, "chosen", never)
    assert settled_device(configure("train", [*TINY, *words]))[0].device.kind == words[0].partition("=")[2]


def test_without_a_gpu_nothing_is_measured_or_said(monkeypatch):
    monkeypatch.setattr(device_auto, "chosen", never)
    cfg, lines = settled_device(configure("train", TINY))
    assert cfg.device.kind == "auto" and lines == []


@pytest.mark.parametrize(
    ("words", "calls", "seconds"),
    [
        # of acting for 256 frames, and of 10 epochs in minibatches
        (["recipe=ppo_exact", "env.num=8", "sampler.batch_size=128"], 2, 2 / 256 + 2 * 10 / 128),
        (["recipe=ppo_gru"], 2, None),
        (["recipe=sac_pendulum"], 2, None),
        (["recipe=dqn_cartpole"], 2, None),
        (["recipe=dqn_recurrent"], 2, None),
        (["recipe=ppo_multi"], 1, None),
        (["recipe=reinforce_cartpole"], 2, None),  # its batches are of whole trajectories, and these never end
    ],
)
def test_the_runs_own_objects_act_and_learn(monkeypatch, words, calls, seconds):
    made = []

    def twice(call, device):
        made.append([call() for _ in range(2)])
        return 2.0

    monkeypatch.setattr(pace, "timed", twice)
    device, found = pace.pace(configure("train", words))
    assert device == "cpu" and len(made) == calls
    assert seconds is None or found == pytest.approx(seconds)


def test_a_round_on_a_gpu_waits_for_what_it_has_ordered(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 0.03
        said.append("call")

    def wait(device):
        now[0] += 0.04  # of a queue
        said.append("wait")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert pace.timed(call, torch.device("cuda:0")) == pytest.approx((4 * 0.03 + 0.04) / 4)
    assert said.index("wait") == pace.WARM + 4 and said.count("wait") == pace.ROUNDS
    said.clear()
    assert pace.timed(call, torch.device("cpu")) == pytest.approx(0.03) and "wait" not in said


def test_a_policy_that_learned_on_a_gpu_is_built_anywhere(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(installed, "torch_has_cuda", lambda: True)
        data = to_dict(configure("train", [*TINY, "device=cuda"]))
    cfg = config_of(data)
    with contextlib.closing(build_env(cfg.env, num=1)) as env:
        assert build_policy(cfg, env).actor is not None


def test_a_run_that_was_put_on_a_gpu_goes_on_without_one_and_says_what_changed(monkeypatch, tmp_path):
    words = [*TINY, f"run.dir={tmp_path}/run"]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(installed, "torch_has_cuda", lambda: True)
        patched.setattr(device_auto, "tried", lambda runs: [("cpu", 2e-4), ("cuda:0", 1e-4)])
        patched.setattr(collector, "resolve", lambda name: None)  # it runs here all the same
        run = train(configure("train", words), words)
    assert run.config["device"]["kind"] == "cuda"
    assert rlcli.load(run.path).actor is not None
    refused(ConfigError, "device=cuda device=cpu", lambda: resume(run.path))
    refused(ConfigError, "'cuda' 'cpu' --force", lambda: resume(run.path, ["device=cpu"]))
    run = resume(run.path, ["device=cpu", "total_frames=512"], force=True)
    assert run.summary["frames"] == 512 and run.info["resumed"][-1]["changed"]["device.kind"] == ["cuda", "cpu"]


def test_nothing_is_tried_where_workers_act_and_nobody_learns(monkeypatch, gpu):
    monkeypatch.setattr(device_auto, "tried", never)
    words = ["policy=mlp", "collector=multi_sync", "collector.num_workers=2"]
    assert settled_device(configure("collect", words))[0].device.kind == "auto"


def test_what_was_chosen_is_kept(monkeypatch, tmp_path):
    words = [*TINY, f"run.dir={tmp_path}/run"]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(device_auto, "tried", lambda runs: [("cpu", 1e-4), ("cuda:0", 2e-4)])
        run = train(configure("train", words), words)
    assert run.config["device"]["kind"] == "cpu"
    monkeypatch.setattr(device_auto, "chosen", never)
    assert resume(run.path, ["total_frames=512"]).summary["frames"] == 512
    assert open_run(run.path).config["device"]["kind"] == "cpu"
