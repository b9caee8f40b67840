"""Playing whole episodes with a policy, each on a seed of its own that training never uses.

Episode k is played by env k modulo their number, on a seed that follows from k alone: how many envs play decides how
fast, and neither which episodes are played nor which of them count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from tensordict.nn import InteractionType

from rlcli.collectors import Collector
from rlcli.envs import EnvBase
from rlcli.keys import DONE, REWARD, TERMINATED
from rlcli.modules.nets import evaluation_mode, one_thread
from rlcli.report.tally import info_figures
from rlcli.runs.session import due as reached
from rlcli.vec_envs.bounds import Bounds
from rlcli.vec_envs.vec_env import SUCCESS

EVALUATION_SEED = 1 << 40  # runs have seeds below 2**32
STEPS_A_BATCH = 64
LONGEST = 30_000  # steps after which an episode that does not end is cut off
SHORTEST_LIMIT = 1_000  # most benchmarks' episodes end within it
PROGRESS_EVERY = 10.0  # seconds between lines of how far an evaluation is


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of episodes, `cut` of them not ended by themselves; or the error that ended all of it."""

    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    cut: int = 0
    infos: dict[int, dict[str, float]] = field(default_factory=dict, compare=False)
    outside: Bounds = field(default_factory=Bounds, compare=False)
    film_error: Exception | None = field(default=None, compare=False)  # why there is no film
    error: str | None = None  # the run that asked for it goes on

    def __str__(self) -> str:
        return "; ".join(self.lines()) if self.error is None else f"failed: {self.error}"

    def lines(self) -> list[str]:
        """Return sentences of the result, and of how it came about."""
        r = self.returns
        text = (
            f"return {r.mean():.1f} +- {r.std():.1f} over {len(r)} episode{'s' * (len(r) > 1)} "
            f"(min {r.min():.1f}, max {r.max():.1f}), length {self.lengths.mean():.0f}"
        )
        cut = [f"{self.cut} cut off at the step limit"] if self.cut else []
        infos = [
            f"success rate {100 * x:.0f} %" if key == SUCCESS else f"{key} {x:.4g}" for key, x in self.means.items()
        ]
        return [text, *([", ".join(infos)] if infos else []), *cut, *self.outside.lines()]

    @property
    def means(self) -> dict[str, float]:
        """Return means over the episodes whose `info` held each key."""
        keys = dict.fromkeys(key for info in self.infos.values() for key in info)
        return {key: float(np.mean([info[key] for info in self.infos.values() if key in info])) for key in keys}

    def as_dict(self) -> dict:
        if self.error is not None:
            return {"error": self.error}
        return {
            "mean_return": float(self.returns.mean()),
            "std_return": float(self.returns.std()),
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "cut": self.cut,
            **info_figures(self.means),
            "out_of_bounds": self.outside.figures(),
        }

    def figures(self) -> dict[str, float]:
        if self.error is not None:
            return {}
        figures = {"return": float(self.returns.mean()), "length": float(self.lengths.mean())}
        for key, x in self.means.items():
            figures["success_rate" if key == SUCCESS else f"info_{key}" if key in figures else key] = x
        return {f"eval_{name}": x for name, x in figures.items()}


class PeriodicEvaluation:
    """Evaluate every so many frames by `play`, None where asked to stop; `improved`: the last was the `best`."""

    def __init__(self, every: int, play: Callable[[], Evaluation | None]) -> None:
        self.every, self.play = every, play
        self._last = 0
        self._last_played: Evaluation | None = None  # of the last call of `after_batch`
        self.best, self.improved = -math.inf, False

    def due(self, frames: int) -> bool:
        """Return True if `after_batch` would play."""
        return reached(self.every, self._last, frames)

    def after_batch(self, frames: int) -> dict[str, float]:
        """Return figures for the report; empty when none is due. One that was asked to stop stays due."""
        due = self.due(frames)
        self._last_played = self.play() if due else None
        if self._last_played is not None or not due:
            self._last = frames
        figures = {} if self._last_played is None else self._last_played.figures()
        self.improved = figures.get("eval_return", -math.inf) > self.best
        self.best = figures["eval_return"] if self.improved else self.best
        return figures

    def played_at(self, frames: int) -> Evaluation | None:
        """Return the evaluation at this many frames, if there was one."""
        return self._last_played if frames == self._last else None

    def state_dict(self) -> dict[str, float]:
        return {"last": self._last, "best": self.best}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._last, self.best = int(state["last"]), float(state.get("best", -math.inf))


class _GivenUp(Exception):
    """Leave a batch whose evaluation is not wanted any more."""


