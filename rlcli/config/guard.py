"""Guard what a file may say before Hydra reads it: plain values under plain keys, never anything that runs.

Hydra and OmegaConf can import modules (`_target_`, callbacks, logging formatters), read the environment
(`oc.env`) and call functions in values; YAML can build objects by tag and grow without bound by aliases.
None of that is accepted from a recipe or a saved configuration. Not for: whether a key or value makes sense
(see `validate`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from rlcli.config.problem import Problem, raise_all
from rlcli.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path  # env workers read this file, and parse no address

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
SWEEPER_PARAMS = "hydra.sweeper.params"
WRITTEN = ("run.dir", "storage.scratch_dir", "hydra.run.dir", "hydra.sweep.dir")  # folders that rlcli itself writes
_FOLDER = re.compile(r"(?:^|[._])(?:folder|dir|directory)$")  # an argument of an env, a wrapper or a registered part
_BELOW_RUNS = re.compile(r"runs/[^$~]+")
_GIVEN_ON = re.compile(r"(\w+\.kwargs|env\.wrappers|env\.transforms)\.")  # arguments of parts, of any type
_DATED = re.compile(r"\$\{(?:now:[\w.%:+ -]*|hydra:job\.num|seed|recipe)\}")
_RESOLVERS = ("now", "hydra")  # the date, and Hydra's own record of the job: job number, output folder
_REFERENCE = re.compile(
    r"\$\{(?:[\w.\[\]-]+|(?:" + "|".join(_RESOLVERS) + r"):[\w.%:+/ -]+)\}"  # ${env.num}, ${now:%H-%M}
)
_ENV_ID = re.compile(r"env\.(?:id|(?:.*\.)?env_ids?)(?:\.\d+)*")
_IN_MODULE = re.compile(r"([^:,\s]*):([^,\s]*)")  # my_package:Name-v0, or one of several in a sweep
# what YAML 1.1 takes for a number in base 8 or 60, where a person means another, or a text
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-7_]+|\d[\d_]*(:[0-5]?\d)+(\.[\d_]*)?)")
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""")
_SWEEP_CALL = re.compile(r"(?:range|interval|choice|tag|sort|shuffle|int|float|str|bool)\(")


def read_text(path: Path) -> str:
    """Return the text of a file."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError(f"cannot read {path}", why="it is not a plain file")  # opening a pipe would wait
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=error.strerror) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, after every check of this module."""
    data = parse_yaml(read_text(path), str(path))
    raise_all(check(data, str(path)))
    return data


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the mapping that a YAML text spells; tags, aliases and excess are refused before anything is built."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if len(text) > MAX_BYTES:
        raise ConfigError(f"{len(text)} characters are too many for a configuration file", where=where)
    try:
        _refuse_structure(yaml.parse(text, Loader=yaml.SafeLoader), where)
        # OmegaConf's loader, because it reads 3e-4 as a number and refuses a key given twice
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        first_line = " ".join(str(error).split())[:300]
        raise ConfigError("this is not a YAML file that can be used", where=where, why=first_line) from None
    return cast(dict[str, Any], data)  # keys that are not words are found by `check`


def _refuse_structure(events: Iterator[Any], where: str) -> None:
    import yaml

    depth, documents = 0, 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError("anchors and aliases (& and *) are not accepted in a configuration", where=where)
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"the tag {event.tag} is not accepted in a configuration", where=where)
        if isinstance(event, yaml.ScalarEvent) and event.value == "<<":
            raise ConfigError("merge keys (<<) are not accepted in a configuration", where=where)
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _OTHER_NUMBER.fullmatch(event.value):
            what = f"{event.value} is {yaml.safe_load(event.value)} in YAML"
            raise ConfigError(what, where=where, fix=f"Write the number, or '{event.value}' for the text.")
        documents += isinstance(event, yaml.DocumentStartEvent)
        at_root = depth == 0 and isinstance(event, yaml.NodeEvent)
        # an empty file is one empty scalar
        if at_root and not isinstance(event, yaml.MappingStartEvent) and getattr(event, "value", "?") != "":
            raise ConfigError("a configuration file holds `key: value` lines", where=where)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where)
        if documents > 1:
            raise ConfigError("more than one YAML document", where=where)


def check(data: Any, where: str = "", path: str = "") -> list[Problem]:
    """Return what in plain data, below a dotted `path`, could run code or read the machine; `where`: their file."""
    parts = tuple(path.split(".")) if path else ()
    return [p._replace(where=where) for key, value in _leaves(data, parts) for p in _check_leaf(key, value)]


