"""A ratchet on the size of the house: what was measured once is not exceeded.

A commit may lower a bound. Raising one takes a line in `PAID` that says which feature the growth is for.
"""

import ast
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from operator import sub
from pathlib import Path

from forked_programs import run_forked
from test_layers import PACKAGE, layer_of, modules, nodes, part_of

# room -> lines, files
ROOMS = {
    "__main__": (7, 1), "algorithms": (571, 8), "api": (295, 1), "arguments": (73, 1), "bench": (1151, 9),
    "build": (2739, 18), "cli": (2366, 19), "collectors": (9126, 40), "compat": (82, 1), "config": (4309, 19),
    "data": (13838, 69), "envs": (2856, 13), "errors": (168, 1), "exports": (40, 1), "graphs": (343, 6),
    "imports": (103, 1), "inspection": (721, 4), "jobs": (1239, 7), "kernels": (5791, 40), "keys": (93, 1),
    "learning": (2823, 14), "modules": (4408, 21), "objectives": (4421, 21), "planning": (1450, 6),
    "processes": (2304, 15), "recognise": (70, 1), "report": (2903, 15), "rlcli": (37, 1), "runs": (1560, 8),
    "specs": (901, 6), "transforms": (2850, 13), "typed": (238, 1), "vec_envs": (3642, 18),
    "weight_update": (1292, 11),
}  # fmt: skip
MACHINE = 10  # functions by which machines differ: control groups, cores, terminals
WALKS = {
    "ppo_exact": (802, 129),
    "dqn_cartpole": (864, 145),
}  # recipe -> functions, files entered before the first step
CONFIGURED = 0  # files outside of config, build and cli that name cfg or a type of the configuration
TWICE = 0  # names of two classes
MATCHES = 226  # error sentences that tests spell
PRIVATE_WORDS = 3406  # lines of docstrings of names that no package exports
PAID: dict[str, str] = {  # bound that was raised -> the feature that pays for it
    "exports": "files of kernels are imported when somebody first names them, by one line for eight functions",
    "runs": "files of rows and states are loaded when the first is written",
    "arguments": "one reader of each kind of argument, for fourteen of their own",
    "algorithms": "DQN.objective takes a user's loss class",
    "planning": "advice tries each update once",
    "keys": "names of differences, which six rooms spell without loading their codec",
    "config": "a dataclass a choice: what each reads, and what does not fit, stands in it",
    "cli, runs, config, PRIVATE_WORDS, WALKS": "sweeps side by side that are noted, listed and resumed",
    "collectors, processes, config, cli, weight_update": "collectors on Ray, torch.distributed and RPC",
    "build, jobs, learning, objectives, planning, report": "a learner of several ranks",
    "bench, data, transforms, vec_envs": "one watchdog says which call hangs; a meta cat that imports no sympy",
    "rlcli": "compat.py stands for nine files of aliases",
    "specs": "one Field for vec_envs, transforms, collectors, data and plans, which lost more than it takes",
    "envs, jobs, transforms, vec_envs": "import it, and take a user's pairs of shape and dtype for one",
    "WALKS, files": "arguments.py, specs/field.py, and next_obs/modes.py, which says what schema.py said of modes",
    "build, jobs": "RunEnvs and RunStorage: planning is given values, and lost more lines than these take",
    "ROOMS, algorithms, build": "imports of one branch stand in it: what a run does not use is not loaded",
    "jobs, processes, runs": "ranks of torchrun over nodes, one checkpoint of all; hung ranks end with rank 0",
    "modules": "evaluation_mode, which learning had",
    "WALKS, report": "a view that shows nothing is a View, too, so its rows are defined at the start",
    "graphs, kernels, collectors, PRIVATE_WORDS, WALKS": "acting, updates and recurrent layers as graphs of a GPU",
    "learning, objectives, build, data, planning, transforms, algorithms": "updates and replay on a GPU",
    "collectors, envs": "envs of tensors on a device, a user's or JAX's; rows that acting took there stay",
    "build, planning, report, WALKS": "device=auto measures both sides; plans of a GPU count graphs and libraries",
    "graphs, learning, objectives files, kernels files": "the value stage, every optimizer and DQN as graphs",
    "recognise": "whether a class of ours is fast follows from its base: thirty classes no longer say so",
    "ROOMS, modules": "what recurrent layers save for a backward pass is counted by them, not by report",
}


def measured_rooms() -> dict[str, tuple[int, int]]:
    """Lines and files of each room."""
    lines, files = Counter[str](), Counter[str]()
    for name, path in modules():
        room = part_of(name) or "rlcli"
        lines[room] += path.read_text(encoding="utf-8").count("\n")
        files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(files)}


