"""What `train` and `collect` share: flags, one job or a sweep, and `--cfg`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlcli.errors import ConfigError, RlcliError, StoppedSafely

Start = Callable[[Any, list[str]], Any]


class Flags(argparse.ArgumentParser):
    """A parser whose complaints are our errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, fix=f"See {self.prog} --help.")


def parse(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """The flags and overrides of a verb that runs a job."""
    flags = Flags(prog=f"rlcli {verb}", add_help=False, allow_abbrev=False)
    flags.add_argument("-h", "--help", action="store_true")
    flags.add_argument("-m", "--multirun", action="store_true")
    flags.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    flags.add_argument("--resolve", action="store_true")
    flags.add_argument("-p", "--package")
    flags.add_argument("overrides", nargs="*")
    return flags.parse_intermixed_args(list(words))


def run_job(verb: str, words: Sequence[str], recipe_dirs: Sequence[str], start: Start) -> int:
    """Do what the words ask of a verb: print help or the configuration, run one job, or sweep.

    Parameters
    ----------
    start : callable
        `start(cfg, overrides)`; a function of a module, because launchers may send it to other processes.
    """
    args = parse(verb, words)
    if args.help:
        from rlcli.cli.help import print_help

        print_help(verb, recipe_dirs)
        return 0
    if args.resolve and not args.cfg:
        raise ConfigError("--resolve goes with --cfg", fix="Write --cfg job --resolve.")

    from rlcli.cli import compose

    ready = compose.plan(
        verb, args.overrides, recipe_dirs, multirun=args.multirun and not args.cfg, look=bool(args.cfg)
    )
    if args.cfg:
        print_cfg(ready, args.cfg, args.package, args.resolve)
    elif args.multirun:
        sweep(ready, start)
    elif ready.job is not None:
        start(ready.job.cfg, list(args.overrides))
    return 0


def sweep(ready: Any, start: Start) -> None:
    """Run every job of a sweep through Hydra's sweeper and launcher.

    A job that fails does not stop the others; its error is raised at the end. A safe stop ends the sweep.
    """
    import hydra

    from rlcli.cli.compose import HYDRA_VERSION_BASE
    from rlcli.config.recipes import shipped

    task = _Task(start)
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["rlcli", "--multirun", *ready.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not to Hydra's printer
    try:
        hydra.main(str(shipped("conf")), ready.verb, version_base=HYDRA_VERSION_BASE)(task)()
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


class _Task:
    """One job of a sweep, in whatever process its launcher runs it."""

    def __init__(self, start: Start) -> None:
        self.start = start

    def __call__(self, node: Any) -> Any:
        from hydra.core.hydra_config import HydraConfig

        from rlcli.cli.compose import typed

        job = HydraConfig.get()
        print(f"job {job.job.num}: {' '.join(job.overrides.task)}", flush=True)
        try:
            cfg = typed(node)
            if cfg.run.dir is None:
                cfg.run.dir = job.runtime.output_dir
            return self.start(cfg, list(job.overrides.task))
        except StoppedSafely as stop:
            print(stop, file=sys.stderr)
            raise SystemExit(stop.exit_code) from None  # Hydra would go on with the next job
        except RlcliError as error:
            print(f"job {job.job.num} failed: {error}", file=sys.stderr, flush=True)
            raise


def print_cfg(ready: Any, part: str = "job", package: str | None = None, resolve: bool = True) -> None:
    """Print the job's configuration, Hydra's own, or both, or one key of it."""
    from omegaconf import OmegaConf

    from rlcli.cli.compose import whole_tree

    node = ready.job.node if part == "job" else whole_tree(ready)
    if resolve and part == "job":
        OmegaConf.resolve(node)
    if part == "hydra":
        node = OmegaConf.masked_copy(node, "hydra")
    if package:
        if (found := OmegaConf.select(node, package)) is None:
            raise ConfigError(f"no key {package!r} in the configuration", where="--package")
        node = found
    print(OmegaConf.to_yaml(node).rstrip("\n") if OmegaConf.is_config(node) else node)
