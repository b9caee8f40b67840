"""Options of `env`: the environment, its wrappers, and how many of it are stepped together."""

from __future__ import annotations

from typing import Any

from rlcli.config.choices.options import Options, names
from rlcli.config.option import option

START_METHODS = ("auto", "forkserver", "spawn", "fork")
_IN_PROCESSES = {"env.mode": ("auto", "parallel")}


class AtariConfig(Options, group="env.atari"):
    """Frames of the Atari screen before the policy sees them."""

    noop_max: int = option(30, "up to this many no-op steps at the start of an episode", ge=0)
    frame_skip: int = option(4, "emulator frames per step; the last two are maximised", ge=1)
    screen_size: int = option(84, "side of the resized square frame, in pixels", ge=1)
    grayscale: bool = option(True, "one luminance channel instead of three colours")
    terminal_on_life_loss: bool = option(False, "a lost life terminates the episode")
    clip_reward: bool = option(True, "clip rewards to their sign")
    fire_reset: bool = option(False, "press FIRE after each reset, in games that wait for it (Breakout)")
    sticky_actions: float | None = option(
        None,
        "probability that a frame repeats the last action, whatever env.kwargs.repeat_action_probability says; null: "
        "what that says, 0 with env=atari",
        ge=0, le=1,
    )  # fmt: skip


class EnvOptions(Options, group="env"):  # options of every env; alone, those of `env=envpool`
    id: str = option("CartPole-v1", "gymnasium id, or a name from the registry")
    num: int = option(8, "environments stepped together (sub-environments)", ge=1, le=1_000_000)
    mode: str = option(
        "auto",
        "serial: one by one; parallel: in processes; native: the env's own vector engine; auto: the engine where it is "
        "faster and resumes exactly, else processes where a trial run of the env shows that they are",
        choices=("auto", "serial", "parallel", "native"),
    )
    kwargs: dict[str, Any] = option(
        {},
        "arguments for gymnasium.make, added to those that a recipe gives; {}: none of them. In a text, {index} is the "
        "number of the env, from 0; {5005+index} a port of its own",
    )
    max_episode_steps: int | None = option(None, "truncate episodes here; null keeps the env's own limit", ge=1)
    frame_stack: int | None = option(None, "last k observations, stacked, for the policy", ge=1)
    normalize_observation: bool = option(False, "normalise observations by their running mean and standard deviation")
    normalize_reward: bool = option(False, "scale rewards by the running standard deviation of the return")
    reward_scale: float = option(1.0, "multiply every reward by this", gt=0)
    out_of_bounds: str = option(
        "count",
        "an observation outside the declared space: refuse: stop there; count: go on and report; ignore: do not look",
        choices=("refuse", "count", "ignore"),
    )
    step_timeout: float | None = option(
        None, "seconds after which an env that does not answer ends the run; null: never, with a warning after 60", gt=0
    )
    info_keys: list[str] = option(
        [],
        "numbers and flags of `info` to track, from the last step of each episode; a.b is b in the mapping a; "
        "is_success is always looked for",
    )
    wrappers: list[Any] = option(
        [],
        "names, or {Name: {argument: value}}, applied in order, innermost first: [{RepeatAction: {num_repeats: 4}}] "
        "takes each action four times",
    )
    transforms: list[Any] = option([], "further transforms of what the envs give, written as wrappers are")


class GymOptions(EnvOptions):  # `env=gym` and `env=mujoco`: single envs, which processes can step
    workers: int | None = option(
        None,
        "worker processes that step the envs; null: as many as env.per_worker makes, with env.mode=parallel",
        ge=1,
        when=_IN_PROCESSES,
    )
    per_worker: int | str = option(
        "auto", "envs per worker process; auto: one process per core", ge=1, words=("auto",),
        when=_IN_PROCESSES)  # fmt: skip
    caller_steps: str = option(
        "auto",
        "the main process steps some of the envs too; auto: unless env.workers is set or failing workers are replaced",
        choices=("auto", "true", "false"),
        when=_IN_PROCESSES,
    )
    start_method: str = option(
        "auto",
        "how those processes are made; auto: forkserver on Linux, else spawn",
        choices=START_METHODS,
        when=_IN_PROCESSES,
    )


class AtariOptions(GymOptions):
    atari: AtariConfig = option(AtariConfig, "preprocessing of Atari frames")


ENVS: dict[str, type[Options]] = {"gym": GymOptions, "atari": AtariOptions, "mujoco": GymOptions, "envpool": EnvOptions}


class EnvConfig(AtariOptions):
    """The environment, its wrappers, and how many of it are stepped together."""

    kind: str = option("gym", "which env choice this is", choices=names(ENVS))
