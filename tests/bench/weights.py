"""`python -m tests.bench weights`: a policy's weights to two worker processes, from published to adopted by both.

Both frameworks' workers do the same: they sleep until they are told, or they act. Then ours look for a new version
between two forwards, and the other framework's receive in a thread beside them. Whoever adopts notes when it has.
Beside that: the processor time of one publication and two adoptions, against the three plain copies that any way needs;
and whether an adopted version was ever torn under stress.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rlcli.bench.harness import Report, Side, interleave, ratio
from rlcli.errors import NumericsError
from rlcli.processes.channel import packed, unpacked
from rlcli.processes.group import WorkerGroup
from rlcli.processes.worker import Worker
from rlcli.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from tests.bench.peers import weights as peers
from tests.bench.weight_workers import (
    ACT,
    COPY,
    NUMBERS,
    OPEN,
    PLAIN,
    RECEIVE,
    STRESS,
    TAKE,
    Plain,
    act,
    cpu_seconds,
    fill,
    net_of,
)

SHARED, TOLD, MESSAGES = "rlcli, acting", "rlcli, asleep", "rlcli, messages"
LEAST = "3 plain copies, asleep"  # what any way takes that wakes the workers and copies: no ratio can be beyond it
THEIRS = ("torchrl, shared memory", "torchrl, messages")
THEIRS_ACTING = "torchrl, shared memory, acting"
CPU, COPIES, FLAT = "cpu: rlcli", "cpu: 3 plain copies", "cpu: 3 flat copies"
WORKERS = 2
_TURN = 0  # of orders whose answers are waited for later


def measure(settings: dict[str, Any]) -> Report:
    """Every size in turn, each in rounds that alternate."""
    report = Report("weights", settings, unit="publication")
    group = WorkerGroup(partial(Worker, "tests.bench.weight_workers:work"), WORKERS)
    try:
        for kilobytes in settings["kilobytes"]:
            _Size(report, settings, group, kilobytes).measure()
    finally:
        group.close()
    return report


class _Size:
    """One net, and all that is measured with it."""

    def __init__(self, report: Report, settings: dict[str, Any], group: WorkerGroup, kilobytes: int) -> None:
        self.report, self.settings, self.group = report, settings, group
        self.hidden = max(int(math.sqrt(kilobytes * 250 + 37**2) - 37), 1)  # h * h + 74 h numbers of 4 bytes
        self.net = net_of(self.hidden)
        self.bytes = sum(p.nbytes for p in self.net.parameters())
        self.name = f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.0f} KB"
        self.version = 0
        self.spent = 0.0  # the clock of the rounds: seconds of what is measured only

    def measure(self) -> None:
        shared, messages = SharedMemWeightSyncScheme(), MultiProcessWeightSyncScheme()
        self.sender = shared.create_sender(f"shared {self.name}", self.net)
        self.carried = messages.create_sender(f"messages {self.name}", self.net)
        self.plain = Plain(self.net)
        for sender in (self.sender, self.carried):
            self._order(OPEN, (sender.handle(), self.hidden, sender.fd is not None), sender.fd)
        self._order(PLAIN, (None, self.hidden, True), self.plain.region.fd)
        self._latency()
        self._processor()
        self._stress()
        self.sender.close()
        self.plain.region.forget_fd()

    def _order(self, kind: int, body: Any, fd: int | None = None) -> list[Any]:
        return self.group.order(kind, packed(body), attachments=[] if fd is None else [fd])

    # ---- published to adopted --------------------------------------------------------------------------------------
    def _latency(self) -> None:
        sides = {SHARED: self._acting, TOLD: self._told, LEAST: self._least, MESSAGES: self._messages}
        theirs = {}
        if self.settings["peers"]:
            for name, scheme in zip(THEIRS, ("SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"), strict=True):
                peer = peers.torchrl_weights(scheme, self.net, WORKERS)
                if peer is None:
                    self.report.leave_out("torchrl")
                    break
                theirs[name] = peer
                sides[name] = self._theirs(peer)
            if theirs:
                sides[THEIRS_ACTING] = self._theirs(theirs[THEIRS[0]], acting=True)
        try:
            measured = self._interleave(sides)
            for sender in (self.sender, self.carried):
                self._check(sender.model_id, sender.version, self._order(NUMBERS, sender.model_id))
            for name, peer in theirs.items():
                peer.send()
                self._check(name, self.version, peer.numbers())
        finally:
            for peer in theirs.values():
                peer.close()
        if theirs:
            bar = ">= 30" if self.bytes < 1e6 else ">= 5"
            faster = min((side for side in measured if side.name in theirs), key=lambda side: side.median)
            self._ratio(measured, faster.name, TOLD, bar)
            self._ratio(measured, faster.name, LEAST)
            self._ratio(measured, THEIRS_ACTING, SHARED, bar)
            self._ratio(measured, THEIRS[1], MESSAGES)
        self._keep(measured)

    def _acting(self) -> None:
        """The workers act, and look for it between two forwards; until the later of them holds it."""
        body = packed(self.sender.model_id)
        for worker in self.group.workers:
            worker.channel.send(ACT, _TURN, body)
        began = self._while_they_act()
        self.sender.send(version=self.version)
        self._until(began, [unpacked(self.group.wait(index, _TURN)[1]) for index in range(WORKERS)])

    def _while_they_act(self) -> int:
        """A publication is about to begin, as after a step of an optimizer; when."""
        time.sleep(0.005)
        fill(self.net, self.version)
        return time.monotonic_ns()

    def _told(self) -> None:
        """The workers sleep until they are told."""
        began = time.monotonic_ns()
        self.sender.send(version=self.version)
        self._until(began, [done for _, done in self._order(RECEIVE, self.sender.model_id)])

    def _least(self) -> None:
        began = time.monotonic_ns()
        self.plain.write()
        self._until(began, [done for _, done in self._order(COPY, (self.hidden, False))])

    def _messages(self) -> None:
        began = time.monotonic_ns()
        self.carried.send(version=self.version)
        self._until(began, self.group.order(TAKE, self.carried.message() or b""))

    def _theirs(self, peer: peers.TorchrlWeights, *, acting: bool = False) -> Callable[[], None]:
        def side() -> None:
            if acting:
                peer.act(act)
            began = self._while_they_act() if acting else time.monotonic_ns()
            peer.send()
            self._until(began, peer.adopted())

        return side

    def _until(self, began: int, done: list[int]) -> None:
        """What counts: until the later of the workers holds the version."""
        self.spent += (max(done) - began) / 1e9

    # ---- processor time --------------------------------------------------------------------------------------------
    def _processor(self) -> None:
        def ours() -> None:
            self.spent += cpu_seconds(lambda: self.sender.send(version=self.version))
            self.spent += sum(cpu for cpu, _ in self._order(RECEIVE, self.sender.model_id))

        def copies(flat: bool) -> Callable[[], None]:
            def side() -> None:
                self.spent += cpu_seconds(self.plain.write_flat if flat else self.plain.write)
                self.spent += sum(cpu for cpu, _ in self._order(COPY, (self.hidden, flat)))

            return side

        measured = self._interleave({CPU: ours, COPIES: copies(False), FLAT: copies(True)})
        self._ratio(measured, CPU, COPIES, "<= 1.5")
        self._ratio(measured, CPU, FLAT)
        self._keep(measured)

    # ---- stress ----------------------------------------------------------------------------------------------------
    def _stress(self) -> None:
        """Publish at full speed; every version that a worker adopts is looked through."""
        body = packed(self.sender.model_id)
        for worker in self.group.workers:
            worker.channel.send(STRESS, _TURN, body)
        published, until = 0, time.monotonic() + self.settings["stress"]
        while time.monotonic() < until:
            published += 1
            fill(self.net, published)
            self.sender.send(version=published)
        fill(self.net, 0)
        self.sender.send(version=0)
        found = [unpacked(self.group.wait(index, _TURN)[1]) for index in range(WORKERS)]
        adopted, torn = (sum(numbers) for numbers in zip(*found, strict=True))
        if torn:
            raise NumericsError("weights were adopted torn", where=f"{torn} of {adopted} times")
        self.report.checks[f"torn adoptions under stress, {self.name}"] = f"0 of {adopted:,}, {published:,} published"

    # ---- the report ------------------------------------------------------------------------------------------------
    def _interleave(self, sides: dict[str, Callable[[], None]]) -> list[Side]:
        calls = self.settings["calls"]

        def repeated(side: Callable[[], None]) -> Callable[[], None]:
            def rounds() -> None:
                for _ in range(calls):
                    self.version += 1
                    fill(self.net, self.version)
                    side()

            return rounds

        rounds = {name: repeated(side) for name, side in sides.items()}
        return interleave(rounds, self.settings["rounds"], per=calls, clock=lambda: self.spent)

    def _check(self, name: str, version: int, held: list[set[float]]) -> None:
        if any(numbers != {float(version)} for numbers in held):
            raise NumericsError(f"the workers of {name} do not hold version {version}", why=f"they hold {held}")
        self.report.checks[f"held by the workers, {name}"] = "the version that was sent last"

    def _ratio(self, sides: list[Side], over: str, under: str, bar: str = "") -> None:
        found = ratio(sides, over, under, bar)
        found.over, found.under = f"{over}, {self.name}", f"{under}, {self.name}"
        self.report.ratios.append(found)

    def _keep(self, sides: list[Side]) -> None:
        for side in sides:
            side.name = f"{side.name}, {self.name}"
        self.report.sides += sides
