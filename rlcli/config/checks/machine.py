"""Checks of what this machine has: the env that is named, the packages that choices need, the devices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from importlib.util import find_spec
from typing import Any

from rlcli.config import installed, registry
from rlcli.config.installed import accelerator, gymnasium_problem, known_ids, lacking
from rlcli.config.problem import Problem, check, did_you_mean

_OF_GYMNASIUM = ("mujoco", "box2d")  # extras of envs that gymnasium holds in a module of this name


@check("env.kind.", "env.id.")
def check_env(cfg: Any) -> list[Problem]:
    """Check that the env id exists here and its packages are installed."""
    env_id, kind = cfg.env.id, cfg.env.kind
    if (old := gymnasium_problem()) is not None:
        return [old]
    if kind == "envpool":
        return lacking("envpool", "env=envpool")
    if kind == "atari" or env_id.startswith("ALE/"):
        return lacking("atari", f"env.id={env_id}")
    if env_id.startswith(("MiniGrid-", "BabyAI-")):
        return lacking("minigrid", f"env.id={env_id}")
    if env_id in registry.names("env"):
        return []
    from gymnasium.envs.registration import registry as known

    # gymnasium accepts an id without version and takes the newest
    ids = {**known, **{re.sub(r"-v\d+$", "", name): spec for name, spec in known.items()}}
    if env_id not in ids:
        if game := re.fullmatch(r"(\w+?)(NoFrameskip|Deterministic)-v\d+", env_id):  # what ALE/ ids were called before
            return [Problem(f"unknown env id {env_id!r}", f"write env=atari env.id=ALE/{game[1]}-v5")]
        hint = did_you_mean(env_id, (*known_ids(), *registry.users_names("env")))
        if more := _of_packages(env_id, known, hint):
            return [Problem(f"unknown env id {env_id!r}", f"{hint} {more}".lstrip())]
        if not hint or env_id.isidentifier() or "/" in env_id:  # not the form of an id of gymnasium's
            hint = f"{hint or 'rlcli ls envs lists them.'} If a package of yours registers it, add --import PACKAGE"
        return [Problem(f"unknown env id {env_id!r}", hint)]
    entry = ids[env_id].entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    extra = next((extra for extra in _OF_GYMNASIUM if module.startswith(f"gymnasium.envs.{extra}")), None)
    return lacking(extra, f"env.id={env_id}") if extra else []


def _of_packages(env_id: str, known: Mapping[str, Any], near: str) -> str:
    """Say what to do about an unknown id where packages were imported for it; else, or if they gave others, nothing."""
    if not registry.imported:
        return ""
    homes = {name: getattr(spec.entry_point, "__module__", str(spec.entry_point)) for name, spec in known.items()}
    for package in registry.imported:
        top = package.partition(".")[0]
        ids = [name for name, home in homes.items() if home.partition(":")[0].partition(".")[0] == top]
        ids += [name for name in registry.users_names("env") if registry.find("env", name).__module__ == package]
        if ids:
            if near:
                return ""
            shown = sorted(ids, key=lambda name: -SequenceMatcher(None, env_id, name).ratio())[:4]
            return f"{package} has {len(ids)} of them, such as {', '.join(shown)}"
    package, top = registry.imported[0], registry.imported[0].partition(".")[0]
    said = f"{package} was imported and registered no env id with gymnasium; "
    if callable(getattr(sys.modules.get(package), "register_envs", None)):
        call = f"'import {package}' and '{package}.register_envs()'"
        return f"{said}it has register_envs: --import my_envs, a file my_envs.py with {call}"
    if package == top and hasattr(sys.modules.get(top), "__path__") and find_spec(f"{top}.envs") is not None:
        return f"{said}try --import {top}.envs"
    return f"{said}register one yourself: rlcli help environments"


@check("device.")
def check_devices(cfg: Any) -> list[Problem]:
    """Check that every named device could exist with this torch on this system; using it shows whether it does."""
    wanted = [
        (
            "device",
            cfg.device.kind,
            {"split": accelerator(), "auto": "cpu"}.get(cfg.device.kind, cfg.device.kind),
        )
    ]
    for name in ("env_device", "policy_device", "storing_device", "train_device"):
        if (device := getattr(cfg.device, name)) is not None:
            wanted.append((f"device.{name}", device, device))
    found = []
    for key, given, device in wanted:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
            found.append(Problem(f"{key}={given!r} is not a device", "use cpu, cuda, cuda:<number> or mps"))
        elif device.startswith("cuda") and not installed.torch_has_cuda():
            found.append(Problem(f"{key}={given} is not there: the installed torch is a CPU build", f"use {key}=cpu"))
        elif device == "mps" and sys.platform != "darwin":
            found.append(Problem(f"{key}={given} is not there: mps exists on macOS only", f"use {key}=cpu"))
    return [problem._replace(only_here=True) for problem in found]


@check("memory.compress.")
def check_compression(cfg: Any) -> list[Problem]:
    return lacking("compressed", "memory.compress=true") if cfg.memory.compress else []


@check("logger.")
def check_logger(cfg: Any) -> Iterator[Problem]:
    if cfg.logger.kind == "tensorboard":
        yield from lacking("tensorboard", "logger=tensorboard")
