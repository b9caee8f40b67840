"""`rlcli eval RUN`: play episodes with a run's newest policy."""

from __future__ import annotations

import dataclasses
from os import PathLike
from pathlib import Path

from rlcli.builders.env import build_evaluation_env
from rlcli.builders.restore import config_of, restored_policy, restored_transforms
from rlcli.data.fitting import fitting
from rlcli.errors import ArgumentError, ConfigError
from rlcli.jobs.load import check_imports
from rlcli.jobs.saved import newest
from rlcli.training.evaluation import EVALUATION_SEED, Evaluation, longest_episode
from rlcli.training.evaluation import evaluate as play
from rlcli.training.run import open_run


def evaluate(
    path: str | PathLike[str],
    *,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = None,
    max_steps: int | None = None,
    video: str | None = None,
) -> Evaluation:
    """Play whole episodes with the newest checkpoint that verifies, rewards as the env gives them.

    Parameters
    ----------
    path : path
        A run folder.
    episodes : int
        How many, each on a seed of its own.
    deterministic : bool
        The most likely action, or a draw.
    seed : int, optional
        Another set of episodes: 0, the default, is that of a run's own evaluations. No run trains on one of these sets.
    max_steps : int, optional
        Steps after which an episode is cut off; by default as in the run's own evaluations.
    video : str, optional
        Where to write the first episode.
    """
    if episodes < 1:
        raise ArgumentError(f"episodes is {episodes}", fix="Allowed: >= 1.")
    if max_steps is not None and max_steps < 1:
        raise ArgumentError(f"max_steps is {max_steps}", fix="Allowed: >= 1.")
    if seed is not None and not 0 <= seed < 2**32:
        raise ArgumentError(f"seed is {seed}", fix=f"Allowed: 0 to {2**32 - 1}.")
    run = open_run(Path(path))
    if run.info.get("verb") != "train":
        raise ConfigError("only training runs hold a policy", where=str(path))
    check_imports(run)
    saved = newest(run)
    cfg = config_of(saved.manifest["config"])  # what the weights were trained with, whatever config.json says
    state = saved.state
    env = build_evaluation_env(cfg, episodes)
    try:
        with fitting(saved.path):
            policy = restored_policy(cfg, env, state)
        first = EVALUATION_SEED + (seed or 0)
        limit = longest_episode(cfg.run.eval_max_steps if max_steps is None else max_steps, cfg.total_frames)
        found = play(env, policy.actor, episodes, seed=first, deterministic=deterministic, longest=limit)
        assert found is not None  # nobody asked it to stop
    finally:
        env.close()
    if video is not None:
        from rlcli.training.video import record

        kwargs = {**cfg.env.kwargs, "render_mode": "rgb_array"}
        serial = dataclasses.replace(cfg.env, kwargs=kwargs, mode="serial")  # a native engine draws no pictures
        shown = build_evaluation_env(dataclasses.replace(cfg, env=serial), 1)
        try:
            restored_transforms(shown, state)
            record(shown, policy.actor, Path(video), seed=first, deterministic=deterministic)
        finally:
            shown.close()
    return found
