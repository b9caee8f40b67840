"""`@check`: what makes a function one of the checks that `validate` goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rlcli.config.problem import Problem

Check = TypeVar("Check", bound=Callable[[Any], Iterable[Problem]])

CHECKS: dict[Callable[[Any], Iterable[Problem]], tuple[str, ...]] = {}  # with where the keys begin that each reads


def check(*reads: str) -> Callable[[Check], Check]:
    """Add a check of the typed tree, a `Config` or a `CollectConfig`.

    `reads`: where the keys begin that it reads, as far as one that cannot be used would have it say what is not so; ""
    for any key.
    """

    def added(function: Check) -> Check:
        CHECKS[function] = reads
        return function

    return added
