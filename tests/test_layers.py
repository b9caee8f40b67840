"""Imports only go down: from layers below, never from a sibling of the same layer, and never in a circle of files."""

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from face import INSIDE

PACKAGE = Path(__file__).parents[1] / "rlcli"

LAYERS = [
    {"compat", "errors", "keys", "exports", "imports", "recognise"},
    {"typed", "arguments"},
    {"graphs"},
    {"specs", "kernels", "config", "processes"},
    {"vec_envs", "transforms"},
    {"envs", "modules", "data"},
    {"objectives", "weight_update"},
    {"collectors"},
    {"report"},
    {"runs"},
    {"learning"},
    {"algorithms"},
    {"planning", "inspection"},
    {"jobs"},
    {"build"},
    {"api"},
    {"bench"},
    {"cli"},
]
EXEMPT = {"rlcli", "rlcli.__main__"}
OTHER_FRAMEWORKS = {"torchrl", "stable_baselines3", "cpprb", "tianshou", "rlpyt", "ray"}


def part_of(module: str) -> str:
    """The room a module is in: `rlcli.envs.gym_env` -> `envs`."""
    return module.removeprefix("rlcli").lstrip(".").split(".")[0]


def layer_of(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"{part} is in no layer; give it one in tests/test_layers.py and in the README")


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Everything that a file says; it is kept, and to look through it for garbage took most of the time."""
    gc.disable()
    said = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    gc.freeze()
    gc.enable()
    return said


def imported(path: Path, module: str) -> Iterator[str]:
    """Every module that a file imports, inside functions and for type checkers too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from rlcli import bench` and `from rlcli.envs import base` import modules, and nothing of the package
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from (name if _is_module(name) else source for name in names)


@functools.cache
def _is_module(name: str) -> bool:
    place = PACKAGE.parent.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def breaches(module: str, imports: Iterator[str]) -> list[str]:
    if module in EXEMPT:
        return []
    here = part_of(module)
    found = []
    for target in imports:
        if target == "rlcli" or not target.startswith("rlcli."):
            continue
        there = part_of(target)
        if not (layer_of(there) < layer_of(here) or there == here):
            found.append(f"{module} (layer {layer_of(here)}) imports {target} (layer {layer_of(there)})")
    return found


def test_imports_only_go_down():
    found = [line for module, path in modules() for line in breaches(module, imported(path, module))]
    assert not found, "\n".join(found)


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of files that import each other, each file by way of the others."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen, ahead = set[str](), [module]
        while ahead:
            new = imports.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        reached[module] = seen
    found = [{other for other in seen if module in reached.get(other, ())} for module, seen in reached.items()]
    return [group for i, group in enumerate(found) if group and group not in found[:i]]


def test_no_files_import_each_other():
    """What is only for type checkers counts too: who reads one file of a circle has to read them all."""
    names = {module for module, _ in modules()}
    found = circles({module: {*imported(path, module)} & names for module, path in modules()})
    assert not found, "\n".join(", ".join(sorted(group)) for group in found)


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_other_frameworks_are_imported_only_by_peers_and_ray_by_its_collectors():
    found = [
        f"{module} imports {target}"
        for module, path in modules()
        if not module.startswith("rlcli.bench.peers")
        for target in imported(path, module)
        if (other := target.split(".")[0]) in OTHER_FRAMEWORKS
        and not (other == "ray" and module.startswith("rlcli.collectors.distributed"))
    ]
    assert not found, "\n".join(found)


def test_processes_that_meet_do_so_in_few_files():
    """torch.distributed: the ranks of a learner, and collectors that are distributed."""
    allowed = ("rlcli.learning.ranks", "rlcli.jobs.ranks", "rlcli.collectors.distributed", "rlcli.bench.peers")
    found = [
        f"{module} imports {target}"
        for module, path in modules()
        if not module.startswith(allowed)
        for target in imported(path, module)
        if target.startswith("torch.distributed")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "heavy"),
    [
        ("config", {"torch", "tensordict"}),
        ("vec_envs", {"torch", "tensordict", "hydra", "omegaconf", "rich"}),
        ("processes", {"torch", "tensordict", "hydra", "omegaconf", "rich", "gymnasium"}),
    ],
)
def test_rooms_that_work_without_torch_do_not_import_it(room, heavy):
    found = [
        f"{module} imports {target}"
        for module, path in modules()
        if part_of(module) == room
        for target in imported(path, module)
        if target.split(".")[0] in heavy
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("rlcli.kernels.scan.cpu", "rlcli.envs.gym_env"),
        ("rlcli.data.collected", "rlcli.envs"),
        ("rlcli.config.validate", "rlcli.cli.main"),
        ("rlcli.learning.loops", "rlcli.build.train"),
        ("rlcli.config.validate", "rlcli.build.env"),
        ("rlcli.planning.plan", "rlcli.inspection.found"),
        ("rlcli.bench.train", "rlcli.cli.main"),
        ("rlcli.typed", "rlcli.specs"),
    ],
)
def test_a_breach_is_seen(module, target):
    assert breaches(module, iter([target]))


# ---- the tests' face ----------------------------------------------------------------------------------------------
def past_their_face(path: Path, inside: dict[str, str]) -> list[str]:
    """What a test imports of a module though tests have a face for it."""
    return [
        f"{path.name}: {alias.name} of {node.module}"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in inside.get(node.module or "", "").split()
    ]


def test_tests_reach_what_many_need_by_their_face(tmp_path):
    own = {"kernels", "bench"}
    processes = {"preloaded.py", "weight_workers.py"}  # loaded where nothing of tests is on the path, or pytest is dear
    paths = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in processes]
    assert not [line for path in paths if not own & {*path.parts} for line in past_their_face(path, INSIDE)]
    (tmp_path / "past.py").write_text("from rlcli.specs.field import OWN, Field\n")
    assert past_their_face(tmp_path / "past.py", INSIDE) == ["past.py: Field of rlcli.specs.field"]


# ---- the collector's face ----------------------------------------------------------------------------------------
def reached_through(said: Iterable[ast.AST], face: set[str]) -> list[str]:
    """Attributes of anything called `collector` that are not among its public ones; `cfg.collector` is a group."""
    return [
        ast.unparse(node)
        for node in said
        if isinstance(node, ast.Attribute)
        and node.attr not in face
        and (
            (isinstance(node.value, ast.Name) and node.value.id == "collector")
            or (isinstance(node.value, ast.Attribute) and node.value.attr == "collector")
        )
        and not ast.unparse(node.value).endswith("cfg.collector")
    ]


def face_of_collectors() -> set[str]:
    """What `Collector` declares: methods, properties and annotated attributes; what `__init__` only sets is its own."""
    from rlcli.collectors import Collector

    names = {name for kind in Collector.__mro__[:-1] for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


def test_other_rooms_speak_to_a_collector_through_its_face():
    face = face_of_collectors()
    assert {"deliver", "envs", "schema", "frames"} <= face
    assert not face & {"engine", "vec_env", "rng", "ids", "placement"}
    found = [
        f"{module}: {reach}"
        for module, path in modules()
        if part_of(module) != "collectors"
        for reach in reached_through(nodes(path), face)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("reach", ["collector.engine", "self.collector.vec_env.n", "loop.collector._thread"])
def test_reaching_through_a_collector_is_seen(reach):
    assert reached_through(ast.walk(ast.parse(f"x = {reach}")), {"envs"})
    assert not reached_through(ast.walk(ast.parse("y = cfg.collector.seed")), {"envs"})
