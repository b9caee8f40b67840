"""Imports only go down: a file imports from layers below it, and siblings do not know each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "rlcli"

LAYERS = [
    {"errors", "keys", "typed", "specs"},
    {"kernels", "transforms", "config"},
    {"envs", "modules", "data"},
    {"objectives", "weight_update"},
    {"collectors"},
    {"report"},
    {"training"},
    {"builders", "jobs", "bench", "cli"},
]
# single files at the bottom, and the parts that put everything together at the top, may use each other
OPEN = (0, len(LAYERS) - 1)
# names from the documents that re-export without code of their own
EXEMPT = {"rlcli", "rlcli.__main__", "rlcli.envs.transforms", "rlcli.envs.utils", "rlcli.data.replay_buffers"}
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


def imported(path: Path, module: str) -> Iterator[str]:
    """Every module that a file imports, inside functions too; names only for type checkers are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            # `from rlcli import bench` and `from rlcli.builders import env` import modules too
            yield from (f"{source}.{alias.name}" for alias in node.names if _is_module(f"{source}.{alias.name}"))


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
        below = layer_of(there) < layer_of(here)
        if not (below or there == here or layer_of(here) == layer_of(there) in OPEN):
            found.append(f"{module} (layer {layer_of(here)}) imports {target} (layer {layer_of(there)})")
    return found


def test_imports_only_go_down():
    found = [line for module, path in modules() for line in breaches(module, imported(path, module))]
    assert not found, "\n".join(found)


def test_other_frameworks_are_imported_only_by_peers():
    found = [
        f"{module} imports {target}"
        for module, path in modules()
        if not module.startswith("rlcli.bench.peers")
        for target in imported(path, module)
        if target.split(".")[0] in OTHER_FRAMEWORKS
    ]
    assert not found, "\n".join(found)


def test_a_configuration_is_checked_without_torch():
    heavy = {"torch", "tensordict"}
    found = [
        f"{module} imports {target}"
        for module, path in modules()
        if part_of(module) == "config"
        for target in imported(path, module)
        if target.split(".")[0] in heavy
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("rlcli.kernels.scan.cpu", "rlcli.envs.gym_env"),
        ("rlcli.data.segments", "rlcli.envs"),
        ("rlcli.config.validate", "rlcli.cli.main"),
        ("rlcli.training.on_policy", "rlcli.builders.env"),
        ("rlcli.config.validate", "rlcli.builders.env"),
    ],
)
def test_a_breach_is_seen(module, target):
    assert breaches(module, iter([target]))
