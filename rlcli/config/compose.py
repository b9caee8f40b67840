"""From a verb and overrides to one typed, checked configuration; the only file that has Hydra compose.

Ours differs from a plain Hydra app in that recipes and overrides pass the guard first, and that every
problem is reported at once: of overrides, of recipes, and of the composed values.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from rlcli.config import guard, registry
from rlcli.config.choices import CHOICES
from rlcli.config.option import find, held, leaves, of_all_choices, value_at
from rlcli.config.overrides import MAX_JOBS, Checked, axes, check_overrides, expand
from rlcli.config.problem import Problem, raise_all
from rlcli.config.recipes import (
    STORED,
    Recipe,
    check_recipe,
    find_recipes,
    lineage,
    overridden,
    parents,
    shipped,
    with_whole_numbers,
)
from rlcli.config.resolved import as_object, flat, need_typed, of_another_choice
from rlcli.config.schemas import VERBS, CollectConfig, idle, in_words
from rlcli.config.validate import validate
from rlcli.config.words import key_of, parsed, spell
from rlcli.errors import ConfigError

HYDRA_VERSION_BASE = "1.3"
_OF_HYDRA = re.compile(r"\$\{hydra(?!:job\.num\})")
_OWN_FOLDER = "hydra.run.dir"  # another name for run.dir, weaker than that
SWEEP_FOLDER = "hydra.sweep.dir"
JOBS_CHECKED_AHEAD = 64  # of a sweep; the others are checked when they begin


@dataclass(frozen=True)
class Job:
    """One configuration: Hydra's tree without its own branch, the same as dataclasses, and choices."""

    node: DictConfig
    cfg: CollectConfig
    choices: Mapping[str, Any]


@dataclass(frozen=True)
class CheckedCommand:
    """A checked command: verb, overrides for Hydra, recipes as they were read; a job, or the overrides of a sweep."""

    verb: str
    checked: tuple[Checked, ...]
    contents: Mapping[str, Mapping[str, Any]]
    job: Job | None = None
    sweep: tuple[Checked, ...] = ()  # those included that a recipe asks for
    folder: str | None = None  # of a sweep, where one is chosen
    how: Any = None  # a sweep is run, `SweepConfig`


def configure(
    verb: str, overrides: Sequence[str] = (), recipe_dirs: Iterable[str] = (), flags: Collection[str] = ()
) -> Any:
    """Return the configuration of one job, a `Config` where it trains; the error lists every problem."""
    job = plan(verb, overrides, recipe_dirs, flags=flags).job
    assert job is not None  # only a sweep has none
    return job.cfg


