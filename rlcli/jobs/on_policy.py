"""The parts of an on-policy run: an estimator, a policy-gradient loss, epochs on each batch or on stored slices."""

from __future__ import annotations

import importlib

import torch

from rlcli.builders.buffer import build_buffer, load_buffer_compiler, slices_of
from rlcli.builders.collector import build_collector, devices
from rlcli.builders.on_policy import build_estimator, build_loss, build_update, keys_to_keep
from rlcli.config.schemas import Config, draws_slices
from rlcli.envs import EnvBase
from rlcli.jobs.wiring import Wiring
from rlcli.kernels.scan import scan
from rlcli.keys import Key, unravel
from rlcli.modules import ActorCritic
from rlcli.objectives.value.estimator import ValueEstimator
from rlcli.training.buffered_on_policy import BufferedOnPolicy
from rlcli.training.on_policy import OnPolicy
from rlcli.training.run import Run


def wire(cfg: Config, env: EnvBase, policy: ActorCritic, run: Run) -> Wiring:
    """Collector, estimator, loss and update of a run, with a buffer where it draws slices.

    `policy` is on the device that it learns on; rows of a buffer on a disk go into the folder of `run`.
    """
    places = devices(cfg)
    device = places["train_device"]
    estimator, loss = build_estimator(cfg, policy), build_loss(cfg, policy)
    kept = keys_to_keep(cfg, loss, estimator, env)
    collector = build_collector(cfg, env, policy, kept)
    update = build_update(cfg, loss)
    if not draws_slices(cfg):
        moved = device if device != places["storing_device"] else None
        return Wiring(
            collector,
            update,
            loss.in_keys,
            lambda reporter, saver, play: OnPolicy(
                collector, estimator, update, reporter, saver, cfg.total_frames, play, moved
            ),
            warm=lambda: load_compiler(cfg),
            estimator=estimator,
        )
    buffer = build_buffer(cfg, run, device, collector, rebuilt_keys(cfg, estimator, env))
    length = slices_of(cfg)[1] if cfg.sampler.strict_length else None
    return Wiring(
        collector,
        update,
        loss.in_keys,
        lambda reporter, saver, play: BufferedOnPolicy(
            collector, buffer, estimator, update, reporter, saver, cfg.total_frames, slice_len=length, evaluation=play
        ),
        more={"buffer": buffer},
        warm=lambda: load_compiler(cfg),
        estimator=estimator,
    )


def rebuilt_keys(cfg: Config, estimator: ValueEstimator, env: EnvBase) -> list[Key]:
    """Observations whose next value samples of `compact` rows get from the rows that follow in the storage.

    Whole numbers have nothing to mark an unknown one with: there the estimator takes what follows in the slice itself.
    """
    observed = {unravel(key): spec.dtype for key, spec in env.full_observation_spec.items(True, True)}
    read = [key for key in map(unravel, estimator.in_keys) if key in observed]
    plain = all(observed[key].is_floating_point for key in read)
    return read if cfg.memory.next_obs == "compact" and plain else []


def load_compiler(cfg: Config) -> None:
    """The kernels of estimator, update and, where `cfg` has one, buffer, before the first batch is timed."""
    importlib.import_module("rlcli.kernels.ppo")
    one, no = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.bool)
    scan(one, no, no, one, one, 0.0, 0.0)
    if draws_slices(cfg):
        load_buffer_compiler(cfg)
