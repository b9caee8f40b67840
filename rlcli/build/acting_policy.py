"""The policy of a collecting run: built, or taken from a checkpoint, and kept in the run's own folder.

A resumed run acts with the same weights, whatever became of the run that they came from.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from rlcli.build.algorithm import build_policy
from rlcli.build.trained_run import check_imports, config_of, restored_policy
from rlcli.config.option import leaves, value_at
from rlcli.config.problem import spell
from rlcli.config.resolved import to_dict
from rlcli.config.run_files import RUN
from rlcli.config.schemas import CollectConfig, unread
from rlcli.data.files.state import loading_state
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, DamagedDataError
from rlcli.jobs.statistics import learned_by_transforms
from rlcli.modules import ActorCritic
from rlcli.runs import checkpoint
from rlcli.runs.checkpoint import newest
from rlcli.runs.folder import Run, note_new, open_run

KEPT = "policy"  # the folder, and what the weights are called in it
SEEN = tuple(  # how the keys begin that decide observations
    f"env.{name}." for name in ("kind", "frame_stack", "normalize_observation", "atari", "wrappers", "transforms")
)


def acting_policy(cfg: CollectConfig, env: EnvBase, run: Run) -> ActorCritic | None:
    """Return a collecting run's policy (None: random actions); its saved statistics go into `env`."""
    folder = run.path / KEPT
    if cfg.policy.kind == "random":
        return None
    if checkpoint.list_checkpoints(folder):
        found = checkpoint.load_latest(folder)
        return _restored(cfg, env, found)
    if cfg.policy.kind == "checkpoint":
        found = _asked_for(cfg)
        policy = _restored(cfg, env, found)
        state: dict[str, Any] = {KEPT: found.state["policy"], "collector": _statistics(found.state)}
        config = found.manifest["config"]
    else:
        built = build_policy(cfg, env)
        assert built is not None
        policy, config = built, to_dict(cfg)
        state = {KEPT: dict(policy.state_dict())}
    note_new(run, f"{KEPT}/checkpoint_*/*", f"{KEPT}/checkpoint_*", KEPT)
    # whether weights are finite is for the collector to say, in its own words
    checkpoint.save(folder, state, number=0, config=config, may_be_infinite=tuple(state))
    return policy


def policy_to_look_at(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    """Return the policy that `acting_policy` would give a new run, without a run folder to keep it in."""
    if cfg.policy.kind == "checkpoint":
        return _restored(cfg, env, _asked_for(cfg))
    return build_policy(cfg, env)


def with_kept_policy(cfg: CollectConfig, run: Run) -> CollectConfig:
    """Return the configuration with the policy's path where the run itself keeps it: the training run may be gone."""
    kept = checkpoint.list_checkpoints(run.path / KEPT)
    if cfg.policy.kind != "checkpoint" or not kept:
        return cfg
    return dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, path=str(kept[-1])))


def _restored(cfg: CollectConfig, env: EnvBase, found: checkpoint.Checkpoint) -> ActorCritic:
    if cfg.policy.kind == "checkpoint":
        learned = config_of(found.manifest["config"])
        try:
            with loading_state(found.path):
                return restored_policy(learned, env, found.state)
        except (ConfigError, DamagedDataError) as error:
            if learned.env.id == cfg.env.id:
                raise
            raise ConfigError(
                f"the policy was trained in {learned.env.id}, and does not fit {cfg.env.id}",
                where=f"policy.path={cfg.policy.path}", why=error.why, fix=f"Use env.id={spell(learned.env.id)}.",
            ) from error  # fmt: skip
    with loading_state(found.path):
        policy = build_policy(cfg, env)
        assert policy is not None
        policy.load_state_dict(found.state[KEPT])
        return policy


def _statistics(state: dict[str, Any]) -> dict[str, Any]:
    return {"engine": {"transforms": learned_by_transforms(state)}}


def _asked_for(cfg: CollectConfig) -> checkpoint.Checkpoint:
    """Return the checkpoint that `policy.path` names, or the newest of the run that it names."""
    if cfg.policy.path is None:
        raise ConfigError("policy=checkpoint needs policy.path", fix="Give a run folder: policy.path=runs/train/...")
    path = checkpoint.named(cfg.policy.path) or Path(cfg.policy.path)
    one = (path / checkpoint.MANIFEST).exists()  # a checkpoint, not a run folder
    trained = path.resolve().parents[1] if one else path
    if not one or (trained / RUN).exists():
        check_imports(open_run(trained))
    state = checkpoint.load(path) if one else newest(open_run(path))
    learned = config_of(state.manifest["config"])
    decide = [key for key in leaves(type(learned)) if f"{key}.".startswith(SEEN) and key not in unread(learned)]
    other = {  # as they are typed: its own, and the one here
        key.removesuffix(".kind"): (spell(value_at(learned, key)), spell(value_at(cfg, key)))
        for key in decide
        if value_at(learned, key) != value_at(cfg, key)
    }
    if other:
        raise ConfigError(
            "the policy was trained on other observations", where=f"policy.path={cfg.policy.path}",
            why="; ".join(f"its {key} is {its}, here it is {here}" for key, (its, here) in other.items()),
            fix=f"Add {shlex.join(f'{key}={its}' for key, (its, _) in other.items())}.",
        )  # fmt: skip
    return state
