"""What a buffer of rows stores is a tensor with a name, whose rows have bytes; all else is refused by its key."""

import warnings

import pytest
import torch
from face import refused
from tensordict import NonTensorData, TensorDict

from rlcli.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from rlcli.data.fields import columns_of
from rlcli.errors import ArgumentError


def made(name):
    with warnings.catch_warnings(action="ignore"):
        return {
            "sparse": lambda: torch.eye(4).to_sparse(),
            "csr": lambda: torch.eye(4).to_sparse_csr(),
            "meta": lambda: torch.empty(4, 2, device="meta"),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.quint8),
            "text": lambda: NonTensorData("hello", batch_size=[4]),
        }[name]()


@pytest.mark.parametrize("kind", ["sparse", "csr", "meta", "quantized", "text"])
def test_leaves_without_rows_are_refused_by_their_key(kind):
    batch = TensorDict({"obs": torch.ones(4), "inner": {"odd": made(kind)}}, [4])
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    refused(ArgumentError, "inner.odd batch.exclude", lambda: rb.extend(batch))
    rb.extend(batch.exclude(("inner", "odd")))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("batch", [{"": torch.ones(4)}, {"inner": {"": torch.ones(4)}}, {"": {"inner": torch.ones(4)}}])
def test_a_key_without_a_name_is_refused_before_anything_is_written(tmp_path, kept, batch):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "rows") if kept else LazyTensorStorage(10)
    rb = ReplayBuffer(storage=storage)
    refused(ArgumentError, "key name", lambda: rb.extend(TensorDict(batch, [4])))
    rb.extend(TensorDict({"obs": torch.ones(4)}, [4]))
    rb.dumps(tmp_path / "dump")


def test_what_a_journal_could_not_say_is_refused_before_it_is_written(tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "rows"))
    wide = torch.zeros(1).expand(1, *[1] * 65)
    refused(ArgumentError, "read again", lambda: rb.extend(TensorDict({"obs": wide}, [1])))
    rb.extend(TensorDict({"obs": torch.ones(4)}, [4]))


def test_plain_leaves_are_given_as_they_are():
    batch = TensorDict({"obs": torch.ones(4), "inner": {"x": torch.ones(4, 2)}}, [4])
    found = columns_of(batch)
    assert list(found) == ["obs", ("inner", "x")] and found["obs"] is batch["obs"]
