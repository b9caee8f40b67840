"""What is adopted from shared memory is one whole version, whoever is stopped, overtaken or damaged, and where."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from weight_workers import fill, is_stopped, model, numbers

from rlcli.errors import ArgumentError, DamagedDataError
from rlcli.processes.channel import packed, unpacked
from rlcli.processes.crew import Crew
from rlcli.processes.worker import Worker
from rlcli.weight_update import SharedMemWeightSyncScheme, SharedVersions, open_receiver, versions
from rlcli.weight_update.layout import Layout
from rlcli.weight_update.tensors import named_tensors

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads whether a process is stopped from /proc")


def pair():
    """A sender, its trained model, a receiver and its model, in this process."""
    trained, acting = fill(model(), 0), model()
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    return sender, trained, open_receiver(sender.handle(), sender.fd, acting), acting


def send(sender, trained, version: int) -> None:
    fill(trained, version)
    sender.send(version=version)


def crew_of(sender, width: int, count: int) -> Crew:
    crew = Crew([Worker("weight_workers:adopt", start_method="fork") for _ in range(count)])
    crew.order(0, packed(("open", sender.handle(), width)), fd=sender.fd)
    return crew


# ---- many publications, many readers ---------------------------------------------------------------------------------
def stress(seconds: float, width: int = 500) -> tuple[int, list[int]]:
    """Publish at full speed to two workers; how many versions were published, and adopted by each."""
    trained = model(width)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    crew = crew_of(sender, width, 2)
    last = 2**24  # exact in float32
    for worker in crew.workers:
        worker.channel.send(0, 7, packed(("until", last)))
    version, began = 0, time.monotonic()
    while time.monotonic() - began < seconds:
        version += 1
        send(sender, trained, version)
    rate = version * sender.layout.nbytes / seconds
    send(sender, trained, last)
    adopted = []
    for index in range(2):
        seen, held = unpacked(crew.wait(index, 7)[1])
        assert seen == sorted(set(seen)) and set(seen) <= {*range(1, version + 1), last}
        assert all(found == {x} for x, found in zip(seen, held, strict=True))
        adopted.append(len(seen))
    crew.close()
    assert rate > 20e6, f"{rate:,.0f} bytes a second are no stress"
    return version, adopted


def test_a_torn_version_is_never_adopted():
    published, adopted = stress(2.0)
    assert published > 100 and min(adopted) > 20


@pytest.mark.slow
def test_a_torn_version_is_never_adopted_for_a_minute():
    published, adopted = stress(60.0)
    assert published > 5000 and min(adopted) > 1000


# ---- stopped in the middle -------------------------------------------------------------------------------------------
@needs_proc
def test_a_reader_that_is_stopped_inside_its_copy_adopts_the_newest_of_three_publications():
    trained = fill(model(), 1)
    sender = SharedMemWeightSyncScheme().create_sender("policy", trained)
    crew = crew_of(sender, 40, 1)
    (worker,) = crew.workers
    sender.send(version=1)
    crew.order(0, packed(("stop midway",)))
    worker.channel.send(0, 9, packed(("receive",)))
    assert is_stopped(worker.pid)
    for version in (2, 3, 4):
        send(sender, trained, version)
    os.kill(worker.pid, signal.SIGCONT)
    assert unpacked(crew.wait(0, 9)[1]) == (True, 4, {4.0})
    crew.close()


@needs_proc
def test_a_writer_that_is_stopped_inside_its_copy_leaves_the_version_before():
    worker = Worker("weight_workers:publish", start_method="fork")
    handle, fd = unpacked(worker.channel.receive()[2]), worker.channel.receive_fd()
    acting, late = model(), model()
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


def test_a_publication_that_fails_leaves_the_version_before(monkeypatch):
    sender, trained, receiver, acting = pair()
    send(sender, trained, 1)

    def fails(memory):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(versions, "summed", fails)
        with pytest.raises(MemoryError):
            send(sender, trained, 2)
    assert sender.version == 1 and receiver.receive() == 1 and numbers(acting) == {1.0} and not receiver.waiting
    send(sender, trained, 3)
    assert receiver.receive() == 3 and numbers(acting) == {3.0}


# ---- damage ----------------------------------------------------------------------------------------------------------
def test_a_flipped_bit_is_found_and_the_next_version_is_good_again():
    sender, trained, receiver, acting = pair()
    send(sender, trained, 1)
    shared = sender._transport
    shared._bytes[1, 777] ^= 4
    with pytest.raises(DamagedDataError, match="not what was published"):
        receiver.receive()
    assert receiver.version == 0 and receiver.waiting
    send(sender, trained, 2)
    assert receiver.receive() == 2 and numbers(acting) == {2.0}
    shared._version[0] = 5
    receiver._transport._read = 0
    with pytest.raises(DamagedDataError, match="version 5"):
        receiver.receive()


# ---- buffers and memory ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("buffers", [2, 3, 5])
def test_any_number_of_buffers_from_two_on(buffers):
    tensors = named_tensors(model())
    layout = Layout.of(tensors)
    writer = SharedVersions(layout, buffers=buffers)
    reader = SharedVersions(layout, writer.fd, buffers)
    memory = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(memory)
    assert writer.newest == reader.newest == 0 and not reader.waiting
    for version in range(7, 20):
        writer.publish(version, [torch.full_like(tensor, version) for tensor in tensors.values()])
        assert reader.newest == version and reader.waiting
        assert reader.receive_weights(memory) == version and not reader.waiting
        assert all((view == version).all() for view in views.values())


def test_one_buffer_is_refused():
    with pytest.raises(ArgumentError, match="2 buffers at least"):
        SharedVersions(Layout.of({}), buffers=1)


@needs_proc
def test_descriptors_go_with_their_owners():
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = held()
    for _ in range(3):
        parts = pair()
        send(*parts[:2], 1)
        assert parts[2].receive() == 1
    del parts
    gc.collect()
    assert held() == before


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_the_memory_has_no_name():
    before = set(os.listdir("/dev/shm"))
    sender, trained, receiver, acting = pair()
    assert set(os.listdir("/dev/shm")) <= before
    sender.close()
    assert sender.fd is None
    send(sender, trained, 1)  # those who have it go on
    assert receiver.receive() == 1 and numbers(acting) == {1.0}
