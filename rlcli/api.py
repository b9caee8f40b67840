"""The command line's verbs as functions: `rlcli.train(...)` and its siblings.

They leave their caller's process as they found it: torch's threads, and all global random streams.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from operator import attrgetter
from os import PathLike
from typing import TYPE_CHECKING, Any

from rlcli import arguments
from rlcli.errors import ArgumentError

if TYPE_CHECKING:
    from rlcli.build.trained_run import TrainingRun
    from rlcli.inspection.found import Inspection
    from rlcli.inspection.verify import FileCheck
    from rlcli.jobs.trained_policy import TrainedPolicy
    from rlcli.learning.evaluation import Evaluation
    from rlcli.planning.plan import Plan
    from rlcli.runs.folder import Run

PathName = str | PathLike[str]


def train(overrides: Sequence[str] = (), recipe_dirs: Iterable[str] = (), **settings: Any) -> TrainingRun:
    """Train as `rlcli train OVERRIDES` does.

    Parameters
    ----------
    overrides : sequence of str
        `["recipe=ppo_exact", "seed=1"]`; no sweeps.
    recipe_dirs : iterable of str
        Folders that hold further recipes.
    **settings
        The same as keywords, after the overrides: `seed=1`, `env={"id": "Pendulum-v1"}`, or `**{"env.num": 4}`.

    Returns
    -------
    TrainingRun
        The finished run: its folder, its figures, and `policy()`.

    Raises
    ------
    ConfigError
        Listing every problem of the configuration.
    StoppedSafely
        On SIGTERM or Ctrl-C, after a checkpoint was written, or while nothing was to be saved yet.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.train(recipe="ppo_exact", seed=1, total_frames=1024, console="off", run={"eval_episodes": 2})
    >>> run.summary["status"]
    'done'
    >>> policy = run.policy()
    >>> policy([0.0, 0.1, 0.0, 0.1]) in (0, 1)
    True
    """
    return _build("train", *_configured("train", overrides, recipe_dirs, settings))


def collect(overrides: Sequence[str] = (), recipe_dirs: Iterable[str] = (), **settings: Any) -> Run:
    """Write frames to disk as `rlcli collect OVERRIDES` does, and return the run; parameters as for `train`.

    A batch counts once its segment is on disk (synced once a second); a kill loses at most a second, and `resume` goes
    on after the last frame that counts.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.collect(recipe="collect_random", total_frames=512, console="off")
    >>> from rlcli.data import open_buffer
    >>> len(open_buffer(run.path))
    512
    """
    return _build("collect", *_configured("collect", overrides, recipe_dirs, settings))


def plan(
    overrides: Sequence[str] = (),
    *,
    verb: str = "train",
    limit: int | None = None,
    recipe_dirs: Iterable[str] = (),
    **settings: Any,
) -> Plan:
    """What `rlcli VERB OVERRIDES` would need, as `rlcli plan` says it; nothing runs.

    Parameters
    ----------
    overrides, recipe_dirs, **settings
        As for `train`.
    verb : {"train", "collect"}
    limit : int, optional
        Bytes of RAM to fit into, whatever this machine has.

    Returns
    -------
    Plan
        Bytes of every key, of every mode, of the process at its peak; `fits`, `advice`, `warnings`.

    Examples
    --------
    >>> import rlcli
    >>> rlcli.plan(recipe="ppo_exact", env={"num": 4}).fits
    True
    """
    configured, _ = _configured(verb, overrides, recipe_dirs, settings)
    return _build("plan.plan", configured, verb, limit)


def resume(path: PathName, overrides: Sequence[str] = (), *, force: bool = False, **settings: Any) -> Run:
    """Go on with the run in a folder as `rlcli resume PATH OVERRIDES` does (`force`: `--force`), and return it.

    Training goes on from its newest checkpoint that verifies, collecting from its last frame. A change that breaks
    exactness, of the configuration or of what the run computes with, is a ConfigError without `force`.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.train(total_frames=1024, console="off", run={"eval_episodes": 0})
    >>> rlcli.resume(run.path, total_frames=2048).summary["frames"]
    2048
    """
    words = _words("train", overrides, settings)  # both verbs' settings are spelled alike
    return _build("resume", _folder(path), words, force=force)


def evaluate(
    path: PathName,
    episodes: int = 20,
    *,
    deterministic: bool = True,
    seed: int | None = None,
    max_steps: int | None = None,
    video: str | None = None,
) -> Evaluation:
    """Play whole episodes with a run's newest policy as `rlcli eval PATH` does, rewards as the env gives them.

    Parameters
    ----------
    path : path
        The run's folder.
    episodes : int
        How many, each on a seed of its own that no training run uses.
    deterministic : bool
        The most likely action, or a draw (`--stochastic`).
    seed : int, optional
        Another set of episodes: 0, the default, is that of a run's own evaluations.
    max_steps : int, optional
        Steps after which an episode is cut off; by default as in the run's own evaluations.
    video : str, optional
        Where to write the first episode: a file that ends in .mp4, .mov, .mkv, .avi or .gif. Where that fails, a
        warning says so, and `film_error` of what is returned is why.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.train(total_frames=1024, console="off", run={"eval_episodes": 0})
    >>> rlcli.evaluate(run.path, episodes=3).lengths.shape
    (3,)
    """
    episodes = arguments.count("episodes", episodes)
    seed = None if seed is None else arguments.count("seed", seed, 0, 2**32 - 1)
    max_steps = None if max_steps is None else arguments.count("max_steps", max_steps)
    options = {"deterministic": deterministic, "seed": seed, "max_steps": max_steps, "video": video}
    found = _build("evaluate", _folder(path), episodes=episodes, **options)
    if found.film_error is not None:
        warnings.warn(f"no video: {found.film_error}", stacklevel=2)
    return found


def load(path: PathName) -> TrainedPolicy:
    """The policy of a training run that is finished, stopped or still going, from its newest checkpoint.

    Parameters
    ----------
    path : path
        The run's folder.

    Returns
    -------
    TrainedPolicy
        Call it on an observation, on several, or on a TensorDict.

    Raises
    ------
    ConfigError
        There is no such run, it is no training run, or a package that registered its env, policy or transforms was not
        imported: it is named, and never imported here.
    ResourceError, DamagedDataError
        There is no checkpoint yet, or none that can be read or that fits the run's configuration.

    Examples
    --------
    >>> import rlcli, numpy
    >>> run = rlcli.train(total_frames=1024, console="off", run={"eval_episodes": 0})
    >>> policy = rlcli.load(run.path)
    >>> policy(numpy.zeros((3, 4))).shape
    (3,)
    >>> policy(numpy.zeros(4), exploration="random") in (0, 1)
    True
    """
    return _build("load", _folder(path))


def inspect(path: PathName, trajectory: int | None = None) -> list[Inspection]:
    """What `rlcli inspect PATH` shows: an `Inspection` for each thing found in the folder.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.collect(recipe="collect_random", total_frames=512, console="off")
    >>> rlcli.inspect(run.path)[0].frames
    512
    """
    from rlcli.inspection.folder import inspect as look

    arguments.count("trajectory", trajectory or 0, None)
    return look(_folder(path), trajectory)


def verify(path: PathName) -> list[FileCheck]:
    """Every file of a run, a collection or a buffer compared with its checksum, as `rlcli verify PATH` does.

    Returns
    -------
    list of (path, state, why)
        `state` is "ok", "damaged", "note" (left behind by a crash) or "no sum".

    Raises
    ------
    ConfigError
        There is no such folder, or nothing with checksums in it.

    Examples
    --------
    >>> import rlcli
    >>> run = rlcli.collect(recipe="collect_random", total_frames=512, console="off")
    >>> {found.state for found in rlcli.verify(run.path)} <= {"ok", "no sum"}
    True
    """
    from rlcli.inspection.verify import check

    return list(check(_folder(path)))


def _configured(verb: str, overrides: Sequence[str], recipe_dirs: Iterable[str], settings: dict[str, Any]) -> Any:
    """Return the configuration, and all its overrides as text."""
    from rlcli.config.compose import configure

    words = _words(verb, overrides, settings)
    folders = _list(recipe_dirs, (str, PathLike), "recipe_dirs are a list of folders", '["my_recipes"]')
    return configure(verb, words, folders), words


def _words(verb: str, overrides: Sequence[str], settings: dict[str, Any]) -> list[str]:
    from rlcli.config.words import spelled

    typed = _list(overrides, str, "overrides are a list of texts", '["recipe=ppo_exact", "seed=1"]')
    return [*typed, *spelled(verb, settings)]


def _list(given: Any, kind: Any, what: str, example: str) -> list[Any]:
    """Return the entries of an argument that is a list, `what` it has to be, and how it is written."""
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, str | PathLike) else [None]
    if not all(isinstance(entry, kind) for entry in found):
        raise ArgumentError(what, why=f"got {given!r}", fix=f"Write {example}.")
    return found


def _folder(path: Any) -> PathName:
    if not isinstance(path, str | PathLike):
        raise ArgumentError("a run is named by its folder", why=f"got {path!r}", fix="Give a text or a Path: run.path.")
    return path


def _build(name: str, *arguments: Any, **options: Any) -> Any:
    """Call what is named so in `rlcli.build`; threads and random streams are put back."""
    import torch

    from rlcli.runs import random_streams

    threads = torch.get_num_threads()
    try:
        with random_streams.kept():
            return attrgetter(name)(import_module("rlcli.build"))(*arguments, **options)
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
