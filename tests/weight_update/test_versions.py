"""What is adopted from shared memory is one whole version, whoever is stopped, overtaken or damaged, and where."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from face import Worker, WorkerGroup, packed, refused, unpacked
from interrupted import instructions
from weight_workers import fill, is_stopped, model, numbers

from rlcli.errors import DamagedDataError
from rlcli.weight_update import (
    SharedMemWeightSyncScheme,
    SharedVersions,
    layout,
    open_receiver,
    publications,
    versions,
)
from rlcli.weight_update import receiver as receiving
from rlcli.weight_update.publications import Publications
from rlcli.weight_update.receiver import ModelsReceiver

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads whether a process is stopped from /proc")


SMALL, LARGE = 40, 600  # widths of models: one that is copied in one part, and one in several
stressed = pytest.mark.parametrize("width", [500, 2000])  # 1 MB and 16 MB
both = pytest.mark.parametrize("width", [SMALL, LARGE])


def pair(width: int = SMALL):
    """A sender, its trained model, a receiver and its model, in this process."""
    trained, acting = fill(model(width), 0), model(width)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    return sender, trained, open_receiver(sender.handle(), sender.fd, acting), acting


def send(sender, trained, version: int) -> None:
    fill(trained, version)
    sender.send(version=version)


def group_of(sender, width: int, count: int) -> WorkerGroup:
    group = WorkerGroup(partial(Worker, "weight_workers:adopt", start_method="fork"), count)
    group.order(0, packed(("open", sender.handle(), width)), attachments=[sender.fd])
    return group


# ---- many publications, many readers ---------------------------------------------------------------------------------
def stress(seconds: float, width: int) -> tuple[int, list[int], float]:
    """Publish at full speed to two workers; how many versions, adopted by each, and bytes a second."""
    trained = model(width)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    group = group_of(sender, width, 2)
    last = 2**24  # exact in float32
    for worker in group.workers:
        worker.channel.send(0, 7, packed(("until", last)))
    version, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        version += 1
        send(sender, trained, version)
    rate = version * sender.layout.nbytes / seconds
    send(sender, trained, last)
    adopted = []
    for index in range(2):
        seen, held = unpacked(group.wait(index, 7)[1])
        assert seen == sorted(set(seen)) and set(seen) <= {*range(1, version + 1), last}
        assert all(found == {x} for x, found in zip(seen, held, strict=True))
        adopted.append(len(seen))
    group.close()
    return version, adopted, rate


@stressed
def test_a_torn_version_is_never_adopted(width):
    published, adopted, _ = stress(1.5, width)
    assert published > 10 and min(adopted) > 1


@pytest.mark.slow
@stressed
def test_a_torn_version_is_never_adopted_for_a_minute(width):
    published, adopted, rate = stress(60.0, width)
    assert published > 1000 and min(adopted) > 300
    assert rate > 20e6, f"{rate:,.0f} bytes a second are no stress"


# ---- stopped in the middle -------------------------------------------------------------------------------------------
@needs_proc
@both
def test_a_reader_that_is_stopped_inside_its_copy_across_three_publications(width):
    """It goes on to the newest."""
    trained = fill(model(width), 1)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    group = group_of(sender, width, 1)
    (worker,) = group.workers
    sender.send(version=1)
    group.order(0, packed(("stop midway",)))
    worker.channel.send(0, 9, packed(("receive",)))
    assert is_stopped(worker.pid)
    for version in (2, 3, 4):
        send(sender, trained, version)
    os.kill(worker.pid, signal.SIGCONT)
    assert unpacked(group.wait(0, 9)[1]) == (True, 4, {4.0})
    group.close()


@needs_proc
@both
def test_a_writer_that_is_stopped_inside_its_copy_leaves_the_version_before(width):
    worker = Worker("weight_workers:publish", start_method="fork")
    worker.channel.send(0, 0, packed(width))
    handle, fd = unpacked(worker.channel.receive()[2]), worker.channel.receive_fd()
    acting, late = model(width), model(width)
    receiver = open_receiver(handle, fd, acting)
    worker.channel.send(0)
    assert is_stopped(worker.pid)
    assert receiver.receive() == 1 and numbers(acting) == {1.0} and not receiver.waiting
    assert open_receiver(handle, fd, late).receive() == 1 and numbers(late) == {1.0}
    os.close(fd)
    os.kill(worker.pid, signal.SIGCONT)
    worker.channel.receive()
    assert receiver.waiting and receiver.receive() == 2 and numbers(acting) == {2.0}
    worker.channel.close()
    assert worker.exit_code(5) == 0


def test_a_reader_that_is_overtaken_begins_again(monkeypatch):
    sender, trained, receiver, acting = pair()
    send(sender, trained, 1)
    copies = []
    copy = versions.copy_summed

    def overtaken(target, source):
        copies.append(source)
        total = copy(target, source)
        if len(copies) < 3:
            for version in (10 * len(copies), 10 * len(copies) + 1):
                send(sender, trained, version)
        return total

    monkeypatch.setattr(versions, "copy_summed", overtaken)
    assert receiver.receive() == 21 and numbers(acting) == {21.0} and len(copies) == 3


def test_a_reader_whose_slot_is_half_overwritten_looks_at_the_other(monkeypatch):
    sender, trained, receiver, acting = pair()
    send(sender, trained, 1)
    copy, copy_in, copies = versions.copy_summed, SharedVersions._copy_in, []

    def half(self, tensors, slot):
        self._bytes[slot, ::2] = 7
        raise MemoryError

    def overwritten(target, source):
        copies.append(source)
        if len(copies) == 1:
            send(sender, trained, 2)
            monkeypatch.setattr(SharedVersions, "_copy_in", half)
            with pytest.raises(MemoryError):
                send(sender, trained, 3)
            monkeypatch.setattr(SharedVersions, "_copy_in", copy_in)
        return copy(target, source)

    monkeypatch.setattr(versions, "copy_summed", overwritten)
    assert receiver.receive() == 2 and numbers(acting) == {2.0} and len(copies) == 2


def test_a_publication_during_a_copy_leaves_that_copy_whole(monkeypatch):
    """It goes to the other buffer; the reader has what was newest when it began, and something waits."""
    sender, trained, receiver, acting = pair()
    send(sender, trained, 1)
    copy, sent = versions.copy_summed, []

    def beside(target, source):
        if not sent:
            sent.append(send(sender, trained, 2))
        return copy(target, source)

    monkeypatch.setattr(versions, "copy_summed", beside)
    assert receiver.receive() == 1 and numbers(acting) == {1.0} and receiver.waiting
    assert receiver.receive() == 2 and numbers(acting) == {2.0} and not receiver.waiting


@both
def test_a_publication_that_fails_leaves_the_version_before(width, monkeypatch):
    sender, trained, receiver, acting = pair(width)
    send(sender, trained, 1)

    def fails(*given):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(SharedVersions, "_copy_in", fails)
        with pytest.raises(MemoryError):
            send(sender, trained, 2)
    assert sender.version == 1 and receiver.receive() == 1 and numbers(acting) == {1.0} and not receiver.waiting
    send(sender, trained, 3)
    assert receiver.receive() == 3 and numbers(acting) == {3.0}


# ---- several models --------------------------------------------------------------------------------------------------
class Several:
    """Models that are published together, and those that act with them in this process."""

    def __init__(self, *widths: int) -> None:
        count = np.zeros(1, np.int64)
        self.publications, self.trained, self.acting = Publications(count), {}, {}
        self.receivers = ModelsReceiver(Publications(count))
        self.senders, self.version, self.published = {}, 0, [0.0, 0.0]
        for name, width in zip("ab", widths, strict=True):
            self.trained[name], self.acting[name] = fill(model(width), 0), fill(model(width), -1)
            sender = self.senders[name] = SharedMemWeightSyncScheme().create_sender(name, self.trained[name])
            sender.join(self.publications)
            self.receivers.open(sender.handle(), sender.fd, self.acting[name])

    def publish(self, version: int, only: str = "ab") -> None:
        with self.publications.published():
            for name in only:
                send(self.senders[name], self.trained[name], version)

    def publish_next(self, only: str) -> list[float]:
        """Publish the version after the newest; what is to be held of it."""
        self.version += 1
        self.publish(self.version, only)
        self.published = [self.version if name in only else x for name, x in zip("ab", self.published, strict=True)]
        return self.published

    def held(self) -> list[float]:
        """What each of the acting models consists of."""
        return [x for acting in self.acting.values() for x in numbers(acting)]


together = pytest.mark.parametrize("widths", [(SMALL, SMALL), (SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)])


@together
def test_models_are_seen_to_change_together_and_only_those_that_were_published(widths):
    several = Several(*widths)
    several.publish(1, only="b")
    assert several.receivers.waiting and several.receivers.receive() == {"a": 0, "b": 1}
    assert several.held() == [-1, 1] and not several.receivers.waiting
    with several.publications.published():
        for name, sender in several.senders.items():
            send(sender, several.trained[name], 2)
            assert not several.receivers.waiting
    assert several.receivers.receive() == {"a": 2, "b": 2} and several.held() == [2, 2]
    several.publish(3, only="a")
    assert several.receivers.receive() == {"a": 3, "b": 2} and several.held() == [3, 2]


@together
def test_a_publication_of_several_that_fails_in_the_middle_is_not_seen_by_any(widths):
    several = Several(*widths)
    several.publish(1)
    with pytest.raises(MemoryError), several.publications.published():
        send(several.senders["a"], several.trained["a"], 2)
        raise MemoryError
    several.publish(3, only="b")
    assert several.receivers.receive() == {"a": 1, "b": 3} and several.held() == [1, 3]


@together
def test_a_reader_of_several_that_is_overtaken_between_them_begins_again(widths, monkeypatch):
    several, receive, calls = Several(*widths), SharedVersions._receive, []
    several.publish(1)

    def overtaken(self, memory):
        calls.append(self)
        if len(calls) in (2, 4):  # the first has what the second has no longer
            for version in (10 * len(calls), 10 * len(calls) + 1):
                several.publish(version)
        return receive(self, memory)

    monkeypatch.setattr(SharedVersions, "_receive", overtaken)
    assert several.receivers.receive() == {"a": 41, "b": 41} and several.held() == [41, 41] and len(calls) == 6


FILES = {module.__file__ for module in (versions, publications, layout, receiving)}
NEWER = [["ab"], ["b"], ["a", "b"], ["ab", "ab"], ["b", "ab", "a"], ["ab", "ab", "ab"]]


def test_wherever_a_reader_is_overtaken_it_adopts_one_publication():
    several, rng = Several(2, 2), random.Random(0)
    for pattern in NEWER:
        several.publish_next("ab")
        points = instructions(FILES, several.receivers.receive)
        assert points > 300
        for at in rng.sample(range(points), 80):
            states = [several.publish_next("ab")]
            instructions(
                FILES, several.receivers.receive, at=at,
                happens=lambda states=states, pattern=pattern: states.extend(map(several.publish_next, pattern)),
            )  # fmt: skip
            assert several.held() in states
            several.receivers.receive()
            assert several.held() == states[-1] and not several.receivers.waiting


def test_wherever_a_writer_is_it_leaves_one_publication():
    several, rng = Several(2, 2), random.Random(0)
    points = instructions(FILES, several.publish_next, "ab")
    for only in ("ab", "a", "b"):
        for at in rng.sample(range(points * len(only) // 2), 80):
            before, found = several.publish_next("ab"), []
            instructions(
                FILES, several.publish_next, only, at=at,
                happens=lambda found=found: found.append((several.receivers.receive(), several.held())),
            )  # fmt: skip
            ((_, held),) = found
            assert held in (before, several.published)
            several.receivers.receive()
            assert several.held() == several.published


@torch.enable_grad()  # one that comes inside `torch.no_grad().__enter__` leaves gradients off
def test_after_a_publication_that_ctrl_c_broke_off_anywhere_the_next_is_whole():
    several, rng = Several(2, 2), random.Random(0)
    sender, trained, receiver, acting = pair(2)
    for version in range(1, 150):
        instructions(FILES, several.publish_next, "ab", at=rng.randrange(760))
        state = several.publish_next("ab")
        several.receivers.receive()
        assert several.held() == state
        instructions(FILES, send, sender, trained, 1000 + version, at=rng.randrange(420))
        send(sender, trained, version)
        assert receiver.receive() == version and numbers(acting) == {float(version)}


# ---- damage ----------------------------------------------------------------------------------------------------------
@both
def test_a_flipped_bit_is_found_and_the_next_version_is_good_again(width):
    sender, trained, receiver, acting = pair(width)
    send(sender, trained, 1)
    shared = sender._transport
    shared._bytes[1, 777] ^= 4
    refused(DamagedDataError, "published", lambda: receiver.receive())
    assert receiver.version == 0 and receiver.waiting
    send(sender, trained, 2)
    assert receiver.receive() == 2 and numbers(acting) == {2.0}
    send(sender, trained, 3)
    shared._version[shared._newest(3)[0]] = 5
    refused(DamagedDataError, "version", lambda: receiver.receive())


# ---- buffers and memory ----------------------------------------------------------------------------------------------
def readers_of(sender, width: int, count: int):
    """Receivers and their models."""
    acting = [model(width) for _ in range(count)]
    return [open_receiver(sender.handle(), sender.fd, each) for each in acting], acting


@both
def test_a_version_adopted_stays_whole_and_where_it_is_however_many_are_published(width):
    sender, trained, *_ = pair(width)
    receivers, acting = readers_of(sender, width, 3)
    held, addresses = sender.nbytes, [tensor.data_ptr() for module in acting for tensor in module.parameters()]
    for version in range(1, 40):
        send(sender, trained, version)
        reader = version % 4
        if reader < 3:
            assert receivers[reader].receive() == version
        for receiver, module in zip(receivers, acting, strict=True):
            assert receiver.version == 0 or numbers(module) == {float(receiver.version)}
    assert sender.nbytes == held == 2 * sender.layout.nbytes
    assert addresses == [tensor.data_ptr() for module in acting for tensor in module.parameters()]


@both
def test_what_a_worker_writes_to_its_model_is_its_own_and_gone_with_the_next_version(width):
    sender, trained, *_ = pair(width)
    receivers, acting = readers_of(sender, width, 2)
    for version in range(1, 12):
        send(sender, trained, version)
        assert [receiver.receive() for receiver in receivers] == [version] * 2
        fill(acting[0], -version)
        assert [numbers(module) for module in acting] == [{-float(version)}, {float(version)}]
        assert open_receiver(sender.handle(), sender.fd, trained_twin := model(width)).receive() == version
        assert numbers(trained_twin) == {float(version)}


@needs_proc
@both
def test_descriptors_go_with_their_owners(width):
    def held() -> set[tuple[int, int]]:
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return {(found.st_dev, found.st_ino) for found in map(os.stat, filter(os.path.exists, links))}

    gc.collect()
    before = held()
    for _ in range(3):
        parts = pair(width)
        send(*parts[:2], 1)
        assert parts[2].receive() == 1
    del parts
    gc.collect()
    assert held() <= before


@needs_proc
def test_the_memory_has_no_name():
    sender, trained, receiver, acting = pair()
    assert os.readlink(f"/proc/self/fd/{sender.fd}").startswith("/memfd:")
    sender.close()
    assert sender.fd is None
    send(sender, trained, 1)  # those who have it go on
    assert receiver.receive() == 1 and numbers(acting) == {1.0}
