"""What tests share of rlcli: how it refuses."""

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest


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
