"""The recorder of a GPU, by a torch.cuda that records nothing: what is left where a recording fails."""

import contextlib

import pytest
import torch
from face import refused

from rlcli.graphs.graph import CudaRecorder


class Cuda:
    """Fail at the end of a recording that failed, as torch does, with its stream the current one."""

    def __init__(self, monkeypatch):
        self.current, self.pools, self.dead = "default", 0, set()
        for name in ("graph_pool_handle", "current_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        if pool in self.dead:
            raise RuntimeError("already recording to mempool_id")
        before, self.current = self.current, stream
        try:
            yield
        except BaseException as error:
            self.dead.add(pool)
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.current = before


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def test_a_recording_that_fails_leaves_the_stream_and_the_next_recording_alone(cuda):
    record = CudaRecorder(torch.device("cuda", 0))

    def fails():
        raise RuntimeError("the host reads a number")

    refused(RuntimeError, "previous error", lambda: record(fails))
    assert cuda.current == "default"
    streams = []
    record(lambda: streams.append(cuda.current))
    assert streams == [record.stream] and cuda.current == "default"


def test_the_first_graph_of_a_pool_is_kept_for_later_ones(cuda):
    record = CudaRecorder(torch.device("cuda", 0))
    first, second = record(lambda: None), record(lambda: None)
    assert record._first is first and second is not first and cuda.pools == 1
