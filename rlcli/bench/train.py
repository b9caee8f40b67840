"""`rlcli bench train`: wall time of whole runs, ours and stable-baselines3's, with the same hyper-parameters.

Ours is the command line's own job: run folder, metrics, checkpoints and closing report included.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gymnasium import Space, spaces

from rlcli.bench.harness import Figure, Report, interleave, ratio
from rlcli.bench.peers import sb3_run
from rlcli.config.compose import configure
from rlcli.errors import ConfigError
from rlcli.vec_envs.make import GymRecipe

_ONLY_PPO, _ONLY_OFF = ("optim.epochs", "value.lmbda", "loss.entropy_coeff"), ("optim.updates_per_frame",)
_STORED = ["storage=tensor", "sampler=random", "optim.anneal_lr=false", "optim.eps=1e-8", "policy.orthogonal=false"]
_FIXED: dict[str, Callable[[dict[str, Any]], list[str]]] = {  # what no setting says, as SB3 has it
    "ppo": lambda settings: [],
    "dqn": lambda settings: [
        "loss=dqn", *_STORED, "storage.max_size=100000", "policy.activation=relu", "policy.eps_end=0.04",
        f"policy.eps_frames={max(1, int(0.16 * settings['total_frames']))}", "optim.max_grad_norm=10",
        f"collector.init_random_frames={min(1000, settings['total_frames'] // 2)}",
        "loss.tau=1", f"loss.target_every={_updates_of_a_batch(settings)}",  # SB3 copies the weights while it collects
    ],
    "sac": lambda settings: [
        "loss=sac", *_STORED, "storage.max_size=100000", "policy.activation=relu", "optim.max_grad_norm=null",
        f"collector.init_random_frames={min(100, settings['total_frames'] // 2)}",
    ],
}  # fmt: skip
OURS, SB3 = "rlcli train", "stable-baselines3 learn"
EPISODES = 20
ACTIONS: dict[str, type[Space]] = {"dqn": spaces.Discrete, "sac": spaces.Box}  # ppo takes any
SOLVED = {"CartPole-v1": 475, "Pendulum-v1": -200}  # mean returns
Play = Callable[[int], float]  # the mean return of so many episodes, by mode actions


def measure(settings: dict[str, Any]) -> Report:
    """Time whole runs in turns, a new seed each; play their final weights, untimed, at the end."""
    _configured(settings, Path("run"), 0)  # what cannot be run is refused before the first side runs
    _check_env(settings["algo"], settings["env.id"])
    report = Report("train", settings, unit="run")
    players: dict[str, list[Play]] = {OURS: [], SB3: []}
    with tempfile.TemporaryDirectory() as folder:
        sides = {OURS: lambda: players[OURS].append(_train(settings, Path(folder), len(players[OURS])))}
        if report.peer("stable-baselines3", sb3_run, settings, 0) is not None:
            sides[SB3] = lambda: players[SB3].append(sb3_run(settings, len(players[SB3]))())
        report.sides = interleave(sides, settings["rounds"], warmup=1)
        returns = {name: [play(EPISODES) for play in players[name]] for name in sides}
    if SB3 in sides:
        report.ratios.append(ratio(report.sides, SB3, OURS, ">= 2.2" if settings["algo"] == "ppo" else ">= 2"))
    report.figures += _figures(settings, returns)
    for name, values in returns.items():
        each = ", ".join(f"{value:.1f}" for value in values)
        report.checks[f"{name}, mean return of {EPISODES} greedy episodes, one number a run"] = each
    return report


def _check_env(algo: str, env_id: str) -> None:
    """Raise ConfigError unless both sides take the env: one array observed, the algorithm's actions."""
    env = GymRecipe(env_id).make()
    env.close()
    seen, acted, wanted = env.observation_space, env.action_space, ACTIONS.get(algo, Space)
    if isinstance(seen, spaces.Dict | spaces.Tuple) or not isinstance(acted, wanted):
        kind = f"{wanted.__name__} actions" if algo in ACTIONS else "actions of any kind"
        raise ConfigError(
            f"this bench cannot run algo={algo} in {env_id}",
            where="env.id",
            why=f"it needs one array observed and {kind}, and finds {seen} and {acted}",
        )


def _figures(settings: dict[str, Any], returns: dict[str, list[float]]) -> list[Figure]:
    """Return how many runs solved the env, if it has a bar, and how both sides' returns compare."""
    solved, figures = SOLVED.get(settings["env.id"]), []
    if solved is not None:
        for name, values in returns.items():
            share = 100 * sum(value >= solved for value in values) / len(values)
            figures.append(Figure(f"runs that return {solved} or more, {name}", share, "%", ">= 80" * (name == OURS)))
    if SB3 in returns:
        # between equals, eight runs a side fall below 25 % in one case of twenty
        won = statistics.fmean((x > y) + (x == y) / 2 for x in returns[OURS] for y in returns[SB3])
        figures.append(Figure("pairs of runs in which ours returns more (ties half)", 100 * won, "%", ">= 25"))
    return figures


def _configured(settings: dict[str, Any], folder: Path, seed: int) -> tuple[Any, list[str]]:
    """Return our run of the settings, and the overrides that say the same."""
    algo = settings["algo"]
    unknown = ("rounds", "peers", "algo", *(_ONLY_OFF if algo == "ppo" else _ONLY_PPO))
    words = [f"{key}={value}".replace(" ", "") for key, value in settings.items() if key not in unknown]
    words += _FIXED[algo](settings)
    words += [f"seed={seed}", f"run.dir={folder / str(seed)}", "run.eval_episodes=0", "console=off", "logger=none"]
    return configure("train", words), words


def _updates_of_a_batch(settings: dict[str, Any]) -> int:
    return max(1, int(settings["optim.updates_per_frame"] * settings["collector.frames_per_batch"]))


def _train(settings: dict[str, Any], folder: Path, seed: int) -> Play:
    from rlcli.build import evaluate, train

    with contextlib.redirect_stdout(None):
        finished = train(*_configured(settings, folder, seed))
    return lambda episodes: float(evaluate(finished.path, episodes=episodes).returns.mean())
