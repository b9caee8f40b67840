"""Each rule between options is reported with its remedy, and all of them at once."""

import pytest
import torch
from face import Config, from_dict, leaves

from rlcli.config.registry import wrapper_call
from rlcli.config.schemas import CollectConfig
from rlcli.config.validate import validate


def texts(cfg) -> list[str]:
    return [str(problem) for problem in validate(cfg)]


def changed(**values):
    """The default configuration with dotted keys changed; `__` stands for the dot."""
    data: dict = {}
    for key, value in values.items():
        *path, name = key.split("__")
        node = data
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return from_dict("train", data)


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("memory__recurrent_state_stride", {"policy__kind": "gru"}),
        ("env__num", {"sampler__kind": "slice", "storage__kind": "tensor", "storage__ndim": 2}),
        ("sampler__batch_size", {"sampler__kind": "slice", "storage__kind": "tensor"}),
    ],
)
def test_nothing_is_worked_out_from_a_number_out_of_range(key, more):
    (text,) = texts(changed(**{key: 0}, sampler__slice_len=4, **more))
    assert text.startswith(f"{key.replace('__', '.')} is 0; allowed: ")


def test_the_defaults_have_no_problem():
    assert texts(Config()) == []
    assert texts(from_dict("collect", {"policy": {"kind": "random"}})) == []


