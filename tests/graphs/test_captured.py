"""Calls become graphs after a few, where a replay gives the same bits; else they are made as they are."""

import contextlib
import threading

import pytest
import torch
from face import refused
from standin import NotCapturable, StandIn

from rlcli.graphs import captured as captured_file
from rlcli.graphs.captured import NO_ROOM, OTHER_BITS, PLAIN, TRIES, Captured, told


def counted(call, written, record=StandIn.record):
    """A captured call, and how often it was made plainly."""
    calls = []

    def plain():
        calls.append(None)
        call()

    return Captured("part", plain, lambda: written, record), calls


def test_a_call_is_made_plainly_then_recorded_proven_and_replayed():
    x, y = torch.zeros(3), torch.zeros(3)
    captured, calls = counted(lambda: y.add_((x * 2).exp()), [y])
    expected = torch.zeros(3)
    for n in range(8):
        x.fill_(n / 8)
        expected.add_((x * 2).exp())
        captured()
        assert torch.equal(y, expected)
    assert captured.proven and captured.why == "" and len(calls) == PLAIN + 2  # one is recorded, one is compared with


def test_what_the_host_decided_is_noticed_and_the_call_stays_plain():
    y, rate = torch.zeros(3), [1.0]
    captured, _ = counted(lambda: y.add_(rate[0]), [y])
    for n in range(6):
        rate[0] = n
        captured()
    assert not captured.proven and captured.why == OTHER_BITS
    assert y[0] == sum(range(6))


def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ...")


@pytest.mark.parametrize("when", ["recorded", "held", "found"])
def test_a_device_without_room_for_a_graph_makes_plain_calls_and_says_so_once(when, monkeypatch):
    y, recorded, clone, clones = torch.zeros(3), [], torch.Tensor.clone, []

    def crowded(x):
        clones.append(None)
        return clone(x) if when == "found" and len(clones) == 1 else no_room()

    def record(call):
        recorded.append(None)
        graph = no_room() if when == "recorded" else StandIn.record(call)
        monkeypatch.setattr(torch.Tensor, "clone", crowded)
        return graph

    captured, _ = counted(lambda: y.add_(1), [y], record)
    for _ in range(6):
        captured()
    monkeypatch.undo()
    assert y.tolist() == [6] * 3 and len(recorded) == 1
    assert not captured.proven and captured.why == NO_ROOM


class Stepped:
    """A graph after each replay of which somebody else steps what it reads."""

    def __init__(self, recorded, step):
        self.recorded, self.step = StandIn.record(recorded), step

    def replay(self):
        self.recorded.replay()
        self.step()


def test_weights_that_somebody_steps_during_a_proof_refuse_no_graph():
    w, y, steps = torch.ones(3), torch.zeros(3), []

    def step():
        steps.append(None)
        w.add_(len(steps) < 4)

    captured = Captured("part", lambda: y.copy_(w * 2), lambda: [y], lambda call: Stepped(call, step))
    for _ in range(PLAIN + 3):
        captured()
        assert captured.proven or torch.equal(y, w * 2)
    assert captured.proven and captured.why == ""


def test_a_graph_that_gives_other_numbers_each_time_is_refused_in_the_end():
    y, calls, replays = torch.zeros(3), [], []

    def call():
        calls.append(None)
        y.fill_(1)

    def step():
        replays.append(None)
        y.add_(len(replays))

    captured = Captured("part", call, lambda: [y], lambda call: Stepped(call, step))
    for _ in range(PLAIN + TRIES + 3):
        captured()
        assert (y == 1).all()
    assert not captured.proven and captured.why == OTHER_BITS
    assert len(calls) == PLAIN + 1 + 2 * TRIES + 3


CALLS = {
    "reads a number": lambda x, y: y.add_(float(x.sum())),
    "branches": lambda x, y: y.add_(1) if (x > 0).all() else y.sub_(1),
    "draws": lambda x, y: y.add_(torch.rand(3)),
    "has shapes of numbers": lambda x, y: y.add_(x[x > 0].sum()),
    "counts": lambda x, y: y.add_(len((x > 0).nonzero())),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_no_graph_holds_is_said_and_done_all_the_same(call):
    x, y = torch.ones(3), torch.zeros(3)
    captured, calls = counted(lambda: call(x, y), [y])
    for _ in range(5):
        captured()
    assert "index" in captured.why or "graph" in captured.why or "host" in captured.why
    assert len(calls) == 6 and bool(y.abs().sum() > 0)  # five, and the one that could not be recorded


def test_recording_leaves_nothing_behind_and_intermediates_are_computed_again():
    w, x, y = torch.ones(2, requires_grad=True), torch.ones(2), torch.zeros(2)

    def call():
        (gradient,) = torch.autograd.grad((w * x).pow(2).sum(), [w])
        y.copy_(gradient)

    graph = StandIn.record(call)
    assert y.tolist() == [0, 0]
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [18, 18]
    assert graph.undeclared([w, x, y]) == [] and len(graph.undeclared([w, y])) == 1


def test_the_stand_in_refuses_draws():
    refused(NotCapturable, "draws", lambda: StandIn.record(lambda: torch.rand(3)))


def test_a_part_is_whole_before_others_can_tell_of_it(monkeypatch):
    gate = contextlib.ExitStack()
    gate.callback(told)
    monkeypatch.setattr(captured_file, "_ALONE", gate)
    Captured("new", lambda: None, list, StandIn.record)


def test_threads_may_capture_while_it_is_told_of():
    stop, failed = threading.Event(), []

    def capture():
        while not stop.is_set():
            kept = [Captured("thread", lambda: None, list, StandIn.record) for _ in range(20)]
            kept[0].why = "a thread's"

    def tell():
        try:
            while not stop.is_set():
                told()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for call in (capture, capture, tell, tell)]
    for thread in threads:
        thread.start()
    threads[0].join(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
