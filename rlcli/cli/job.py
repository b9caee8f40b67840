"""`rlcli train`, `collect` and `resume`: one job, a look at its configuration (`--cfg`), or a sweep (`sweep.py`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rlcli.cli.flags import Flags, read, run_folder
from rlcli.cli.help import page, page_width
from rlcli.cli.main import loading
from rlcli.config.option import find
from rlcli.config.run_files import CONFIG, RUN, SWEEP, read_run_file
from rlcli.config.schemas import VERBS, left_out
from rlcli.errors import ConfigError, in_words


def flags_of(verb: str) -> Flags:
    flags = Flags(verb)
    flags.add_argument("-m", "--multirun", action="store_true")
    flags.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    flags.add_argument("--resolve", action="store_true")
    flags.add_argument("-p", "--package")
    flags.add_argument("overrides", nargs="*")
    return flags


def start(verb: str, cfg: Any, overrides: list[str]) -> Any:
    with loading(quiet=cfg.console.kind == "off"):
        job = getattr(import_module("rlcli.build"), verb)
    return job(cfg, overrides)


def jobs(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Run jobs of a sweep for another process: `rlcli __jobs`, which a sweep starts."""
    from rlcli.cli.side_by_side import serve

    return serve(words, start)


def _run(verb: str, words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    """Do what the words ask of a verb: print help or the configuration, or `start` one job or several."""
    args = flags_of(verb).parse(words, "overrides")
    if args.help:
        print(*page(verb, recipe_dirs, page_width()), sep="\n")
        return 0
    for flag, given in (("--resolve", args.resolve), ("--package KEY", args.package)):
        if given and not args.cfg:
            raise ConfigError(f"{flag.split()[0]} goes with --cfg", fix=f"Write --cfg job {flag}.")
    if args.cfg and args.multirun:
        raise ConfigError("--cfg prints one configuration, and -m asks for several", fix="Leave out one of them.")
    from rlcli.config import compose

    ready = compose.plan(
        verb, args.overrides, recipe_dirs, multirun=args.multirun, look=bool(args.cfg), flags=args.flags
    )
    if args.cfg:
        print_cfg(ready, args.cfg, args.package, args.resolve)
    elif args.multirun:
        from rlcli.cli.sweep import sweep

        sweep(ready, start)
    elif ready.job is not None:
        start(verb, ready.job.cfg, list(args.overrides))
    return 0


train, collect = partial(_run, "train"), partial(_run, "collect")


def print_cfg(ready: Any, part: str = "job", package: str | None = None, resolve: bool = True) -> None:
    """Print the job's configuration, Hydra's own, or both, or one key of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlcli.config.compose import compose_tree, drop

    node = ready.job.node if part == "job" else compose_tree(ready.verb, [item.text for item in ready.checked])
    if part == "job":
        drop(node, {key for key in left_out(ready.job.cfg) if not f"{package}.".startswith(f"{key}.")})
    try:
        if resolve and part == "job":
            OmegaConf.resolve(node)
        if part == "hydra":
            node = OmegaConf.masked_copy(node, "hydra")
        selected = OmegaConf.select(node, package) if package else node
    except OmegaConfBaseException as error:
        raise ConfigError("the configuration cannot be resolved", why=in_words(error)) from None
    if selected is None and find(VERBS[ready.verb], str(package)) is None:
        raise ConfigError(f"no key {package!r} in the configuration", where="--package")
    plain = "null" if selected is None else selected
    print(OmegaConf.to_yaml(selected).rstrip("\n") if OmegaConf.is_config(selected) else plain)


RESUME = """\
usage: rlcli resume RUN [key=value ...] [--force]
       rlcli resume SWEEP [sweep.jobs=N | --job N]

Resume the run in the folder RUN: a training run from its newest intact checkpoint, a collection
after its last frame on disk. On a CPU the result equals, bit for bit, that of a run
that was never interrupted, as far as its environment can be restored; the report says so if not.
Overrides such as total_frames=1_000_000 apply from here on and are stored in the run. Changes that
affect the result are refused and listed, and so are other versions of torch, numpy and the like;
--force resumes anyway.

Of a sweep, the jobs that never began are run and those that stopped are resumed; those that are
done stay. Several processes may do so at a time: each job is run by one. --job N: that job alone.
"""


def resume(words: Sequence[str], recipe_dirs: Sequence[str]) -> int:
    if (
        args := read("resume", words, RESUME, "path", "overrides*", "--force", rest="overrides", job={"type": int})
    ) is None:
        return 0
    from rlcli.config.validate import as_resumed

    path = run_folder(args.path, "resume")
    folder = Path(path)
    if (folder / SWEEP).exists():
        from rlcli.cli.sweep import resume_sweep

        if args.force:
            raise ConfigError(
                "--force is for a run, and this is a sweep", where=path, fix="Resume its runs one by one."
            )
        resume_sweep(path, args.overrides, start, args.job)
        return 0
    if args.job is not None:
        raise ConfigError("--job is for a sweep, and this is a run", where=path, fix="Leave it out.")
    info = read_run_file(folder, RUN) if (folder / RUN).exists() else {}
    if info.get("verb") in VERBS and all(name in sys.modules for name in info.get("packages", ())):
        as_resumed(info["verb"], read_run_file(folder, CONFIG), args.overrides, str(folder / CONFIG))  # before torch
    with loading():
        from rlcli.build import resume

    resume(path, args.overrides, force=args.force)
    return 0