def plan(
    verb: str,
    overrides: Sequence[str],
    recipe_dirs: Iterable[str] = (),
    *,
    multirun: bool = False,
    look: bool = False,
    flags: Collection[str] = (),
) -> CheckedCommand:
    """Check a whole command, each job of a sweep composed; to `look` at it, what this machine lacks does not matter."""
    registry.recipe_dirs[:] = map(str, recipe_dirs)
    schema, recipes = VERBS[verb], find_recipes(registry.recipe_dirs)
    checked, wrong = check_overrides(schema, overrides, recipes, multirun=multirun, flags=flags)
    chosen = [name for item in checked if item.key == "recipe" for name in item.values if name]
    contents, bad = _read(schema, chosen, recipes)
    problems = list(bad)
    if bad:  # the rest can still be checked without the recipe
        checked = [item for item in checked if item.key != "recipe"]
        contents = {}
    losses = _losses(contents, [(item.key, "=", name) for item in checked for name in item.values])
    stored = _store(schema, verb, contents, losses)
    ready = CheckedCommand(verb, tuple(checked), contents)
    if multirun:
        ready = replace(ready, sweep=_sweep(ready, recipes, problems))
    jobs = expand(ready.sweep) if multirun else [[item.text for item in checked]]
    job = None
    aside: list[str] = []
    met: dict[Problem, list[int]] = {}  # what is wrong with jobs, and with which
    folders: dict[int, str] = {}  # of the jobs of a sweep
    typed_keys = {item.key for item in ready.sweep or ready.checked}
    undecided = (_undecided(schema, overrides, checked) if wrong else set()) | ({"recipe"} if bad else set())
    chosen_folder = multirun and (SWEEP_FOLDER in typed_keys or any(holds(x, SWEEP_FOLDER) for x in contents.values()))
    own = any(item.key == _OWN_FOLDER for item in checked) or any(holds(x, _OWN_FOLDER) for x in contents.values())
    for number, texts in enumerate(jobs[:JOBS_CHECKED_AHEAD]):
        try:
            node = _composed(verb, texts, stored)
            if number == 0 and chosen_folder:
                raw = cast(Any, OmegaConf.to_container(node.hydra.sweep))["dir"]
                if of := _of_one_job(raw, ready.sweep):
                    what = f"{SWEEP_FOLDER}={raw}: a sweep lies in one folder, and {of} is of one job"
                    raise_all([Problem(what, "name the folders of jobs with run.dir or hydra.sweep.subdir")])
                ready = replace(ready, folder=str(node.hydra.sweep.dir))
            job = _job(node, number if multirun else None, own)
            ready = replace(ready, how=job.cfg.sweep)
            folders[number] = str(job.cfg.run.dir)
            wanting = validate(job.cfg, typed_keys, undecided)
            if (name := job.cfg.recipe) in contents and name and not undecided:
                keys = [key for key, _ in flat(schema, contents[name]) if key.partition(".")[0] not in typed_keys]
                wanting += [x for key in keys for x in of_another_choice(job.cfg, key, str(recipes[name].path))]
            aside += _left_aside(job.cfg, contents, typed_keys)
        except ConfigError as error:
            wanting = [Problem(str(error))]
        for problem in wanting:
            met.setdefault(problem, []).append(number)
    for problem, numbers in met.items():
        shown = ", ".join(map(str, numbers[:4])) + ", ..." * (len(numbers) > 4)
        alike = bool(problem.where) or len(numbers) == len(jobs[:JOBS_CHECKED_AHEAD])
        problems.append(problem if alike else problem._replace(where=f"job{'s' * (len(numbers) > 1)} {shown}"))
    if multirun:
        kept = need_typed(schema, (key for key in typed_keys if key[:6] != "sweep."), "sweep.json")
        problems += [x._replace(fix="run one job; RAY_ADDRESS names the Ray cluster of all") for x in kept]
        problems += _shared_folder(folders)
    else:
        problems += [Problem(f"{x} is for a sweep", "add -m, or leave it out") for x in typed_keys if x[:6] == "sweep."]
    if wrong and job is not None:  # what other libraries count otherwise is converted with what is composed
        facts = {key: value_at(job.cfg, key) for key in held(job.cfg)}
        _, wrong = check_overrides(schema, overrides, recipes, multirun=multirun, flags=flags, composed=facts)
    problems = [*wrong, *problems]
    raise_all(problem for problem in problems if not (look and problem.only_here))
    for text in dict.fromkeys(() if look else aside):
        warnings.warn(text, stacklevel=2)
    return ready if multirun else replace(ready, job=job)


def _shared_folder(folders: Mapping[int, str]) -> list[Problem]:
    """Return the first two jobs of a sweep that would have one folder."""
    first: dict[str, int] = {}
    for number, folder in folders.items():
        if (other := first.setdefault(os.path.abspath(folder), number)) != number:
            what = f"jobs {other} and {number} would have one folder, {folder}"
            return [Problem(what, "put into the name what differs, in quotes: '..._${hydra:job.num}'")]
    return []


