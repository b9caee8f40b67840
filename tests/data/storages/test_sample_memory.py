"""Memory of samples goes out again only when nobody can see it any more."""

import gc
import threading

import numpy as np
import pytest
import torch
from face import Field

import rlcli.data.storages.tensor as sample_memory_module
from rlcli.data.storages.tensor import sample_memory

FIELD = Field(
    (
        256,
        1024,
    ),
    torch.float32,
)  # 1 MiB a row


@pytest.fixture(autouse=True)
def nothing_held():
    sample_memory_module._blocks.clear()
    yield
    sample_memory_module._blocks.clear()


def address(count=2):
    return sample_memory(FIELD, count).data_ptr()


def test_it_is_used_again():
    assert len({address() for _ in range(10)}) == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t[1, 3:5],
        lambda t: t.view(torch.int32),
        lambda t: t.numpy(),
        lambda t: t.detach().requires_grad_(),
        lambda t: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
        lambda t: memoryview(t.numpy()),
        lambda t: t.untyped_storage(),
    ],
)
def test_whatever_still_sees_it_keeps_it(keep):
    first = sample_memory(FIELD, 2)
    was = first.data_ptr()
    kept = keep(first)
    first = None
    gc.collect()
    other = sample_memory(FIELD, 2)
    assert other.data_ptr() != was
    del kept, first
    gc.collect()
    assert address() == was


def test_small_and_huge_samples_are_plain_tensors():
    for count, shape in ((3, [4]), (200, [256, 1024])):
        tensor = sample_memory(Field(shape, torch.float32), count)
        assert tensor.shape == (count, *shape) and not sample_memory_module._blocks


def test_what_is_held_is_bounded():
    kept = [sample_memory(FIELD, 20) for _ in range(16)]
    held = sum(len(memory) for memory, _ in sample_memory_module._blocks)
    assert held <= sample_memory_module._HELD and len({t.data_ptr() for t in kept}) == 16
    for t, value in zip(kept, range(16), strict=True):
        t.fill_(value)
    assert [t.mean().item() for t in kept] == list(range(16))


def test_blocks_of_another_size_go():
    for count in (20, 30, 40, 50, 60, 64, 3, 10):
        for _ in range(3):
            kept = [sample_memory(FIELD, count) for _ in range(3)]
            del kept
        held = sum(len(memory) for memory, _ in sample_memory_module._blocks)
        assert held <= sample_memory_module._HELD


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int64, torch.float64])
def test_every_dtype(dtype):
    field = Field((1 << 20,), dtype)
    tensor = sample_memory(field, 2).zero_()
    assert tensor.dtype is dtype and tensor.shape == (2, 1 << 20) and tensor.is_contiguous() and not tensor.any()


def test_threads_never_share_a_block():
    wrong = []

    def work(value):
        rng = np.random.default_rng(value)
        for _ in range(20):
            kept = [sample_memory(FIELD, int(rng.integers(1, 4))).fill_(value) for _ in range(3)]
            if any((t != value).any() for t in kept):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
