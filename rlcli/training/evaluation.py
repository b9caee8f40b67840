"""Playing whole episodes with a policy: one episode per lane, each on a seed of its own that training never uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tensordict.nn import InteractionType

from rlcli.collectors import Collector
from rlcli.envs import EnvBase
from rlcli.envs.bounds import Bounds
from rlcli.keys import DONE, REWARD
from rlcli.training import every
from rlcli.training.threads import one_thread

EVALUATION_SEED = 1 << 40  # runs have seeds below 2**32
STEPS_A_BATCH = 64
LONGEST = 30_000  # steps after which an episode that does not end is cut off


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of the episodes, one entry each; `cut` of them did not end by themselves.

    `outside` holds what the env showed outside its declared bounds, where it was made to count that.
    """

    returns: np.ndarray
    lengths: np.ndarray
    cut: int = 0
    outside: Bounds = field(default_factory=Bounds, compare=False)

    def __str__(self) -> str:
        r = self.returns
        text = (
            f"return {r.mean():.1f} +- {r.std():.1f} over {len(r)} episodes "
            f"(min {r.min():.1f}, max {r.max():.1f}), length {self.lengths.mean():.0f}"
        )
        cut = [f"{self.cut} did not end and were cut off"] if self.cut else []
        return "; ".join([text, *cut, *self.outside.lines()])

    def as_dict(self) -> dict:
        """Plain values for a report."""
        return {
            "mean_return": float(self.returns.mean()),
            "std_return": float(self.returns.std()),
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "cut": self.cut,
            "out_of_bounds": self.outside.figures(),
        }


class PeriodicEvaluation:
    """An evaluation every so many frames.

    Parameters
    ----------
    every : int
        Frames.
    play : callable
        Plays the episodes with the present weights; None where it was asked to stop.
    """

    def __init__(self, every: int, play: Callable[[], Evaluation | None]) -> None:
        self.every, self.play = every, play
        self._last = 0

    def due(self, frames: int) -> bool:
        """Whether `after_batch` would play."""
        return every.due(self.every, self._last, frames)

    def after_batch(self, frames: int) -> dict[str, float]:
        """Figures for the report; empty when none is due."""
        due, self._last = self.due(frames), frames
        if not due:
            return {}
        found = self.play()
        if found is None:
            return {}
        return {"eval_return": float(found.returns.mean()), "eval_length": float(found.lengths.mean())}

    def resumed_at(self, frames: int) -> None:
        """The run goes on after this many frames."""
        self._last = frames


def evaluate(
    env: EnvBase,
    policy,
    *,
    seed: int = EVALUATION_SEED,
    deterministic: bool = True,
    longest: int = LONGEST,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Play one episode in every lane of `env`; returns are of the env's own rewards, before any transform.

    Parameters
    ----------
    env : EnvBase
        Batch size `(episodes,)`.
    policy : actor or None
        None plays random actions.
    seed : int
        Of the episodes.
    deterministic : bool
        The mode of the policy's distribution, or a draw from it.
    longest : int
        Steps after which an episode is cut off: an env may never end one.
    stop : callable
        Asked between batches; when it says so, the evaluation is given up and None returned.
    """
    collector = Collector(
        env, policy, frames_per_batch=STEPS_A_BATCH * env.batch_size.numel(), keep_keys=[REWARD, DONE],
        exploration_type=InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM,
        next_obs="compact", track_traj_ids=False, seed=seed, episode_seeds=True,
    )  # fmt: skip
    lanes = env.batch_size.numel()
    returns, lengths = np.zeros(lanes), np.zeros(lanes, np.int64)
    playing = np.ones(lanes, np.bool_)
    while playing.any() and collector.frames < longest * lanes:
        if stop():
            return None
        with one_thread():
            batch = collector.rollout(min(STEPS_A_BATCH, longest - collector.frames // lanes))
        raw = collector.raw_reward  # the env's own: what transforms make of rewards is for learning
        reward = (batch.get(REWARD).numpy() if raw is None else raw)[..., 0].astype(np.float64)  # [N, T]
        done = batch.get(DONE).numpy()[..., 0]
        before = np.cumsum(done, 1) - done  # ends before this step; the first episode's steps have none
        first = playing[:, None] & (before == 0)
        returns += (reward * first).sum(1)
        lengths += first.sum(1)
        playing &= ~done.any(1)
    return Evaluation(returns, lengths, cut=int(playing.sum()), outside=collector.lanes.bounds)