def _undecided(schema: type, overrides: Iterable[str], checked: Iterable[Checked]) -> set[str]:
    """Return the keys that were typed with what cannot be used, a group's choice as its `.kind`."""
    missing = {*map(key_of, overrides)} - (used := {item.key for item in checked})
    kinds = {key: f"{key}.kind" for key in missing if f"{key}.kind" in leaves(schema)}
    mappings = {key for key in missing if any(name.startswith(f"{key}.") for name in used)}  # used key by key
    kinds |= {"memory.next_obs": "memory.kind"} if "memory.next_obs" in missing else {}  # by itself it is the choice
    return {*kinds.values(), *(key for key in missing - kinds.keys() - mappings if find(schema, key))}


def _left_aside(cfg: CollectConfig, contents: Mapping[str, Any], typed_keys: Collection[str]) -> Iterator[str]:
    """Say what recipes set and nothing reads, in sentences; a recipe may choose otherwise than those it builds on."""
    for name in lineage(cfg.recipe, contents) if cfg.recipe and cfg.recipe in contents else ():
        found: dict[str, list[str]] = {}
        for key, (by, choice) in idle(cfg).items():
            if key not in typed_keys and holds(contents[name], key) and (name == cfg.recipe or by in typed_keys):
                found.setdefault(in_words(by, choice), []).append(key)
        for where, keys in found.items():
            yield f"recipe {name} sets what has no meaning {where}: {', '.join(keys)}"


def holds(data: Any, key: str) -> bool:
    """Say whether nested data set a dotted key."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def job_of_sweep(verb: str, recipes: Mapping[str, Any], words: Sequence[str], number: int) -> CollectConfig:
    """Return the checked configuration of job `number` of a sweep; `recipes`: contents of those that it names."""
    stored = _store(VERBS[verb], verb, {**recipes}, _losses(recipes, [word.partition("=") for word in words]))
    cfg = _job(_composed(verb, [*words], stored), number, False).cfg
    changed = (key for key, leaf in held(cfg).items() if value_at(cfg, key) != leaf.default and key[:6] != "sweep.")
    raise_all(need_typed(VERBS[verb], changed, "sweep.json"))
    raise_all(validate(cfg, {key for key in map(key_of, words) if not key.startswith("hydra.")}))
    return cfg


def _losses(contents: Mapping[str, Any], given: Iterable[tuple[str, Any, Any]]) -> set[str]:
    """Return the names of losses among words and recipes, and other choices that recipes make."""
    named = {value for key, _, value in given if key == "loss"}
    return named | {name for data in contents.values() for name in overridden(data.get("defaults", [])).values()}


def drop(node: DictConfig, keys: Iterable[str]) -> None:
    """Remove keys from a tree."""
    for key in keys:
        branch, _, name = key.rpartition(".")
        holder = OmegaConf.select(node, branch) if branch else node
        with flag_override(holder, ["struct", "readonly"], [False, False]):
            del holder[name]


def _sweep(ready: CheckedCommand, recipes: Any, problems: list[Problem]) -> tuple[Checked, ...]:
    """Return the overrides of a sweep, those included that a recipe asks for in `hydra.sweeper.params`."""
    typed_keys = {item.key for item in ready.checked}
    chosen = [item for item in ready.checked if item.key == "recipe"][-1:]
    schema = VERBS[ready.verb]
    asked = {name: _params(schema, name, ready.contents) for item in chosen for name in item.values if name}
    if len(asked) > 1:
        for name, wanted in asked.items():
            if own := [f"{key}={value}" for key, value in wanted.items() if key not in typed_keys]:
                what = f"a sweep over recipes leaves out the sweep of recipe {name}"
                problems.append(Problem(what, f"add {' '.join(own)}"))
        asked = {}
    texts = [f"{key}={value}" for wanted in asked.values() for key, value in wanted.items() if key not in typed_keys]
    params, bad = check_overrides(schema, texts, recipes, multirun=True)
    problems += bad
    for item in params:
        problems += [p for v in item.values for p in guard.check_places({item.key: v}, guard.SWEEPER_PARAMS)]
    for item in ready.checked:
        if item.key == _OWN_FOLDER:
            problems.append(Problem(f"{_OWN_FOLDER} is the folder of one run", "use hydra.sweep.dir=... for a sweep"))
        elif item.key == SWEEP_FOLDER and item.sweeps:
            problems.append(Problem(f"{item.text!r}: a sweep lies in one folder", "give one, and sweep over run.dir"))
        elif item.key.startswith("sweep.") and item.sweeps:
            problems.append(Problem(f"{item.text!r}: a sweep is run in one way", "give one value"))
    if (jobs := math.prod(map(len, axes((*params, *ready.checked))))) > MAX_JOBS:
        problems.append(Problem(f"this sweep would run {jobs:,} jobs", f"sweep over at most {MAX_JOBS:,}"))
        return ready.checked[:0]
    return (*params, *ready.checked)


def _of_one_job(text: str, overrides: Iterable[Checked]) -> str | None:
    """Return the first interpolation in a sweep's folder that only a job can tell."""
    swept = tuple(f"{item.key}." for item in overrides if item.sweeps)
    read = re.findall(r"\$\{([\w.]+:?)", text)
    return next((f"${{{x}}}" for x in read if f"{x}.".startswith(swept) or x == "hydra:"), None)


