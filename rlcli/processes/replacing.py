"""Workers that are lost are replaced: a few times now and then, not for ever, and a successor is told what they were.

Nothing here knows where workers are: a group starts them, and carries orders to them. What all workers were told once,
and whoever comes later has to be told again, is the group's setup log: ordered calls, made anew for a successor with
what their owner knows by then.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rlcli.errors import ArgumentError, ConfigError, EnvError, NumericsError, in_words

POLICIES = ("raise", "restart")  # what becomes of a worker that ends, hangs, or whose env raises
NOT_REPLACED = (ArgumentError, ConfigError, NumericsError)  # no env's fault: another process would raise them too
BUILDING = 60.0  # seconds at least that a new worker has to make its envs in, where there is a limit on steps
RESTARTS, WINDOW = 5, 60.0  # each so many times in so many seconds, or with nothing collected: it would go on for ever


class Lost(Exception):
    """Report how a worker that was to answer ended; `late`: seconds after which it was killed for that."""

    def __init__(self, index: int, how: str, late: float | None = None) -> None:
        super().__init__(how)
        self.index, self.how, self.late = index, how, late


class Owner:
    """Tell a group of the workers that it has; a group refers to its owner weakly."""

    name = "env"
    fix = ""  # for a worker that was replaced too often
    standing_still = "not answering"  # what a worker is killed after

    def place(self, index: int) -> str:
        """Name a worker and its envs, in a sentence."""
        return f"worker {index}"

    def limit(self, index: int) -> float | None:
        """Return the seconds after which a worker that owes an answer and stands still is killed."""
        return None

    def progress(self, index: int, turn: int) -> object:
        """Return what differs from before where a worker that owes the answer of this turn does not stand still."""
        return turn

    def stands_still(self, index: int, seconds: float) -> None:
        """Say that a worker without a limit has stood still for long."""

    def collected(self, index: int) -> int:
        """Count frames of a worker: restarts with none between them are too many at some time."""
        return 0

    def refusal(self, lost: Lost) -> Exception:
        """Return what is raised for a lost worker that is not replaced."""
        return lost

    def replaced(self, index: int, why: str) -> None:
        """Count a worker whose process has ended, and in whose place another was started."""

    def go_on(self, index: int) -> None:
        """Give a worker that replaces one the orders after those of the setup log; those that it fails end it."""


Call = Callable[[Any, Sequence[int]], list[Any]]  # orders of an owner to some of its workers; returns the answers


class ReplacingGroup:
    """Base of groups: the setup log, and one way to replace, refuse and count; with `goes_on` workers are replaced."""

    def __init__(self, owner: Owner, on_error: str) -> None:
        self._owner: Any = weakref.proxy(owner)
        self.goes_on = on_error == "restart"
        self.failed: dict[int, BaseException] = {}  # workers that are lost, or raised, until they are replaced
        self._log: dict[str, Call] = {}
        self._restarts = Restarts()
        self._given_up: EnvError | None = None
        self.preparing: int | None = None  # the worker that is told what the setup log says

    # ---- what a kind of group does -------------------------------------------------------------------------------
    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        raise NotImplementedError

    def _start_another(self, index: int) -> None:
        """End a worker, and start another in its place; what it was to answer is dropped."""
        raise NotImplementedError

    def limit(self, index: int) -> float | None:
        """Return the seconds that a worker may stand still in while it owes an answer."""
        limit = self._owner.limit(index)
        return limit if limit is None or self.preparing != index else max(BUILDING, limit)

    # ---- what all are told ---------------------------------------------------------------------------------------
    def call(self, call: Call, *, replaces: bool = False) -> list[Any]:
        """Have all workers carry out a call, anew where one was lost and replaced; with `replaces` or raised."""
        try:
            self.refuse_given_up()
            answers = call(self._owner, range(len(self)))
            while self.failed:
                for cause in self.failed.values():
                    if not (replaces or isinstance(cause, Lost)):
                        raise cause
                for index in self.replace_failed():
                    (answers[index],) = call(self._owner, [index])
            return answers
        except Lost as lost:
            raise self._owner.refusal(lost) from None
        finally:
            for index, cause in list(self.failed.items()):
                if not isinstance(cause, Lost):  # who raised something can be given another order
                    del self.failed[index]

    def set_up(self, name: str, call: Call, *, replaces: bool = False) -> list[Any]:
        """Do as `call`, and keep it in the setup log, in the place of what had this name."""
        answers = self.call(call, replaces=replaces)
        self._log[name] = call
        return answers

    # ---- who replaces a worker -----------------------------------------------------------------------------------
    def replace_failed(self) -> list[int]:
        """Replace all that failed; return them."""
        new = set()
        while self.failed:
            index, cause = next(iter(self.failed.items()))
            self.replace(index, cause)
            new.add(index)
        return sorted(new)

    def replace(self, index: int, cause: BaseException | None) -> None:
        """Put another worker in the place of one that failed, and bring it to where that was; or raise."""
        while cause is not None:
            self._replace(index, cause)
            cause = self._prepare(index)

    def _replace(self, index: int, cause: BaseException) -> None:
        self.refuse_given_up()
        if isinstance(cause, NOT_REPLACED):
            if self.failed.get(index) is cause:  # the worker lives
                del self.failed[index]
            raise cause
        owner = self._owner
        if not (self.goes_on and self.is_open):
            raise owner.refusal(cause) from None
        try:
            why = self._restarts.another(
                owner.name, index, owner.place(index), cause, collected=owner.collected(index), fix=owner.fix
            )
        except EnvError as error:  # nobody waits for the others
            self._given_up = error
            raise
        self._start_another(index)
        self.failed.pop(index, None)
        owner.replaced(index, why)

    def _prepare(self, index: int) -> BaseException | None:
        """Tell a new worker what all were told; return why that failed."""
        self.preparing = index
        try:
            for call in (*self._log.values(), lambda owner, _: owner.go_on(index)):
                call(self._owner, [index])
                if (cause := self.failed.get(index)) is not None:
                    break
        except Lost as lost:
            raise self._owner.refusal(lost) from None
        except BaseException:
            self.failed[index] = Lost(index, "was interrupted while it was made")
            raise
        finally:
            self.preparing = None
        if cause is not None and not isinstance(cause, Lost):  # half of it was made, replaced now or later
            self.failed[index] = Lost(index, f"raised {in_words(cause)}")
        return cause

    def refuse_given_up(self) -> None:
        """Raise where workers are not replaced any more: the others may be busy for long."""
        if self._given_up is not None:
            raise self._given_up


class Restarts:
    """Count replacements of each worker: what ends all of them (a killed fork server) is one event for each."""

    def __init__(self) -> None:
        self._times: dict[int, list[tuple[float, int]]] = {}
        self._first_causes: dict[int, str] = {}

    def another(self, name: str, worker: int, who: str, cause: BaseException, *, collected: int, fix: str) -> str:
        """Count a replacement; return what became of the worker, or raise EnvError for one time too many."""
        lost = isinstance(cause, Lost)
        sentence = f"{who} {cause.how if isinstance(cause, Lost) else f'raised {in_words(cause)}'}"
        now = time.monotonic()
        before = self._times.get(worker, [])
        times = [*((then, had) for then, had in before if now - then < WINDOW or had == collected), (now, collected)]
        self._times[worker] = times
        if len(times) == 1:
            self._first_causes[worker] = sentence
        if len(times) > RESTARTS:
            raise EnvError(
                f"a worker was restarted more than {RESTARTS} times "
                + (f"in {WINDOW:.0f} s" if now - times[0][0] < WINDOW else "without a result"), where=name,
                why=f"the first time: {self._first_causes[worker]}", fix=fix,
            ) from (None if lost else cause)  # fmt: skip
        return sentence