@pytest.mark.parametrize("kind", ["async", "multi_async"])
def test_what_is_collected_can_be_collected_again(kind):
    (text,) = texts(from_dict("collect", {"policy": {"kind": "random"}, "collector": {"kind": kind}}))
    assert "takes the steps of a batch again when it is resumed" in text and f"collector={kind}" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"memory__next_obs": "compact"},
            ("memory=exact", "next_obs=compact", "contradict", "memory=compact"),
        ),
        ({"policy__kind": "random"}, ("no weights to train", "collect")),
        ({"policy__kind": "checkpoint"}, ("policy.path", "rlcli ls")),
        ({"policy__kind": "checkpoint", "policy__path": "/nowhere"}, ("/nowhere does not exist",)),
        ({"policy__kind": "mpl"}, ("unknown policy 'mpl'", "mlp", "--import")),
        ({"policy__kwargs": {"a": 1}}, ("policy.kwargs", "registered")),
        ({"policy__hidden": [64, 0]}, ("policy.hidden", ">= 1")),
        ({"collector__frames_per_batch": 0}, ("frames_per_batch is 0", ">= 1")),
        ({"sampler__batch_size": 4096}, ("4096", "2048", "sampler.batch_size <= 2048")),
        ({"sampler__batch_size": 1}, ("one row has no deviation",)),
        ({"sampler__slice_len": 8}, ("sampler.slice_len", "policy=auto", "single rows", "policy=gru | lstm")),
        ({"sampler__slice_len": 0, "policy__kind": "gru"}, ("sampler.slice_len is 0", ">= 1")),
        (
            {"sampler__slice_len": 16, "policy__kind": "gru", "memory__recurrent_state_stride": 5},
            ("sampler.slice_len=16", "stride=5 keeps none there", "stride=auto", "sampler.slice_len=15"),
        ),
        ({"collector__trajs_per_batch": 0}, ("collector.trajs_per_batch is 0", ">= 1")),
        ({"collector__trajs_per_batch": 2, "collector__split_trajs": True}, ("both cut trajectories",)),
        (
            {"collector__kind": "multi_sync", "collector__preemptive_threshold": 0.5, "collector__num_workers": 1},
            ("preemptive_threshold has no meaning for one worker", "two at least"),
        ),
        (
            {
                "collector__kind": "multi_sync",
                "collector__preemptive_threshold": 0.5,
                "storage__kind": "tensor",
                "storage__ndim": 2,
            },
            ("storage.ndim=2 needs equally many steps of all envs", "storage.ndim=1"),
        ),
        ({"collector__trajs_per_batch": 2, "collector__track_traj_ids": False}, ("track_traj_ids=true",)),
        ({"collector__trajs_per_batch": 2, "collector__set_truncated": True}, ("reset_at_each_iter=true",)),
        ({"collector__split_trajs": True, "collector__track_traj_ids": False}, ("split_trajs", "track_traj_ids=true")),
        ({"collector__deliver_leftovers": True}, ("deliver_leftovers has no meaning with", "trajs_per_batch=null")),
        (
            {"memory__fill_value": 0.0, "memory__kind": "compact", "memory__next_obs": "compact"},
            ("memory.fill_value has no meaning for rlcli train",),
        ),
        ({"memory__frame_stack": "whole"}, ("memory.frame_stack has no meaning with storage=none",)),
        (
            {"memory__frame_stack": "whole", "loss__kind": "dqn", "storage__kind": "tensor", "sampler__kind": "random"},
            ("memory.frame_stack has no meaning with env.frame_stack=null",),
        ),
        ({"memory__frame_stack": "four"}, ("memory.frame_stack is 'four'", "auto | whole")),
        ({"value__num_chunks": 2, "value__value_chunk_size": 2}, ("value.num_chunks and value.value_chunk_size",)),
        ({"value__gamma": 1.01}, ("value.gamma is 1.01", ">= 0 and <= 1")),
        ({"value__gamma": float("nan")}, ("value.gamma is nan",)),
        ({"optim__lr": float("inf")}, ("optim.lr is inf", "> 0")),
        ({"optim__lr": 0.0}, ("optim.lr is 0.0", "> 0")),
        ({"optim__betas": [0.9]}, ("pair",)),
        ({"policy__kind": "checkpoint", "policy__path": "."}, ("policy=checkpoint acts", "policy.init_from=")),
        ({"env__id": "CartPol-v1"}, ("unknown env id 'CartPol-v1'", "did you mean CartPole-v1")),
        ({"env__id": "Xyzzy"}, ("unknown env id 'Xyzzy'; rlcli ls envs lists them. ", "add --import PACKAGE")),
        ({"env__num": 0}, ("env.num is 0", ">= 1")),
        ({"env__wrappers": ["ClipActon"]}, ("unknown wrapper 'ClipActon'", "ClipAction")),
        ({"env__wrappers": [3]}, ("env.wrappers holds 3", "{Name:{argument:value}}")),
        (
            {"env__transforms": [3], "collector__kind": "multi_sync"},
            ("env.transforms holds 3", "{Name:{argument:value}}"),
        ),
        ({"env__wrappers": ["ClipAction"], "env__mode": "native"}, ("native engine", "env.mode=serial")),
        ({"env__kind": "atari"}, ("env=atari", "CartPole-v1", "ALE/")),
        ({"device__kind": "mps"}, ("mps exists on macOS only",)),
        ({"device__train_device": "gpu"}, ("device.train_device='gpu' is not a device", "cuda")),
        ({"threads": 0}, ("threads is 0", "auto | >= 1")),
        ({"threads": "many"}, ("threads is 'many'", "auto")),
        ({"run__keep": 1}, ("run.keep is 1", ">= 2")),
        ({"seed": -1}, ("seed is -1", ">= 0")),
    ],
)
def test_a_problem_names_the_option_and_its_remedy(values, words, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    found = "\n".join(texts(changed(**values)))
    assert found, "no problem was reported"
    for word in words:
        assert word in found


@pytest.mark.parametrize(("system", "device"), [("darwin", "mps"), ("linux", "cuda")])
def test_split_asks_for_the_accelerator_that_it_was_checked_for(monkeypatch, system, device):
    from rlcli.build import collector as build
    from rlcli.config import installed

    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr(installed, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(build, "resolve", lambda name: None if name is None else torch.device(name))
    cfg = changed(device__kind="split")
    assert texts(cfg) == []
    found = build.devices(cfg)
    assert found["train_device"] == found["policy_device"] == torch.device(device) and found["env_device"] is None


@pytest.mark.parametrize("setting", [{"split_trajs": True}, {"trajs_per_batch": 2}])
def test_collecting_to_disk_does_not_hold_rows_back_nor_pad_them(setting):
    cfg = from_dict("collect", {"policy": {"kind": "random"}, "collector": setting})
    (text,) = texts(cfg)
    assert f"collector.{next(iter(setting))} has no meaning for rlcli collect" in text and "split_trajectories" in text


@pytest.mark.parametrize(
    "values",
    [
        {"collector__trajs_per_batch": 2, "collector__deliver_leftovers": True, "sampler__batch_size": 4096},
        {"collector__trajs_per_batch": 2, "collector__set_truncated": True, "collector__reset_at_each_iter": True},
        {"collector__split_trajs": True},
    ],
)
def test_whole_and_padded_trajectories_are_legal_in_training(values):
    assert texts(changed(**values)) == []


@pytest.mark.parametrize("stride", ["auto", 1, 8, 16])
def test_slices_of_a_batch_begin_where_states_are_kept(stride):
    values = {"sampler__slice_len": 16, "policy__kind": "gru", "memory__recurrent_state_stride": stride}
    assert texts(changed(**values)) == []


def test_all_problems_are_reported_at_once():
    cfg = changed(env__num=0, value__lmbda=2.0, memory__next_obs="full", env__id="Cartpoll-v1", run__keep=0)
    assert len(texts(cfg)) == 5


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "has", lambda package: False)
    for values, extra in [
        ({"env__kind": "atari", "env__id": "ALE/Pong-v5"}, "atari"),
        ({"env__id": "HalfCheetah-v5"}, "mujoco"),
        ({"env__id": "LunarLander-v3"}, "box2d"),
        ({"env__kind": "envpool", "env__mode": "native"}, "envpool"),
        ({"logger__kind": "tensorboard"}, "tensorboard"),
    ]:
        assert any(f'pip install "rlcli[{extra}]"' in text for text in texts(changed(**values)))


def test_a_gpu_is_refused_where_torch_is_a_cpu_build(monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "torch_has_cuda", lambda: False)
    assert "CPU build" in texts(changed(device__kind="cuda"))[0]
    assert "CPU build" in texts(changed(device__policy_device="cuda:1"))[0]
    both = texts(changed(device__kind="cuda", logger__kind="nope"))  # one bad key hides no other
    assert len(both) == 2 and "CPU build" in both[1]
    monkeypatch.setattr(installed, "torch_has_cuda", lambda: True)
    assert texts(changed(device__kind="cuda")) == []


def test_more_frames_in_a_batch_than_in_the_run_is_legal():
    assert texts(changed(total_frames=100)) == []


def test_every_key_has_a_meaning_and_an_accepted_default():
    for schema in (Config, CollectConfig):
        for leaf in leaves(schema).values():
            assert leaf.option.help, leaf.key
            assert leaf.option.accepts(leaf.default), leaf.key


@pytest.mark.parametrize(
    ("entry", "call"),
    [
        ("ClipAction", ("ClipAction", {})),
        ({"TimeLimit": {"n": 3}}, ("TimeLimit", {"n": 3})),
        ({"A": None}, ("A", {})),
    ],
)
def test_a_wrapper_is_a_name_or_a_name_with_arguments(entry, call):
    assert wrapper_call(entry) == call


def test_whole_returns_are_not_damped_by_an_estimator_of_values():
    bare = {"loss__kind": "reinforce", "loss__baseline": False}
    returns, chunks = texts(changed(**bare, value__num_chunks=2))
    assert "value=gae gives others" in returns and "use value=td1" in returns
    assert "value.num_chunks has no meaning with loss.baseline=false" in chunks
    assert texts(changed(**bare, value__kind="td1")) == []


def test_triton_is_refused_where_torch_is_a_cpu_build(monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "torch_has_cuda", lambda: False)
    assert "value.backend=triton" in texts(changed(value__backend="triton"))[0]
    monkeypatch.setattr(installed, "torch_has_cuda", lambda: True)
    assert texts(changed(value__backend="triton", device__kind="cuda")) == []
    assert "device=cuda" in texts(changed(value__backend="triton", device__kind="cpu"))[0]


def test_a_recurrent_backend_is_one_that_runs_on_the_device(monkeypatch):
    from rlcli.config import installed

    monkeypatch.setattr(installed, "torch_has_cuda", lambda: True)
    triton = {"policy__kind": "gru", "policy__recurrent_backend": "triton"}
    (text,) = texts(changed(**triton, device__kind="cpu"))
    assert text.startswith("policy.recurrent_backend=triton runs on a GPU") and "device=cuda" in text
    assert texts(changed(**triton, device__kind="cuda")) == []
    (text,) = texts(changed(policy__kind="lstm", policy__recurrent_backend="cpu", device__kind="cuda"))
    assert "recurrent_backend=cpu does not run on device=cuda" in text
    apart = {"device__kind": "cpu", "device__train_device": "cuda"}
    assert texts(changed(**triton, **apart)) == texts(changed(value__backend="triton", **apart)) == []
    (text,) = texts(changed(policy__kind="lstm", policy__recurrent_backend="cpu", **apart))
    assert "recurrent_backend=cpu does not run on device.train_device=cuda" in text
    assert texts(changed(**triton, device__kind="cuda", device__train_device="cpu"))
    assert "runs on a GPU" in texts(changed(**triton))[0], "device=auto may come to a CPU"
    monkeypatch.setattr(installed, "torch_has_cuda", lambda: False)
    assert "runs on a GPU" in texts(changed(**triton))[0]


def test_a_recurrent_policy_has_one_trunk():
    (text,) = texts(changed(policy__kind="gru", policy__shared=False))
    assert "policy.shared=false has no meaning with policy=gru" in text and "leave it out" in text
    assert texts(changed(policy__kind="gru", policy__shared=True)) == []


@pytest.mark.parametrize("name", ["slice_len", "num_slices"])
@pytest.mark.parametrize("value", [0, -4])
def test_a_size_of_slices_that_is_none_is_said_once(name, value):
    slices = {"sampler__kind": "slice", "storage__kind": "tensor", "storage__max_size": 4096}
    (text,) = texts(changed(**slices, **{f"sampler__{name}": value}))
    assert text.startswith(f"sampler.{name} is {value}; allowed: >= 1")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"env__workers": 9}, "env.workers=9 are more than there are envs; use env.workers=8 at most"),
        ({"env__start_method": "spawn"}, "env.start_method needs worker processes, and there are none"),
    ],
)
def test_workers_that_nothing_would_start_are_refused(values, sentence):
    assert any(sentence in text for text in texts(changed(**values)))


def test_a_burn_in_and_its_slice_fit_the_storage():
    stored = {"loss__kind": "dqn", "policy__kind": "gru", "storage__kind": "tensor", "storage__max_size": 4096}
    slices = {**stored, "sampler__kind": "slice", "sampler__slice_len": 16}
    assert texts(changed(**slices, sampler__burn_in=4080)) == []
    (text,) = texts(changed(**slices, sampler__burn_in=4081))
    assert "sampler.burn_in=4081 and a slice of 16 rows are more than the 4096 rows" in text
    assert "use sampler.burn_in <= 4080" in text
