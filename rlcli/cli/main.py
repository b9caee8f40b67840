"""`rlcli VERB ...`: finds the verb, hands over, says what it waits for, and turns errors into a sentence and a code.

Imports neither Hydra nor rich nor torch, so that `rlcli --help` answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from rlcli.errors import ConfigError, ResourceError, RlcliError, StoppedSafely, saying_memory, unforeseen

# verb -> (its module, or the function in it that runs it, what it does)
VERBS = {
    "train": ("job.train", "train a policy: rlcli train recipe=ppo_exact env.id=CartPole-v1"),
    "collect": ("job.collect", "record a dataset on disk: rlcli collect recipe=collect_random"),
    "plan": ("show.plan", "memory of a run before it starts: rlcli plan train recipe=ppo_pong"),
    "resume": ("job.resume", "resume a run that was stopped: rlcli resume RUN"),
    "eval": ("eval", "evaluate the policy of a run: rlcli eval RUN --episodes 20"),
    "inspect": ("folders.inspect", "contents of a run, a buffer or a dataset: rlcli inspect RUN"),
    "verify": ("folders.verify", "check every file of a run or a buffer against its checksum: rlcli verify RUN"),
    "prune": ("folders.prune", "remove older checkpoints of finished runs: rlcli prune runs"),
    "ls": ("ls", "list recipes, runs, envs and other parts by name"),
    "cp": ("cp", "copy a recipe to a file that you can edit: rlcli cp ppo_exact my.yaml"),
    "show": ("show.show", "print a composed configuration, where each value comes from, how components run"),
    "doctor": ("doctor", "versions, cores, devices, extras, and what to install"),
    "bench": ("bench", "benchmark this machine: rlcli bench collect"),
    "help": ("help", "pages on runs, memory, buffers, keys and more: rlcli help memory"),
    "completion": ("completion", 'tab completion: eval "$(rlcli completion bash)"'),
}
# what other programs call our verbs -> what to type
_OTHER_NAMES = {
    **dict.fromkeys(("run", "learn", "fit", "start", "launch", "ppo"), "train"),
    **{name: f"train recipe={name}_{env}" for name, env in
       {"dqn": "cartpole", "a2c": "cartpole", "reinforce": "cartpole", "sac": "pendulum"}.items()},
    **dict.fromkeys(("evaluate", "test", "play", "enjoy", "render", "watch"), "eval RUN"),
    "video": "eval RUN --video FILE.mp4",
    **dict.fromkeys(("continue", "restart"), "resume RUN"),
    **{name: f"ls {name}" for name in ("envs", "runs", "recipes")},
    "list": "ls",
    "copy": "cp RECIPE FILE",
    **dict.fromkeys(("config", "cfg"), "show"),
    **dict.fromkeys(("info", "look"), "inspect RUN"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
}  # fmt: skip
_RUNNING = ("train", "collect", "resume", "eval")  # verbs that step envs
_LOOKING = frozenset(("-h", "--help", "-c", "--cfg"))  # and words with which they do not
_HIDDEN = {"__complete": "completion", "__jobs": "job.jobs"}

HELP = f"""usage: rlcli VERB [key=value ...] [flags]

Memory-efficient reinforcement learning from the command line. `rlcli train` alone trains CartPole.

verbs
{chr(10).join(f"  {verb:<12}{what}" for verb, (_, what) in VERBS.items())}

flags of every verb
  -h, --help           usage, and every key with its meaning
  --import PACKAGE     import your package, so that it registers its envs and other parts
  --recipe-dir FOLDER  look for recipes there too (./recipes is always looked at)
  --debug              show the traceback of an error

