"""The face by which tests reach what many of them need of rlcli's insides, so that a move touches this file alone.

Kernels' unit tests go deeper, and so does what a single room tests of itself.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator

import pytest

INSIDE = {
    "rlcli.build.algorithm": "algorithm_of build_policy",
    "rlcli.build.collector": "build_collector",
    "rlcli.build.env": "build_env",
    "rlcli.cli.main": "main",
    "rlcli.collectors.actors.actor": "FastActor",
    "rlcli.collectors.actors.tensordict": "TensorDictActor",
    "rlcli.config.compose": "configure",
    "rlcli.config.option": "leaves",
    "rlcli.config.recipes": "find_recipes",
    "rlcli.config.resolved": "from_dict",
    "rlcli.config.schemas": "Config VERBS",
    "rlcli.data.files.disk": "Disk",
    "rlcli.data.files.state": "decode_state encode_state",
    "rlcli.data.next_obs.rows": "Rows",
    "rlcli.data.ring.ring": "Ring",
    "rlcli.learning.update": "Update",
    "rlcli.modules.recurrent.modules": "Recurrence",
    "rlcli.processes.channel": "Channel packed unpacked",
    "rlcli.processes.group": "WorkerGroup",
    "rlcli.processes.line": "Line serve",
    "rlcli.processes.worker": "Worker",
    "rlcli.report.reporter": "Reporter",
    "rlcli.runs.folder": "open_run",
    "rlcli.runs.session": "Saver",
    "rlcli.specs.field": "Field",
    "rlcli.vec_envs.make": "GymRecipe",
}


def __getattr__(name: str):
    for module, names in INSIDE.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"{name} is not among what tests share")


@contextlib.contextmanager
def _refused(error: type[Exception] | tuple[type[Exception], ...], words: object) -> Iterator[pytest.ExceptionInfo]:
    with pytest.raises(error) as caught:
        yield caught
    text = str(caught.value)
    each = str(words).split()
    assert each and all(re.search(rf"(\b|(?=\W)){re.escape(word)}(\b|(?<=\W))", text) for word in each), text


def refused(error: type[Exception] | tuple[type[Exception], ...], words: object, call: Callable | None = None):
    """Expect an error of a class that names an argument, its value: each word stands in its text, in whatever sentence.

    With `call`, that is called; else this is the `with` of what is refused.
    """
    if call is None:
        return _refused(error, words)
    with _refused(error, words) as caught:
        call()
    return caught


def refusals(*rows: tuple) -> Callable[..., None]:
    """Make a test of a table whose rows are ([id,] error class, words, call)."""
    ids = [row[0] if isinstance(row[0], str) else row[1] for row in rows]

    @pytest.mark.parametrize(("error", "words", "call"), [row[-3:] for row in rows], ids=ids)
    def refuses(error, words, call):
        refused(error, words, call)

    return refuses
