"""`rlcli plan`: what a run will need, from specs alone: one env is made and never stepped, nothing else is allocated.

What the process itself takes is measured here and now, since it depends on the machine: the imports, one env and one
more, the compiler. `foresee` does the rest, also for a run that has begun: its report says how far off the plan was.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
from typing import Any

from rlcli.algorithms import algorithm_of
from rlcli.collectors.build import build_collector
from rlcli.collectors.faces import Face
from rlcli.config.schemas import CollectConfig, Config, DeviceConfig
from rlcli.envs import EnvBase
from rlcli.envs.build import build_env, evaluation_lanes, wants_native
from rlcli.errors import ConfigError
from rlcli.jobs.collection import policy_to_look_at, stored_keys
from rlcli.jobs.init_rows import count_init_rows
from rlcli.keys import Key, unravel
from rlcli.planning.foresee import Learning, foresee, parameter_bytes, working
from rlcli.planning.plan import Plan
from rlcli.processes.memory import process_memory
from rlcli.report.metrics import wants_tensorboard
from rlcli.runs import random_streams


def plan(cfg: CollectConfig, verb: str) -> Plan:
    """What the command will need.

    Parameters
    ----------
    cfg : CollectConfig
        A `Config` for `verb="train"`.

    Raises
    ------
    RlcliError
        The env or the policy cannot be made: the run would say the same.
    """
    gc.collect()
    imported = process_memory()[0]
    with random_streams.kept():
        env = build_env(one_lane(cfg))
        try:
            first = process_memory()[0]
            more = _one_more(cfg)
            before = process_memory()[0]
            policy = policy_to_look_at(cfg, env)
            here = dataclasses.replace(cfg, device=DeviceConfig(kind="cpu"))
            learning, keep = _learning(here, env, policy)
            collector = build_collector(here, env, policy, keep)
            built = process_memory()[0]
            _load_what_runs_load(cfg)
            loaded = process_memory()[0]
            process = {
                "after imports": imported,
                "envs": max(first - imported, 0) + more * (cfg.env.num - 1),
                "networks, being made": max(built - before - parameter_bytes(policy), 0),
                "compiler and kernels": max(loaded - built, 0),
                "envs of the evaluation": more * _evaluation_envs(cfg),
                "libraries at work": working(learning),
            }
            return foresee(cfg, verb, collector, learning, process, given=count_init_rows(cfg))
        finally:
            env.close()


def faces(cfg: CollectConfig) -> list[Face]:
    """What `Collector.faces()` of the run would say.

    Raises
    ------
    RlcliError
        The env or the policy cannot be made: the run would say the same.
    """
    with random_streams.kept():
        env = build_env(one_lane(cfg))
        try:
            return build_collector(cfg, env, policy_to_look_at(cfg, env), None).faces()
        finally:
            env.close()


def _learning(cfg: CollectConfig, env: EnvBase, policy: Any) -> tuple[Learning, list[Key]]:
    """The learner's parts, and the keys that its batches hold."""
    if not isinstance(cfg, Config):
        observed = [unravel(key) for key in env.full_observation_spec.keys(True, True)]
        return Learning(policy), stored_keys(cfg, observed, policy)
    if policy is None:
        raise ConfigError("a random policy cannot be trained", where="policy=random", fix="Use rlcli collect.")
    algorithm = algorithm_of(cfg)
    estimator, loss = algorithm.estimator(policy), algorithm.loss(policy, env)
    return Learning(policy, loss, estimator), algorithm.keys(loss, estimator, env)


# ---- the process ---------------------------------------------------------------------------------------------------
def one_lane(cfg: CollectConfig) -> Any:
    """The env of the run with one lane, on the engine that it would choose for all."""
    mode = "native" if wants_native(cfg.env, cfg.env.num) else "serial"
    return dataclasses.replace(cfg.env, num=1, mode=mode, workers=None)


def _one_more(cfg: CollectConfig) -> int:
    """Bytes that one more env takes."""
    before = process_memory()[0]
    another = build_env(one_lane(cfg))
    grown = process_memory()[0] - before
    another.close()
    return max(grown, 0)


def _evaluation_envs(cfg: CollectConfig) -> int:
    return evaluation_lanes(cfg.env, cfg.run.eval_episodes) if _trains(cfg) and cfg.run.eval_episodes else 0


def _load_what_runs_load(cfg: CollectConfig) -> None:
    """The compiled kernels and the logger, on inputs of one row."""
    if isinstance(cfg, Config):
        algorithm_of(cfg).load_kernels()
    if wants_tensorboard(cfg.logger.kind):
        importlib.import_module("tensorboard.compat.proto.event_pb2")
        importlib.import_module("tensorboard.summary.writer.event_file_writer")


def _trains(cfg: CollectConfig) -> bool:
    return isinstance(cfg, Config)
