"""`rlcli eval RUN`: play episodes with a run's newest policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from rlcli.data.files.state import loading_state
from rlcli.envs.build import build_evaluation_env, restored_transforms
from rlcli.errors import ArgumentError
from rlcli.jobs.load import restored_policy, trained
from rlcli.learning.evaluation import EVALUATION_SEED, Evaluation, longest_episode, progress_lines
from rlcli.learning.evaluation import evaluate as play


def evaluate(
    path: str | PathLike[str],
    *,
    episodes: int = 20,
    deterministic: bool = True,
    seed: int | None = None,
    max_steps: int | None = None,
    video: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Evaluation:
    """See `rlcli.evaluate`; `say` is given a line every ten seconds, of how far it is."""
    if episodes < 1:
        raise ArgumentError(f"episodes is {episodes}", fix="Allowed: >= 1.")
    if max_steps is not None and max_steps < 1:
        raise ArgumentError(f"max_steps is {max_steps}", fix="Allowed: >= 1.")
    if seed is not None and not 0 <= seed < 2**32:
        raise ArgumentError(f"seed is {seed}", fix=f"Allowed: 0 to {2**32 - 1}.")
    saved, cfg = trained(path)
    state = saved.state
    env = build_evaluation_env(cfg, episodes)
    try:
        with loading_state(saved.path):
            policy = restored_policy(cfg, env, state)
        first = EVALUATION_SEED + (seed or 0)
        limit = longest_episode(cfg.run.eval_max_steps if max_steps is None else max_steps, cfg.total_frames)
        found = play(
            env, policy.actor, episodes, seed=first, deterministic=deterministic, longest=limit,
            progress=progress_lines(episodes, say),
        )  # fmt: skip
        assert found is not None  # nobody asked it to stop
    finally:
        env.close()
    if video is not None:
        from rlcli.learning.video import record

        kwargs = {**cfg.env.kwargs, "render_mode": "rgb_array"}
        serial = dataclasses.replace(cfg.env, kwargs=kwargs, mode="serial")  # a native engine draws no pictures
        shown = build_evaluation_env(dataclasses.replace(cfg, env=serial), 1)
        try:
            restored_transforms(shown, state)
            record(shown, policy.actor, Path(video), seed=first, deterministic=deterministic)
        finally:
            shown.close()
    return found
