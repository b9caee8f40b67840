"""Every refusal says more than what is wrong: why, where or what to type next; and a value is refused by its name."""

import ast
import re
from collections.abc import Iterator

from test_layers import modules, nodes

from rlcli import errors

KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RlcliError)}
ENOUGH = {  # sites whose first words say it all: two things that exclude each other, or one that needs another
    "spelled", "run_folder", "_unknown_verb", "own_length", "read_text", "raise_all", "lineage", "stacked_among",
    "_check", "MultiAsyncCollector.__init__", "CollectorOptions.next_obs_mode", "CollectorOptions.trajectories",
    "CollectorOptions._check_split", "HeldRows.put_back",
    "EnvBase.rollout", "Composite.__delitem__", "MapTransform.__init__",
}  # fmt: skip
IN_WORDS = {  # sites that call an argument what it is: rows, a shape, an env
    "run", "_numbered", "check_fit", "_need_live", "RingLayout.check", "make_native",
    "BootstrappedLoss.make_value_estimator", "lane_shape_of", "save", "Successors.checked", "Collector.fill",
    "ReplayBuffer.__setitem__", "need_draw", "need_rows", "as_batch",
    "TransformedEnv.__init__", "RegionWriter._checked", "PolicyContext.outputs",
}  # fmt: skip
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def kinds(trees: list[ast.AST]) -> set[str]:
    """Names by which errors are made: the classes, those that a room derives from them with no words of their own."""
    return (
        KINDS
        | {"refuse"}
        | {
            node.name
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and any(isinstance(base, ast.Name) and base.id in KINDS for base in node.bases)
        }
    )


def called(call: ast.Call) -> str | None:
    """Return `refuse` or `ArgumentError`, by whatever module it is reached; a method of an object is another."""
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id != "self":
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def sites(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, list[ast.AST], ast.Call]]:
    """Yield where an error is made, the functions and classes around it, and the call that makes it."""

    def inside(node: ast.AST, around: list[ast.AST]) -> Iterator[tuple[str, list[ast.AST], ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and called(child) in names:
                yield ".".join(each.name for each in around if hasattr(each, "name")), around, child
            yield from inside(child, [*around, child] if isinstance(child, FUNCTIONS | ast.ClassDef) else around)

    yield from inside(tree, [])


def arguments(around: list[ast.AST]) -> set[str]:
    """What a caller may have given: parameters of the functions around, and those and the fields of their classes."""
    found = set()
    for node in around:
        for each in [node, *(node.body if isinstance(node, ast.ClassDef) else ())]:
            if isinstance(each, FUNCTIONS):
                taken = each.args
                found |= {arg.arg for arg in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]}
            elif isinstance(each, ast.AnnAssign):
                found.add(ast.unparse(each.target))
    return found - {"self", "cls"}


def wanting(trees: list[ast.AST]) -> tuple[set[str], set[str]]:
    """Sites that say only what is wrong, and those that say what they got and not as which argument."""
    bare, nameless, names = set(), set(), kinds(trees)
    for tree in trees:
        for where, around, call in sites(tree, names):
            given = {word.arg: word.value for word in call.keywords}
            if not given.keys() & {"why", "where", "fix", None}:
                bare.add(where)
            what = call.args[called(call) == "refuse"] if call.args else call
            computed = any(not isinstance(node, ast.Constant) for node in ast.walk(what) if isinstance(node, ast.expr))
            if computed or "got" not in re.findall(r"\w+", ast.unparse(given.get("why", what))):
                continue
            texts = [
                node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            words = set(re.findall(r"[\w.=]+", " ".join(texts)))
            if not arguments(around) & words and not any(re.search(r"\w[_.=]\w", word) for word in words):
                nameless.add(where)
    return bare, nameless


def test_every_refusal_says_why_where_or_what_to_type():
    bare, nameless = wanting([nodes(path)[0] for _, path in modules()])
    assert not bare - ENOUGH
    assert not nameless - IN_WORDS
    assert bare == ENOUGH and nameless == IN_WORDS, "these say more now, or are gone: take them off the lists"


def test_what_says_too_little_is_found():
    planted = ast.parse(
        "def give(count, error=None):\n"
        "    if count < 0:\n"
        "        raise ArgumentError('this cannot be', why=f'got {self.n}')\n"
        "    refuse(count > 9, 'count is too large')\n"
        "    refuse(count > 8, 'count is too large', why=f'got {count}')\n"
        "    return errors.EnvError('broken')\n"
        "class Own(DamagedDataError): ...\n"
        "def read():\n"
        "    raise Own('torn')\n"
    )
    bare, nameless = wanting([planted])
    assert bare == {"give", "read"}
    assert nameless == {"give"}