exit codes: 0 done, 2 configuration, 3 environment, 4 damaged data, 5 resources, 6 numerics,
            75 stopped safely, 130 interrupted
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command, the words after `rlcli` (by default this process's); return the exit code."""
    _make_streams_safe()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    verb, name = "", "rlcli"  # the latter in messages
    try:
        words = [word for word in words if word != "--debug"]
        packages, words = _take(words, "--import", "PACKAGE")
        recipe_dirs, words = _take(words, "--recipe-dir", "FOLDER")
        if not words or words[0] in ("-h", "--help"):
            print(HELP, end="")
            return 0
        if words[0] in ("-V", "--version", "version"):
            from rlcli import __version__

            print(f"rlcli {__version__}")
            return 0
        verb, *rest = words
        if verb not in VERBS and verb not in _HIDDEN:
            raise _unknown_verb(words)
        name = f"rlcli {verb}"
        with saying_memory(), _attended(verb):
            if packages:
                from rlcli.config.registry import import_package

                if verb in _RUNNING and not _LOOKING.intersection(rest):
                    _load_first(rest)
                for package in packages:
                    import_package(package)
            code = runner(verb)(words if verb in _HIDDEN else rest, recipe_dirs)
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # `rlcli ls | head`
        _silence(sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        return 130
    except StoppedSafely as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except RlcliError as error:
        if debug:
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the last stop: nothing goes on after it
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            _silence(sys.stdout.fileno())  # or Python complains again at its end
            print(f"{name}: cannot write the output: {error.strerror}. Free some space.", file=sys.stderr)
            return ResourceError.exit_code
        print(f"{name}: {unforeseen(error)}", file=sys.stderr)
        return 1


def _load_first(words: Sequence[str]) -> None:
    """Load what a run uses before the user's packages: some bring native libraries that bear no other order."""
    with loading(quiet="console=off" in words):
        import numba  # noqa: F401

        from rlcli.build import train  # noqa: F401


def runner(verb: str) -> Callable[[Sequence[str], Sequence[str]], int]:
    """Return the function that runs a verb, from its words and the folders of `--recipe-dir`, to an exit code."""
    module, _, name = (_HIDDEN.get(verb) or VERBS[verb][0]).partition(".")
    return getattr(import_module(f"rlcli.cli.{module}"), name or "run")


class _HangupSafeStream(io.FileIO):
    """Discard what is written to a terminal that is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            _silence(self.fileno())
            return memoryview(data).nbytes


def _make_streams_safe() -> None:
    """Discard output that was closed or whose terminal is gone; escape what a terminal cannot spell."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            if stream.errors == "strict":
                stream.reconfigure(errors="backslashreplace")
            if stream.isatty() and not isinstance(getattr(stream.buffer, "raw", None), _HangupSafeStream):
                buffer = io.BufferedWriter(_HangupSafeStream(stream.fileno(), "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))


def _silence(stream: int) -> None:
    """Discard all further output of a stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


@contextlib.contextmanager
def _attended(verb: str) -> Iterator[None]:
    """Answer SIGTERM from the first moment of a verb that makes runs; print a library's warning once, in one line."""
    show = warnings.showwarning
    printed: set[str] = set()

    def in_one_line(message: Warning | str, *where: Any, **more: Any) -> None:
        # gymnasium colours its own, and says so
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(message)).removeprefix("WARN: ")
        if (line := f"warning: {' '.join(plain.split())}") not in printed:
            printed.add(line)
            print(line, file=sys.stderr)

    warnings.showwarning = in_one_line
    try:
        runs = verb in ("train", "collect", "resume", "__jobs")
        with import_module("rlcli.runs.signals").BeforeTheRun() if runs else contextlib.nullcontext():
            yield
    finally:
        warnings.showwarning = show


def _take(words: list[str], flag: str, value_name: str) -> tuple[list[str], list[str]]:
    """Return the values of a flag that may stand anywhere and be repeated, and the other words."""
    values, rest = [], []
    stream = iter(words)
    for word in stream:
        if word == flag:
            value = next(stream, None)
            if value is None:
                raise ConfigError(f"{flag} needs a value", fix=f"Write {flag} {value_name}.")
            values.append(value)
        elif word.startswith(flag + "="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return values, rest


def _unknown_verb(words: list[str]) -> ConfigError:
    from rlcli.config.problem import did_you_mean

    verb, later = words[0], next((word for word in words if word in VERBS), None)
    if verb.startswith("-"):
        again = ["rlcli", later, *(word for word in words if word != later)] if later else ["rlcli", "VERB", *words]
        return ConfigError(f"{verb!r} is not a verb", fix=f"Flags follow the verb: {shlex.join(again)}.")
    if "=" in verb:
        return ConfigError(f"{verb!r} is not a verb", fix=f"Write rlcli train {verb}, or see rlcli --help.")
    ours = _OTHER_NAMES.get(verb.lower())
    hint = f"write rlcli {ours}" if ours else did_you_mean(verb, VERBS)
    return ConfigError(f"{verb!r} is not a verb{'; ' if hint else ''}{hint} (rlcli --help lists them)")


# ---- what a verb waits for before it can answer: loading torch, compiling kernels once; a word before each wait ------
@contextlib.contextmanager
def loading(quiet: bool = False) -> Iterator[None]:
    """Import torch in this context without garbage collection (a fifth of the time); say so unless `quiet`."""
    if "torch" in sys.modules:
        yield
        return
    if not quiet:
        print("loading torch ...", file=sys.stderr, flush=True)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()
            atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Unfreeze at exit where nanobind would report leaks; elsewhere a last look took a fifth of a short run."""
    if any(type(kind).__module__ == "nanobind" for kind in object.__subclasses__()):
        gc.unfreeze()


@contextlib.contextmanager
def announced() -> Iterator[None]:
    """Print what compiles in this context, for verbs without a console, on standard error."""
    from rlcli.report.clock import compiling

    with compiling(lambda text: print(text, file=sys.stderr, flush=True)):
        yield


if __name__ == "__main__":
    sys.exit(main())
