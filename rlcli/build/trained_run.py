"""What a training run trained: `rlcli.load(RUN)`, `rlcli eval RUN`, and the policy that a collecting run acts with.

A collecting run keeps its weights in its own folder: resumed, it acts with the same, whatever became of the run that
they came from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlcli.build.algorithm import build_policy
from rlcli.build.env import build_env, build_evaluation_env, configured
from rlcli.config.choices.collect import CheckpointOptions, EnvOptions
from rlcli.config.option import leaves
from rlcli.config.problem import spell
from rlcli.config.resolved import from_dict, settings, to_dict
from rlcli.config.run_files import RUN
from rlcli.config.schemas import CollectConfig, Config, DeviceConfig
from rlcli.data.files.state import loading_state
from rlcli.envs import EnvBase
from rlcli.errors import ConfigError, DamagedDataError
from rlcli.jobs.statistics import adopt, learned_by_transforms
from rlcli.modules import ActorCritic
from rlcli.runs import checkpoint, random_streams
from rlcli.runs.checkpoint import Checkpoint
from rlcli.runs.folder import Run, note_new, open_run
from rlcli.runs.session import released

if TYPE_CHECKING:
    from rlcli.jobs.trained_policy import TrainedPolicy
    from rlcli.learning.evaluation import Evaluation

KEPT = "policy"  # the folder, and what the weights are called in it
SEEN = tuple(  # how the keys begin that decide observations
    f"env.{name}." for name in ("kind", "frame_stack", "normalize_observation", "atari", "wrappers", "transforms")
)


class TrainingRun(Run):
    """Read a training run: its folder, its figures, and the policy that it trained."""

    def policy(self) -> TrainedPolicy:
        """Return the policy of its newest checkpoint; see `rlcli.load`."""
        return load(self.path)


def load(path: str | PathLike[str]) -> TrainedPolicy:
    """See `rlcli.load`."""
    saved, cfg = trained(path)
    with random_streams.kept():
        env = build_env(cfg.env, gamma=cfg.value.gamma, num=1)
        try:
            with loading_state(saved.path):
                networks = restored_policy(cfg, env, saved.state)
            return policy_of(cfg, networks, env, frames=saved.manifest["number"])
        finally:
            env.close()


def policy_of(cfg: Config, networks: ActorCritic, env: EnvBase, *, frames: int = 0) -> TrainedPolicy:
    """Return a run's policy to be called on what its envs show."""
    from rlcli.jobs.trained_policy import TrainedPolicy

    return TrainedPolicy(
        cfg, networks, env, make=partial(_gym_env, cfg.env), title=f"{cfg.env.id}, {cfg.loss.kind}", frames=frames
    )


def _gym_env(e: EnvOptions, **kwargs: Any) -> Any:
    if e.kind == "envpool" or (e.kind == "atari" and e.mode == "native"):
        raise ConfigError(
            "the run's env is an engine that steps many at once, not a gymnasium env",
            where=f"env.mode={e.mode}, env={e.kind}",
            fix="Make it yourself and pass its observations to the policy.",
        )
    return configured(dataclasses.replace(e, kwargs={**e.kwargs, **kwargs})).make()


def trained(path: str | PathLike[str]) -> tuple[Checkpoint, Config]:
    """Return the newest or the named checkpoint of a training run (`RUN:best`, `RUN:FRAMES`), and its own config."""
    kept = checkpoint.named(path) or Path(path)
    one = (kept / checkpoint.MANIFEST).exists()  # a checkpoint, not a run folder
    run = kept.resolve().parents[1] if one else kept
    if not one or (run / RUN).exists():
        check_imports(open_run(run))
    saved = checkpoint.asked_for(str(path))
    return saved, config_of(saved.manifest["config"])


def check_imports(run: Run) -> None:
    """Refuse a run whose packages of the user's own have not been imported, naming them."""
    missing = [name for name in run.info.get("packages", []) if name not in sys.modules]
    if missing:
        raise ConfigError(
            f"this run was made with {' and '.join(missing)}, not imported here",
            where=str(run.path),
            why="rlcli never imports a package only because a run folder names it",
            fix=f"In Python: import {', '.join(missing)}; on the command line: add "
            f"{' '.join(f'--import {name}' for name in missing)}.",
        )


def config_of(data: dict[str, Any]) -> Config:
    """Return the typed configuration of a saved training run, whose policy is built on the CPU wherever it learned."""
    return dataclasses.replace(cast(Config, from_dict("train", data)), device=DeviceConfig(kind="cpu"))


def restored_policy(cfg: Config, env: EnvBase, state: dict[str, Any]) -> ActorCritic:
    """Return a run's policy with its saved weights, in eval mode; saved statistics go into `env`."""
    policy = build_policy(cfg, env)
    policy.load_state_dict(state["policy"])
    adopt(env, learned_by_transforms(state))
    policy.eval()
    return policy


