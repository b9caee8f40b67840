"""The parts of an on-policy run: an estimator, a policy-gradient loss, epochs on each batch."""

from __future__ import annotations

import importlib

import torch

from rlcli.config import build, build_learning
from rlcli.config.schemas import Config
from rlcli.envs import EnvBase
from rlcli.jobs.wiring import Wiring
from rlcli.kernels.scan import scan
from rlcli.modules import ActorCritic
from rlcli.training.on_policy import OnPolicy


def wire(cfg: Config, env: EnvBase, policy: ActorCritic) -> Wiring:
    """See the top of the file."""
    places = build.devices(cfg)
    device = places["train_device"]
    advantage, loss = build_learning.build_estimator(cfg, policy), build_learning.build_loss(cfg, policy)
    kept = build_learning.keys_to_keep(cfg, loss, advantage, env)
    collector = build.build_collector(cfg, env, policy, kept)
    update = build_learning.build_update(cfg, loss)
    moved = device if device != places["storing_device"] else None
    return Wiring(
        collector,
        update,
        loss.in_keys,
        lambda reporter, saver, play: OnPolicy(
            collector, advantage, update, reporter, saver, cfg.total_frames, play, moved
        ),
        warm=load_compiler,
    )


def load_compiler() -> None:
    """The kernels of estimator and update, before the first batch is timed."""
    importlib.import_module("rlcli.kernels.ppo")
    one, no = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.bool)
    scan(one, no, no, one, one, 0.0, 0.0)