COUNTING = """
import json, os, sys
from rlcli.cli.main import main

root, words = {root!r}, {words!r}
seen = set()

class Stepped(BaseException):
    pass

def count(frame, event, arg):
    code = frame.f_code
    if event != "call" or code.co_name.startswith("<"):
        return
    if code.co_filename.startswith(root):
        seen.add((code.co_filename, code.co_qualname))
    elif code.co_name == "step" and "torch/optim/" in code.co_filename:
        sys.setprofile(None)
        print(json.dumps([len(seen), len({{file for file, _ in seen}})]), flush=True)
        os._exit(0)

sys.argv = ["rlcli", *words]
sys.setprofile(count)
main()
"""


def measured_walks(folder: Path, recipes: Iterable[str] = WALKS) -> dict[str, tuple[int, int]]:
    """Functions and files of rlcli that are entered from the first line of the command to torch's first step."""
    programs = {}
    for recipe in recipes:
        place = Path(tempfile.mkdtemp(dir=folder))
        words = ["train", f"recipe={recipe}", f"run.dir={place / 'run'}", "console=off", "logger=none"]
        programs[recipe] = (COUNTING.format(root=f"{PACKAGE}{os.sep}", words=words), place)
    found = {}
    for recipe, ran in run_forked(programs, Path(tempfile.mkdtemp(dir=folder))).items():
        assert ran.returncode == 0, ran.stderr
        functions, files = json.loads(ran.stdout.splitlines()[-1])
        found[recipe] = functions, files
    return found


def configured() -> list[str]:
    """Files that know the configuration though they are below it."""
    found = []
    for name, path in modules():
        if part_of(name) in ("config", "build", "cli"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == "rlcli.config.schemas":
                found.append(name)
                break
            if (isinstance(node, ast.Name) and node.id == "cfg") or (isinstance(node, ast.arg) and node.arg == "cfg"):
                found.append(name)
                break
    return found


def twice() -> dict[str, int]:
    """Names of classes that stand in more than one place."""
    names = Counter(node.name for _, path in modules() for node in nodes(path) if isinstance(node, ast.ClassDef))
    return {name: times for name, times in names.items() if times > 1}


def offered() -> set[str]:
    """Names that some package of rlcli offers to others."""
    inits = [path for _, path in modules() if path.name == "__init__.py"]
    imports = [node for path in inits for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def private_words() -> int:
    """Lines of docstrings of what no package offers, methods of a public class with an underscore included."""
    public, lines = offered(), 0

    def walk(node: ast.AST, exported: bool) -> None:
        nonlocal lines
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            shown = (exported or child.name in public) and not (child.name.startswith("_") and child.name[:2] != "__")
            if not shown and ast.get_docstring(child, clean=False) is not None:
                text = child.body[0]
                lines += (text.end_lineno or 0) - text.lineno + 1
            walk(child, shown and isinstance(child, ast.ClassDef))

    for _, path in modules():
        walk(nodes(path)[0], False)
    return lines


def matches() -> int:
    """Error sentences that the tests spell."""
    return sum(
        len(re.findall(r"\bmatch=", path.read_text(encoding="utf-8"))) for path in Path(__file__).parent.rglob("*.py")
    )


def test_rooms_do_not_grow():
    found = measured_rooms()
    grown = {
        room: (size, ROOMS.get(room))
        for room, size in found.items()
        if max(map(sub, size, ROOMS.get(room, (0, 0)))) > 0
    }
    assert not grown, f"lines and files, and what they may be: {grown}"


def test_the_walk_to_the_first_step_gets_no_longer(tmp_path):
    def longer(found):
        return {
            recipe: (functions, files)
            for recipe, (functions, files) in found.items()
            if functions > WALKS[recipe][0] + MACHINE or files > WALKS[recipe][1] + 1
        }

    grown = longer(measured_walks(tmp_path))
    if grown:  # the first one may have compiled what was not compiled yet
        grown = longer(measured_walks(tmp_path, grown))
    assert not grown


def test_the_configuration_stays_where_it_is_known():
    assert len(configured()) <= CONFIGURED, configured()


def test_nothing_below_build_knows_the_configuration():
    assert not [name for name in configured() if layer_of(part_of(name)) < layer_of("build")]


def test_no_more_names_have_two_classes():
    assert len(twice()) <= TWICE, twice()


def test_tests_spell_no_more_error_sentences():
    assert matches() <= MATCHES


def test_private_names_need_no_more_words():
    assert private_words() <= PRIVATE_WORDS


if __name__ == "__main__":  # what stands now: python tests/test_house.py
    print("ROOMS =", measured_rooms())
    with tempfile.TemporaryDirectory() as folder:
        print(measured_walks(Path(folder)))
    print(len(configured()), len(twice()), matches(), private_words())