def evaluate(
    path: str | PathLike[str],
    *,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = None,
    max_steps: int | None = None,
    video: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[Evaluation], None] = lambda found: None,
) -> Evaluation:
    """See `rlcli.evaluate`; `say` is given lines on the way, `show` what came of it, before the film is made."""
    from rlcli.learning.evaluation import EVALUATION_SEED, longest_episode, progress_lines
    from rlcli.learning.evaluation import evaluate as play

    if video is not None:
        from rlcli.learning.video import check, record, without_windows

        check(Path(video))
    saved, cfg = trained(path)
    state = saved.state
    env = build_evaluation_env(cfg, episodes)
    with released(env.close):
        with loading_state(saved.path):
            policy = restored_policy(cfg, env, state)
        film = f", then the first one again for {video}" if video else ""
        say(f"running {episodes} episode{'s' * (episodes > 1)}{film} ...")
        first = EVALUATION_SEED + (seed or 0)
        limit = longest_episode(cfg.run.eval_max_steps if max_steps is None else max_steps, cfg.total_frames)
        found = play(
            env, policy.actor, episodes, seed=first, deterministic=deterministic, longest=limit,
            progress=progress_lines(episodes, say),
        )  # fmt: skip
        assert found is not None  # nobody asked it to stop
    show(found)
    if video is None:
        return found
    kwargs = {**cfg.env.kwargs, "render_mode": "rgb_array"}
    serial = dataclasses.replace(cfg.env, kwargs=kwargs, mode="serial")  # a native engine draws no pictures
    try:
        with (
            without_windows(),
            contextlib.closing(build_evaluation_env(dataclasses.replace(cfg, env=serial), 1)) as shown,
        ):
            adopt(shown, learned_by_transforms(state))
            record(shown, policy.actor, Path(video), seed=first, deterministic=deterministic, longest=limit)
    except Exception as error:  # of the env, its renderer or the disk: what was found is not lost for it
        return dataclasses.replace(found, film_error=error)
    return found


# ---- the policy of a collecting run ----------------------------------------------------------------------------------
def acting_policy(cfg: CollectConfig, env: EnvBase, run: Run) -> ActorCritic | None:
    """Return a collecting run's policy (None: random actions); its saved statistics go into `env`."""
    folder = run.path / KEPT
    if checkpoint.FOLDERS.paths(folder):
        return _restored(cfg, env, checkpoint.load_latest(folder))
    found = _asked_for(cfg, cfg.policy.path) if isinstance(cfg.policy, CheckpointOptions) else None
    policy = build_policy(cfg, env) if found is None else _restored(cfg, env, found)
    if policy is None:
        return None
    state: dict[str, Any] = {KEPT: dict(policy.state_dict())}
    if found is not None:
        state["collector"] = {"engine": {"transforms": learned_by_transforms(found.state)}}
    note_new(run, f"{KEPT}/checkpoint_*/*", f"{KEPT}/checkpoint_*", KEPT)
    config = to_dict(cfg) if found is None else found.manifest["config"]
    # whether weights are finite is for the collector to say, in its own words
    checkpoint.save(folder, state, number=0, config=config, may_be_infinite=tuple(state))
    return policy


def policy_to_look_at(cfg: CollectConfig, env: EnvBase) -> ActorCritic | None:
    """Return the policy that `acting_policy` would give a new run, without a run folder to keep it in."""
    if isinstance(cfg.policy, CheckpointOptions):
        return _restored(cfg, env, _asked_for(cfg, cfg.policy.path))
    return build_policy(cfg, env)


def _restored(cfg: CollectConfig, env: EnvBase, found: Checkpoint) -> ActorCritic:
    if isinstance(cfg.policy, CheckpointOptions):
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


def _asked_for(cfg: CollectConfig, asked: str | None) -> Checkpoint:
    """Return the checkpoint that `policy.path` names, or the newest of the run that it names."""
    assert asked is not None
    state, learned = trained(asked)
    its, here, table = settings(learned), settings(cfg), leaves(type(learned))
    other = {  # as they are typed: its own, and the one here
        key.removesuffix(".kind"): (spell(value), spell(here.get(key, table[key].default)))
        for key, value in its.items()
        if f"{key}.".startswith(SEEN) and value != here.get(key, table[key].default)
    }
    if other:
        raise ConfigError(
            "the policy was trained on other observations", where=f"policy.path={asked}",
            why="; ".join(f"its {key} is {its}, here it is {here}" for key, (its, here) in other.items()),
            fix=f"Add {shlex.join(f'{key}={its}' for key, (its, _) in other.items())}.",
        )  # fmt: skip
    return state