def check_env_ids(env: Any) -> list[Problem]:
    """The ids in the group `env` that name a module, wherever the group came from."""
    leaves = [(path, x) for path, x in _leaves({"id": env.id, "kwargs": env.kwargs}, ("env",)) if ":" in str(x)]
    return [problem for path, value in leaves for problem in _check_env_id(".".join(map(str, path)), value)]


def check_places(data: Any, where: str) -> list[Problem]:
    """Refuse what a recipe would write outside `./runs`, by its text; the command line alone may name such a place."""
    return [
        Problem(
            f"{key}={value!r} would write outside ./runs",
            "give it on the command line, which may write anywhere, or name a folder below runs/",
            where,
        )
        for path, value in _leaves(data, ())
        if value is not None and _leaves_runs(key := ".".join(map(str, path)), value)
    ]


def _leaves_runs(key: str, value: Any) -> bool:
    text = _DATED.sub("x", str(value))
    if key in WRITTEN or (re.match(r"env\.|\w+\.kwargs\.", key) and _FOLDER.search(key)):
        return not _BELOW_RUNS.fullmatch(text) or ".." in text
    if key == "hydra.sweep.subdir" or key.startswith(("env.wrappers.", "env.transforms.")):
        return text.startswith(("/", "~")) or ".." in text or "$" in text  # such as a prefix of file names
    return False


def _leaves(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(node, list | tuple) and node:
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, node


def _check_leaf(path: tuple[Any, ...], value: Any) -> Iterator[Problem]:
    if not all(isinstance(part, str) for part in path):
        yield Problem(f"keys are words, not {'.'.join(map(str, path))}")
        return
    key = ".".join(path)
    in_params = key.startswith(SWEEPER_PARAMS + ".")
    if any(part.startswith("_") and part.endswith("_") for part in re.split(r"[./@+~]", key)):
        yield Problem(f"{key!r} names code to run, and nothing in a configuration runs")
    elif path and path[0].split(".")[0].split("/")[0].lstrip("+~") == "hydra":
        if key not in HYDRA_KEYS and not in_params:
            allowed = ", ".join((*HYDRA_KEYS, SWEEPER_PARAMS))
            other = "sweep.jobs and sweep.launcher say how jobs run; " if re.search("launcher|sweeper", key) else ""
            yield Problem(f"{key!r} is not accepted", f"{other}of hydra's own keys only {allowed} are")
        elif in_params:
            yield from _check_param(path[3:], value)
        elif not isinstance(value, str | int | float):
            yield Problem(f"{key} is the name of a folder, not {value!r}", "give one, or leave it out")
    elif re.search(r"[^\w.\-]", key) and path[0] not in ("defaults", "env", "policy"):
        yield Problem(f"{key!r} is not a key")
    elif value == "???":  # OmegaConf would keep whatever the key has
        yield Problem(f"{key} is ???, which is no value", "give it one, or leave it out")
    elif isinstance(value, float) and not math.isfinite(value) and _GIVEN_ON.match(key):
        yield Problem(f"{key} is {value}", "give a finite number: no run folder could keep another")
    for text in (*path, value) if isinstance(value, str) else path:
        if "_target_" in text:
            yield Problem(f"{key}: {text!r} names code to run, and nothing in a configuration runs")
        if "${" in _REFERENCE.sub("", text):
            what = f"{key}: {text!r} holds a resolver that is not accepted"
            yield Problem(what, "only ${other.key} and ${now:...} are")
        if in_params and "(" in _SWEEP_CALL.sub("", _QUOTED.sub("", text)):  # this alone is read as an override is
            yield Problem(f"{key}: {text!r} looks like a call, and nothing in a configuration runs")
    if ":" in str(value):
        yield from _check_env_id(key, value)


def _check_param(path: tuple[Any, ...], value: Any) -> Iterator[Problem]:
    """A sweep parameter becomes the override `key=value`, so its key must be a plain one."""
    key = ".".join(path)
    if not re.fullmatch(r"\w+(\.\w+)*", key) or key.split(".")[0] == "hydra":
        yield Problem(f"a sweep over {key!r} is not accepted", "name a key of the configuration")
    yield from _check_env_id(key, value)


def _check_env_id(key: str, value: Any) -> Iterator[Problem]:
    """gymnasium imports what stands before a colon in an env's id, and so does an env that makes one of its own."""
    found = _IN_MODULE.search(str(value)) if _ENV_ID.fullmatch(key) else None
    if found and "${" not in str(value):  # what a reference names is looked at when it is known
        module, name = found[1], found[2]
        if not (module and name):
            fix = f"the colon does not belong there{'; write ' if module or name else ''}{module or name}"
            yield Problem(f"{key}={value} is not the id of an env", fix)
            return
        fix = f"import it with --import {module}, in Python with import {module}, and give the name alone: {name}"
        yield Problem(f"{key}={value} would import the module {module!r}", fix)
