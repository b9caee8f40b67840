"""`rlcli show` and `rlcli plan`, of train or collect: the composed configuration, where each value comes from, how each
part will run; what a run will need, and whether it fits. Nothing runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from rlcli.cli.flags import looked_at
from rlcli.cli.job import print_cfg
from rlcli.cli.main import announced, loading
from rlcli.cli.run_table import aligned
from rlcli.config.option import held, value_at
from rlcli.config.problem import spell
from rlcli.config.recipes import choice_file, lineage
from rlcli.config.schemas import idle, in_words
from rlcli.errors import ConfigError, RlcliError
from rlcli.processes.memory import bytes_in

SHOW = """\
usage: rlcli show train|collect [recipe=NAME] [key=value ...] [--why] [--components]

Print the configuration that a command would use; nothing is run.

  --why         one line per key, with the file, recipe or override that its value comes from
  --components  one line per component of the collector (env, transforms, policy, random numbers):
                whether it runs on numpy arrays or on TensorDicts, and why; one env is made and
                never stepped
"""
PLAN = """\
usage: rlcli plan train|collect [recipe=NAME] [key=value ...] [--limit SIZE] [--json]

Predict the memory of a run: every key, for every way to store next observations; parameters,
optimizer and buffer; the temporary memory of value estimation and updates; the process itself;
whether it fits, and what would make it fit. Some envs are made, and one is timed if env.mode=auto
needs it; nothing of the run's size is allocated.

  --limit SIZE   plan for this much RAM, such as 2GiB, instead of what this machine has
  --json         the same as one JSON object

Exit code 5 where it does not fit.
"""


def show(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := looked_at("show", words, SHOW, "--why", "--components")) is None:
        return 0
    if args.components and args.why:
        raise ConfigError("--why and --components print two different tables", fix="Leave out one of them.")
    if args.components:
        _print_faces(args, recipe_dirs)
        return 0
    from rlcli.config import compose

    ready = compose.plan(args.verb, args.words, recipe_dirs, look=True, flags=args.flags)
    if args.why:
        _print_why(ready)
    else:
        print_cfg(ready)
    return 0


def _print_faces(args: Any, recipe_dirs: Sequence[str]) -> None:
    from rlcli.config.compose import configure

    cfg = configure(args.verb, args.words, recipe_dirs, args.flags)
    with loading():
        from rlcli.build.plan import faces
    print(*aligned([dataclasses.astuple(face) for face in faces(cfg)], ()), sep="\n")


def _print_why(ready: Any) -> None:
    from rlcli.config.compose import holds

    cfg, sources = ready.job.cfg, list(_sources(ready))
    rows, without = [], idle(cfg)
    for key in (key for key in held(cfg) if not key.startswith("sweep.")):  # which is no part of a run
        names = ("run.dir", "hydra.run.dir") if key == "run.dir" else (key,)
        origin = next((where for name in names for where, data in reversed(sources) if holds(data, name)), "default")
        origin += f"; not read {in_words(*without[key])}" if key in without else ""
        if key == "loss.entropy_coeff" and value_at(cfg, key) == "auto" and key not in without:
            origin += f"; {_entropy_coeff(cfg)}"
        rows.append((f"{key}={spell(value_at(cfg, key))}", origin))
    width = min(56, max(len(text) for text, _ in rows))
    for text, origin in rows:
        print(f"{text:<{width}}  # {origin}")


def _entropy_coeff(cfg: Any) -> str:
    """Return the value of `auto`, by the actions of the env, which is made to look at them."""
    from rlcli.build.env import configured

    try:
        env = configured(cfg.env).make()
    except RlcliError as error:
        return str(error)
    kind = type(env.action_space).__name__
    env.close()
    return f"{0 if kind == 'Box' else 0.01}: {kind} actions"


def _sources(ready: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every source of keys, the weakest first: choice files, recipes, the command line."""
    chosen = ready.job.choices
    by_loss = choice_file("loss", str(chosen.get("loss")))[1]
    for group, choice in chosen.items():
        why = f", with loss={chosen['loss']}" if "loss" in chosen and by_loss.get(group) == choice else ""
        yield f"{group}={choice}{why}", choice_file(group, str(choice))[0]
    for name in lineage(ready.job.cfg.recipe, ready.contents) if ready.job.cfg.recipe else ():
        yield f"recipe {name}", ready.contents[name]
    for item in ready.checked:
        if item.key == "recipe" or item.key not in ready.job.choices:
            yield "command line", reduce(lambda x, part: {part: x}, reversed(item.key.split(".")), item.values[0])


def plan(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (args := looked_at("plan", words, PLAN, "--json", limit={"metavar": "SIZE"})) is None:
        return 0
    try:
        limit = None if args.limit is None else bytes_in(args.limit)
    except ValueError as error:
        raise ConfigError(str(error), where="--limit", fix="Write --limit 2GiB.") from error
    from rlcli.config.compose import configure

    cfg = configure(args.verb, args.words, recipe_dirs, args.flags)
    with loading():
        from rlcli.build.plan import plan
    with announced():
        forecast = plan(cfg, args.verb, limit)
    if args.json:
        print(json.dumps(forecast.as_dict(), indent=1))
    else:
        from rlcli.planning.plan import show_plan

        show_plan(forecast)
    return 0 if forecast.fits else 5
