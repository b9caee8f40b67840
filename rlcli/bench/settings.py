"""What each bench can be told: names, defaults, meanings and limits, and how `key=value` words become values.

Imports nothing heavy: help and mistakes are answered before a bench loads what it measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlcli.config.option import Option
from rlcli.config.problem import Problem, did_you_mean, raise_all
from rlcli.config.validate import check_env

MIN_ROUNDS = 7  # a median of fewer says little on a shared machine


class Setting(NamedTuple):
    """One setting; `least` and `most` bound a number, or every entry of a list."""

    default: Any
    meaning: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    is_env: bool = False

    @property
    def option(self) -> Option:
        return Option(self.meaning, ge=self.least, le=self.most, choices=self.choices)


Settings = Mapping[str, Setting]
Defaults = Mapping[str, Mapping[str, Any]]  # value of one setting -> defaults of others

ENV = Setting("CartPole-v1", "the env, by its gymnasium id", is_env=True)
ROUNDS = Setting(9, "number of timed rounds; medians are reported", MIN_ROUNDS)
TIMED: Settings = {"rounds": ROUNDS, "threads": Setting(1, "torch's threads", 1, 1024)}
HIDDEN = Setting([64, 64], "sizes of the hidden layers", 1, 2**16)

SETTINGS: dict[str, Settings] = {
    "collect": {
        "env.id": ENV._replace(meaning=f"{ENV.meaning}: vectors observed, discrete actions"),
        "continuous": Setting("HalfCheetah-v5", "a second env, with box actions; continuous= leaves it out"),
        "frames_per_batch": Setting(2048, "frames that a side collects in a round, over all envs", 64, 10**8),
        **TIMED,
        "peers": Setting(True, "measure torchrl and SB3 too, where they are installed"),
    },
    "train": {
        "algo": Setting(
            "ppo", "what is trained; dqn and sac have defaults of their own", choices=("ppo", "dqn", "sac")
        ),
        "env.id": ENV,
        "env.num": Setting(8, "envs that are stepped in turns", 1, 2**16),
        "total_frames": Setting(100_000, "frames of a run", 1),
        "collector.frames_per_batch": Setting(256, "frames of a batch, over all envs", 1, 10**8),
        "sampler.batch_size": Setting(256, "rows of a minibatch", 1, 10**8),
        "optim.epochs": Setting(20, "ppo: passes over a batch", 1),
        "optim.updates_per_frame": Setting(1.0, "dqn, sac: updates for every frame", 1e-6),
        "optim.lr": Setting(1e-3, "learning rate; ppo's falls to 0", 0),
        "value.gamma": Setting(0.98, "discount", 0, 1),
        "value.lmbda": Setting(0.8, "ppo: lambda of GAE", 0, 1),
        "loss.entropy_coeff": Setting(0.0, "ppo: weight of the entropy", 0),
        "policy.hidden": HIDDEN,
        "memory": Setting("exact", "how ours keeps next observations", choices=("full", "exact", "compact")),
        **TIMED,
        "rounds": Setting(7, "runs of every side; medians over them are reported", MIN_ROUNDS),
        "peers": Setting(True, "run SB3 too, where it is installed"),
    },
    "workers": {
        "env.id": ENV,
        "env": Setting("gym", "which kind it is", choices=("gym", "atari")),
        "env.num": Setting(8, "envs that are stepped together", 2, 10**4),
        "policy": Setting("auto", "the policy", choices=("auto", "random")),
        "seconds": Setting(0.1, "seconds per side and round, roughly", 0.001, 60),
        **TIMED,
    },
}

# what SB3's zoo trains these with; in place of the defaults above
_ZOO: Defaults = {
    "dqn": {
        "env.num": 1, "total_frames": 50_000, "collector.frames_per_batch": 256, "sampler.batch_size": 64,
        "optim.updates_per_frame": 0.5, "optim.lr": 2.3e-3, "value.gamma": 0.99, "policy.hidden": [256, 256],
    },
    "sac": {
        "env.id": "Pendulum-v1", "env.num": 1, "total_frames": 5000, "collector.frames_per_batch": 1,
        "sampler.batch_size": 256, "optim.updates_per_frame": 1.0, "optim.lr": 1e-3, "value.gamma": 0.99,
        "policy.hidden": [256, 256],
    },
}  # fmt: skip
OWN = {"train": ("algo", _ZOO)}


def read(settings: Settings, words: Sequence[str]) -> dict[str, Any]:
    """Return the value of every setting: of the `key=value` words, or its default; ConfigError lists every mistake."""
    values, problems = {name: setting.default for name, setting in settings.items()}, []
    for word in words:
        name, equals, text = word.partition("=")
        if name not in settings:
            problems.append(Problem(f"this bench has no setting {name!r}", did_you_mean(name, settings)))
        elif not equals:
            problems.append(Problem(f"cannot read {word!r}", "write key=value"))
        else:
            values[name] = _value(word, type(settings[name].default))
            problems += _wrong(name, settings[name], values[name], text)
    raise_all(problems)
    return values


def _value(word: str, wanted: type) -> Any:
    """Read a value as every other verb does; a text as it stands."""
    from rlcli.config.words import plain, read

    override = None if wanted is str else read(word)
    value = word.partition("=")[2] if override is None else plain(override.value())
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**1000
    return wanted(value) if number and wanted in (int, float) and wanted(value) == value else value


def _wrong(name: str, setting: Setting, value: Any, text: str) -> Iterator[Problem]:
    wanted = type(setting.default)
    if setting.is_env and value != setting.default:
        yield from env_problems(value)
    if type(value) is not wanted or (wanted is list and not all(type(entry) is int for entry in value)):
        yield Problem(f"{name} is {_KINDS[wanted]}, not {text[:40]!r}")
    elif not setting.option.accepts(value):
        yield Problem(f"{name} is {text[:40]}", f"allowed: {setting.option.allowed()}")


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list of whole numbers",
}


def env_problems(env_id: str) -> list[Problem]:
    """Return why a single env cannot be made here: no such id, a package that is missing, a vector engine alone."""
    if problems := check_env(SimpleNamespace(env=SimpleNamespace(id=env_id, kind="gym"))):
        return problems
    from gymnasium.envs.registration import registry

    if (spec := registry.get(env_id)) is None or spec.entry_point or not spec.vector_entry_point:
        return []
    return [
        Problem(f"{env_id} is a vector engine, and a bench makes single envs", "rlcli train env.mode=native runs it")
    ]
