"""The parts of an off-policy run wired: a collector, a buffer, DQN's or SAC's update, the rows that it begins with."""

from __future__ import annotations

import torch

from rlcli.builders.buffer import build_buffer, load_buffer_compiler
from rlcli.builders.collector import build_collector, devices
from rlcli.builders.off_policy import build_loss, build_update, keys_to_keep
from rlcli.config.schemas import Config
from rlcli.envs import EnvBase
from rlcli.jobs.given_rows import Given, give
from rlcli.jobs.wiring import Wiring
from rlcli.modules import ActorCritic, EGreedyModule
from rlcli.training.off_policy import OffPolicy
from rlcli.training.run import Run
from rlcli.training.schedules import Linear


def wire(cfg: Config, env: EnvBase, policy: ActorCritic, run: Run) -> Wiring:
    """Collector, buffer, loss and update of a run, and the rows that it begins with.

    `policy` is on the device that it learns on; rows of a buffer on a disk go into the folder of `run`.
    """
    device = devices(cfg)["train_device"]
    generator = torch.Generator(device or "cpu").manual_seed(cfg.seed)
    loss = build_loss(cfg, policy, env.action_spec, generator)
    if device is not None:
        loss.to(device)
    collector = build_collector(cfg, env, policy, keys_to_keep(cfg, loss))
    update = build_update(cfg, loss, generator)
    buffer = build_buffer(cfg, run, device, collector)
    exploring = [m for m in policy.actor.modules() if isinstance(m, EGreedyModule)]
    beta = Linear(cfg.sampler.beta, 1.0)
    return Wiring(
        collector,
        update,
        loss.in_keys,
        lambda reporter, saver, play: OffPolicy(
            collector,
            buffer,
            update,
            reporter,
            saver,
            cfg.total_frames,
            updates_per_frame=cfg.optim.updates_per_frame,
            learning_starts=cfg.collector.init_random_frames,
            explore=exploring[0].step if exploring else None,
            beta=beta.at if cfg.sampler.kind == "prioritized" else None,
            evaluation=play,
        ),
        more={"buffer": buffer},
        warm=lambda: load_buffer_compiler(cfg),
        begin=lambda loop: begin(cfg, env, loop),
    )


def begin(cfg: Config, env: EnvBase, loop: OffPolicy) -> Given | None:
    """Put the rows into the buffer that `storage.init_from` names."""
    if cfg.storage.init_from is None:
        return None
    given = give(cfg, loop.buffer, loop.collector, env)
    loop.begin_with(given.rows)
    return given
