"""Where `storage.device` puts a run's rows: on the GPU that learns, where they leave half of its free memory."""

import pytest
import torch
from face import build_collector, build_env, build_policy, configure, refused

from rlcli.build import workload
from rlcli.errors import ConfigError
from rlcli.planning.tensors import planned_buffer

DQN = ["recipe=dqn_cartpole", "storage.max_size=5000", "total_frames=2000", "console=off"]


@pytest.fixture
def decided(monkeypatch):
    """`decided(free, *overrides)`: the planned storage, and its columns there; `free` bytes of a GPU, or None."""

    def decide(free, *overrides):
        cfg = configure("train", [*DQN, *overrides])
        env = build_env(cfg.env, gamma=cfg.value.gamma)
        rows = build_collector(cfg, env, build_policy(cfg, env), None).rows()
        device = None if free is None else torch.device("cuda:0")
        monkeypatch.setattr(workload, "devices", lambda cfg: {"train_device": device})
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        storage = workload.storage_of(cfg, cfg.storage, rows, 0)
        columns = [x for x in planned_buffer(storage, rows, cfg.memory.next_obs) if x.device == "cuda:0"]
        return storage, columns

    return decide


def test_rows_lie_on_a_gpu_where_they_fit_beside_the_rest(decided):
    storage, columns = decided(1 << 40)
    need = sum(entry.bytes for entry in columns)
    assert storage.device == "cuda:0"
    row = sum(entry.per_frame for entry in columns)
    assert need == 5000 * row  # all of it is reserved, and nothing is packed into bits
    assert decided(2 * need)[0].device == "cuda:0"
    assert decided(2 * need - 1)[0].device == decided(None)[0].device == "cpu"
    assert decided(1 << 40, "storage=memmap")[0].device == "cpu"


def test_what_is_asked_for_is_done(monkeypatch, decided):
    assert decided(1 << 40, "storage.device=cpu")[0].device == "cpu"
    refused(ConfigError, "meaning", lambda: decided(1, "storage=compressed", "storage.device=cuda"))
    refused(ConfigError, "CPU build", lambda: decided(1, "storage.device=cuda"))
    monkeypatch.setattr("rlcli.config.installed.torch_has_cuda", lambda: True)
    assert decided(1, "storage.device=cuda")[0].device == "cuda:0"
    refused(ConfigError, "learned from", lambda: decided(None, "storage.device=cuda"))