def _params(schema: type, name: str, contents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The sweep that a recipe asks for, on top of those that it builds on: the values of each key as they are typed."""
    asked: dict[str, str] = {}
    for step in lineage(name, contents) if name in contents else ():
        given = ((contents[step].get("hydra") or {}).get("sweeper") or {}).get("params") or {}
        asked |= {key: value if isinstance(value, str) else spell(value) for key, value in flat(schema, given)}
    return asked


def _read(schema: type, chosen: list[str], recipes: dict[str, Recipe]) -> tuple[dict[str, Any], list[Problem]]:
    """Contents of the chosen recipes and of those they build on, and what is wrong with them."""
    contents: dict[str, Any] = {}
    problems: list[Problem] = []
    waiting = [(name, "") for name in dict.fromkeys(chosen)]
    while waiting:
        name, typed = waiting.pop()
        if name in contents:
            continue
        try:
            data = guard.read_yaml(recipes[name].path)
        except ConfigError as error:
            problems.append(Problem(str(error)))
            continue
        found = check_recipe(schema, recipes[name], data, recipes)
        by_way = f"{typed} (by way of {name}): " if typed else ""
        problems += [problem._replace(where=f"{by_way}{problem.where}") for problem in found]
        contents[name] = with_whole_numbers(schema, data)
        waiting += [(parent, typed or name) for parent in parents(data) if parent in recipes]
    if not problems:
        for name in chosen:
            lineage(name, contents)
    return contents, problems


def _store(schema: type, verb: str, contents: dict[str, Any], losses: Collection[str]) -> str:
    """Tell Hydra's store our schema, recipes as they were read, and choices without a file; return both as text."""
    store = ConfigStore.instance()
    if getattr(store.repo.get(f"{verb}_schema.yaml"), "provider", None) != "rlcli":  # storing it takes 20 ms
        store.store(name=f"{verb}_schema", node=of_all_choices(schema), provider="rlcli")
    store.store(group="recipe", name="null", node={}, provider="rlcli")  # there is such a group, even without recipes
    for name, data in contents.items():
        hydra = {key: x for key, x in (data.get("hydra") or {}).items() if key != "sweeper"}  # `_sweep` reads that
        node = {**data, "hydra": hydra, "recipe": name}
        store.store(group="recipe", name=name, node=node, package="_global_", provider="recipe")
    conf, kinds = shipped("conf"), registry.KIND_OF
    bare = {
        group: [name for name in (*ours, *(registry.users_names(kinds[group]) if group in kinds else ()))
                if not (conf / group / f"{name}.yaml").exists()]
        for group, ours in CHOICES.items()
    }  # fmt: skip
    for group, names in bare.items():
        for name in names:
            if getattr(store.repo.get(group, {}).get(f"{name}.yaml"), "provider", None) != "registry":
                store.store(group=group, name=name, node={"kind": name}, provider="registry")
    stored = [name for name in bare["loss"] if name in losses and registry.part("algorithm", name).off_policy]
    for name in stored:  # it has a storage and a sampler of stored rows
        defaults = [{f"override /{group}": choice} for group, choice in STORED.items()]
        node = {"defaults": defaults, "loss": {"kind": name}}
        store.store(group="loss", name=name, node=node, package="_global_", provider="algorithm")
    return repr((contents, bare, stored))


def _composed(verb: str, overrides: list[str], stored: str) -> DictConfig:
    """The tree of a command: its choices, which take nine tenths of the time and are kept, and its values on top."""
    chosen = [text for text in overrides if _is_choice(VERBS[verb], text)]
    if any(_OF_HYDRA.search(text) for text in (*overrides, stored)):  # its record of the command holds values, too
        return compose_tree(verb, overrides)
    return _with_values(verb, pickle.loads(_choices(verb, tuple(chosen), stored)), overrides)


def _with_values(verb: str, node: DictConfig, overrides: Iterable[str]) -> DictConfig:
    """The tree with the values that were typed, put as Hydra puts them, but that `{}` leaves nothing of a mapping."""
    try:
        for override in (parsed(text) for text in overrides if not _is_choice(VERBS[verb], text)):
            key, value, added = override.key_or_group, override.value(), override.is_force_add()
            OmegaConf.update(node, key, value, merge=value != {}, force_add=added)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _not_composed(error) from None
    return node


def _job(node: DictConfig, number: int | None, own: bool) -> Job:
    """Return job `number` of a sweep, or the only one, from its tree; with its `run.dir` where that is known."""
    record = HydraConfig.instance()
    outer, folder = record.cfg, None
    try:
        chosen = dict(node.hydra.runtime.choices)
        if number is not None:
            hydra = node.hydra
            record.cfg = cast(Any, SimpleNamespace(hydra=hydra))  # here `${hydra:...}` looks
            with flag_override(hydra, ["struct", "readonly"], [False, False]):  # as its launcher does before a job
                hydra.job.num, hydra.job.id = number, str(number)
                folder = os.path.join(str(hydra.sweep.dir), str(hydra.sweep.subdir))
                hydra.runtime.output_dir = os.path.abspath(folder)
        elif own:
            folder = str(node.hydra.run.dir)
        drop(node, ["hydra"])
        cfg = as_object(node)
        if folder is not None and cfg.run.dir is None:
            cfg.run.dir = node.run.dir = folder
        return Job(node, cfg, chosen)
    except OmegaConfBaseException as error:
        raise _not_composed(error) from None
    finally:
        record.cfg = outer


def _is_choice(schema: type, text: str) -> bool:
    key = key_of(text)
    return key == "recipe" or f"{key}.kind" in leaves(schema) or key.startswith("hydra")


@lru_cache(maxsize=256)
def _choices(verb: str, chosen: tuple[str, ...], stored: str) -> bytes:
    """Return the tree of a verb's choices, pickled, from what the store holds."""
    return pickle.dumps(compose_tree(verb, list(chosen)))


def compose_tree(verb: str, overrides: list[str]) -> DictConfig:
    """Return the tree of a command with Hydra's own branch."""
    outer = GlobalHydra.instance().hydra  # one application a process: a caller that is one itself gets it back
    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda memo: store  # copied for each composition, only to read: a sixth of its time
    try:
        with initialize_config_dir(str(shipped("conf")), job_name=verb, version_base=HYDRA_VERSION_BASE):
            node = hydra_compose(verb, overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _not_composed(error) from None
    finally:
        del vars(store)["__deepcopy__"]
        # composing has put another object into the place of the one that was cleared
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)
    return _with_values(verb, node, overrides)


def _not_composed(error: Exception) -> ConfigError:
    """Return the deepest cause, and the file in which Hydra met it, which it names in a line of its own."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    where = re.match(r"In '([^']+)': .*:\n", text := str(cause))
    reason = " ".join(text[where.end() if where else 0 :].partition("\n")[0].split())
    return ConfigError("the configuration cannot be composed", where=where and where[1], why=reason)
