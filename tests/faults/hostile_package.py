"""What a user's package may register: envs that keep no contract. Imported by `--import` only, and by workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import rlcli

PLAIN = spaces.Box(-10.0, 10.0, (3,), np.float32)


class Told(gym.Env):
    """Episodes of 20 steps; after `at` steps of its life, `fault` decides what a step gives."""

    observation_space, action_space, length = PLAIN, spaces.Discrete(2), 20

    def __init__(self, at: int = 150) -> None:
        self.at, self.life = at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def see(self):
        return self.np_random.random(3).astype(np.float32)

    def step(self, action):
        self.t, self.life = self.t + 1, self.life + 1
        result = (self.see(), 1.0, self.t >= self.length, False, {})
        return self.fault(result) if self.life == self.at else result

    def fault(self, result):
        return result


def swallow(number):
    with contextlib.suppress(Exception):
        signal.raise_signal(number)


NOTES = (
    "data/mine.npz",
    "buffer/mine.bin",
    "buffer/rows-of-mine.bin",
    "events.out.mine",
    "checkpoints/x",
    "mine",
    "empty",
)


def leave_notes():
    """Files of the env's own in the run folder, and no episode."""
    (folder,) = {path.parent for path in Path.cwd().rglob("run.json")}
    for name in NOTES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "empty" else "mine")
    raise RuntimeError("no licence")


class Unspeakable(Exception):
    """No text, no pickle."""

    def __str__(self):
        raise RuntimeError("no words")

    def __reduce__(self):
        raise TypeError("no pickle")


class NoException(BaseException):
    """Not even an Exception."""


def throw(error):
    raise error


FAULTS = {
    "raises": lambda r: throw(ValueError("the arm is stuck")),
    "unspeakable": lambda r: throw(Unspeakable()),
    "exits": lambda r: sys.exit(0),
    "no_exception": lambda r: throw(NoException("gone")),
    "endless_text": lambda r: throw(ValueError("a\nb\n" + "x" * 100_000)),
    "control_text": lambda r: throw(ValueError("\x1b[2J\x00 \udce9 cleared")),
    "short": lambda r: (r[0][:2], *r[1:]),
    "doubles": lambda r: (r[0].astype(np.float64) + 1e300, *r[1:]),
    "too_high": lambda r: (r[0] + np.float32(12), *r[1:]),
    "nan": lambda r: (r[0] * np.nan, *r[1:]),
    "no_reward": lambda r: (r[0], None, *r[2:]),
    "huge_reward": lambda r: (r[0], 1e300, *r[2:]),
    "endless_reward": lambda r: (r[0], 10**400, *r[2:]),
    "done_is_two": lambda r: (*r[:2], 2, *r[3:]),
    "four_values": lambda r: r[:4],
    "nothing": lambda r: None,
}


def env(name: str, **members) -> None:
    """Register a `Told` with other members."""
    kind = type(name, (Told,), members)
    rlcli.register_env(name)(lambda **settings: kind(**settings))


def other_dtype() -> None:
    import torch

    torch.set_default_dtype(torch.float64)


env("good")
for name, fault in FAULTS.items():
    env(name, fault=lambda self, result, fault=fault: fault(result))
    env(
        f"{name}_at_once",  # in each episode: what only a trial of the env sees is looked at, not refused
        fault=lambda self, result, fault=fault: fault(result),
        __init__=lambda self: Told.__init__(self, 3),
        reset=lambda self, **options: (setattr(self, "life", 0), Told.reset(self, **options))[1],
    )

env("reset_raises", reset=lambda self, **_: throw(RuntimeError("no licence")))
env("dies_in_workers", __init__=lambda self: None if "torch" in sys.modules else os.kill(os.getpid(), signal.SIGKILL))
env("swallows_stops", __init__=lambda self: (Told.__init__(self), swallow(signal.SIGTERM))[0])
env("leaves_notes", reset=lambda self, **_: leave_notes())
env("reset_alone", reset=lambda self, **_: np.zeros(3, np.float32))
env("init_raises", __init__=lambda self: throw(RuntimeError("no port")))
env("init_exits", __init__=lambda self: sys.exit(0))
env("unseeded", see=lambda self: np.random.default_rng().random(3).astype(np.float32))
env("never_ends", length=10**9)
env("obeys_a_file", see=lambda self: Told.see(self) + np.float32(12 * Path("outside").exists()))
env("ends_at_once", length=1)
env("interrupts", fault=lambda self, result: (os.kill(os.getpid(), signal.SIGTERM), result)[1])
env("interrupts_twice", fault=lambda self, result: ([signal.raise_signal(signal.SIGINT) for _ in range(2)], result)[1])
env("other_dtype", fault=lambda self, result: (other_dtype(), result)[1])
env("other_dtype_at_once", __init__=lambda self: (Told.__init__(self), other_dtype())[0])
env("imports_more", __init__=lambda self: (Told.__init__(self), *map(importlib.import_module, ("rich", "hydra")))[0])
env("vast_reward", fault=lambda self, result: (result[0], 2**24 + 1, *result[2:]))


def stop_and_hang():
    """Have the run asked to stop, by the process that wrote its number into a file, and answer no more."""
    os.kill(int(Path("parent").read_text()), signal.SIGTERM)
    time.sleep(600)


def close_others(result):
    """Close the run's own metrics, as `os.closerange` would."""
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.resolve().name == "metrics.jsonl":
            os.close(int(link.name))
    return result


env("hangs", fault=lambda self, result: (time.sleep(600), result)[1])
env(
    "hangs_in_reset", reset=lambda self, **options: (time.sleep(600 * (self.life > 60)), Told.reset(self, **options))[1]
)
env("stops_the_run_and_hangs", fault=lambda self, result: stop_and_hang())
env("dawdles", fault=lambda self, result: (time.sleep(1.0), result)[1])
env("closes_files", fault=lambda self, result: close_others(result))
env("slow", step=lambda self, action: (time.sleep(0.002), Told.step(self, action))[1])


@rlcli.register_env("chatters")
class Chatters(Told):
    """Writes to both streams, bytes that are no text among it."""

    def step(self, action):
        print("step \x1b[31m", file=sys.stderr if self.t % 2 else sys.stdout)
        os.write(1, b"\xff\xfe\n")
        return super().step(action)


@rlcli.register_env("reuses")
class Reuses(Told):
    """Hands out its own buffer at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(3, np.float32)

    def see(self):
        self.buffer[:] = self.np_random.random(3)
        return self.buffer


SPACES = {
    "tuple": spaces.Tuple((PLAIN, PLAIN)),
    "text": spaces.Text(5),
    "nested_tuple": spaces.Dict({"a": spaces.Tuple((PLAIN,))}),
    "taken_name": spaces.Dict({"next": PLAIN}),
    "unsigned": spaces.Box(0, 1000, (3,), np.uint16),
}
for name, space in SPACES.items():
    env(f"sees_{name}", observation_space=space, see=lambda self: self.observation_space.sample())
env("acts_tuple", action_space=spaces.Tuple((PLAIN, PLAIN)))
rlcli.register_env("no_env")(lambda: None)
rlcli.register_env("no_spaces")(gym.Env)
rlcli.register_env("builder_raises")(lambda: 1 / 0)