def longest_episode(asked: int | None, total_frames: int) -> int:
    """Return the step limit of an evaluation's episodes, `asked` or a quarter of the run's frames."""
    # a policy that stands still plays on as long as its env lets it (27,000 steps in Breakout)
    return min(max(total_frames // 4, SHORTEST_LIMIT), LONGEST) if asked is None else asked


def progress_lines(episodes: int, say: Callable[[str], None]) -> Callable[[np.ndarray, int], None]:
    """Return `progress` for `evaluate`, which tells `say` how far it is every ten seconds."""
    last = time.monotonic()

    def progress(returns: np.ndarray, frames: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY:
            last = time.monotonic()
            so_far = f", return {returns.mean():.1f} so far" if len(returns) else ""
            say(f"evaluating: {len(returns)} of {episodes} episodes ended, {frames:,} frames{so_far} ...")

    return progress


def player(env: EnvBase, policy, *, deterministic: bool = True) -> Collector:
    """Return what `evaluate` steps: a run keeps it, so that its policy is taken apart and its rows are bound once."""
    with evaluation_mode(policy):
        return Collector(
            env, policy, frames_per_batch=STEPS_A_BATCH * env.batch_size.numel(), keep_keys=[REWARD, DONE, TERMINATED],
            exploration_type=InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM,
            next_obs="compact", track_traj_ids=False, seed=EVALUATION_SEED,
        )  # fmt: skip


def evaluate(
    env: EnvBase,  # of batch size `(lanes,)`
    policy,  # None plays random actions
    episodes: int | None = None,  # one in every lane by default
    *,
    seed: int = EVALUATION_SEED,
    deterministic: bool = True,  # the mode of the policy's distribution, or a draw from it
    collector: Collector | None = None,  # the `player`, if kept for several evaluations, which are cut off alike
    longest: int = LONGEST,  # steps of an episode: an env may never end one
    stop: Callable[[], bool] = lambda: False,  # asked before each step
    progress: Callable[[np.ndarray, int], None] = lambda returns, frames: None,  # see `progress_lines`
) -> Evaluation | None:
    """Play episodes in `evaluation_mode`, None if stopped; returns are of the env's own rewards, before transforms."""
    n = env.batch_size.numel()
    episodes = n if episodes is None else episodes
    rounds = -(-episodes // n)
    returns, lengths, finished = np.zeros(episodes), np.zeros(episodes, np.int64), np.zeros(episodes, np.bool_)
    playing = np.arange(n)  # each lane's episode
    of_lane = np.arange(episodes) % n
    infos: dict[int, dict[str, float]] = {}
    steps = 0

    def check() -> None:
        if stop():
            raise _GivenUp

    collector = player(env, policy, deterministic=deterministic) if collector is None else collector
    collector.set_seed(seed, episode_seeds=True)
    collector.interrupt_by(check)
    collector.bounds.begin_anew()  # the env may have played before
    if rounds > 1:
        collector.limit_episodes(longest)
    with evaluation_mode(policy):
        while playing.min() < episodes and steps < longest * rounds:
            try:
                with one_thread():
                    played = collector.deliver(min(STEPS_A_BATCH, longest * rounds - steps))
            except _GivenUp:
                return None
            assert played.reward is not None and played.done is not None  # `keep_keys` names them
            reward, done = played.reward[..., 0], played.done[..., 0]  # [N, T]
            ended = np.cumsum(done, 1)  # a lane's next episode is the one `n` further on
            episode = playing[:, None] + n * (ended - done)
            wanted = episode < episodes
            returns += np.bincount(episode[wanted], reward[wanted], episodes)
            lengths += np.bincount(episode[wanted], minlength=episodes)
            finished[episode[wanted & played.raw[TERMINATED][..., 0].numpy()]] = True
            for end in played.ends:
                number = int(episode[end.lane, end.t])
                if number < episodes and end.info:
                    infos[number] = end.info
            playing = playing + n * ended[:, -1]
            steps += done.shape[1]
            progress(returns[playing[of_lane] > np.arange(episodes)], steps * n)
    began = lengths > 0  # an engine that cannot be made to cut an episode may leave some unplayed
    open_ended = np.zeros(episodes, np.bool_)
    open_ended[playing[playing < episodes]] = True
    if rounds > 1:
        open_ended |= (lengths >= longest) & ~finished
    return Evaluation(
        returns[began],
        lengths[began],
        cut=int(open_ended[began].sum()),
        infos=infos,
        outside=collector.bounds.found_so_far(),
    )
