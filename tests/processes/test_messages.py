"""Messages: arrays go beside the pickle and are not copied, and nothing that is not ours is unpickled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from face import refused

from rlcli.errors import DamagedDataError
from rlcli.processes.messages import Seal, joined, parted

LARGE = np.arange(60_000, dtype=np.float32).reshape(100, 600)
VALUES = {
    "rows": LARGE,
    "columns": np.asfortranarray(LARGE),
    "every second": LARGE[:, ::2],
    "none": np.zeros((0, 3), np.int64),
    "scalar": np.array(7),
    "flags": np.ones((2, 3), np.bool_),
    "tensor": torch.arange(50_000.0).reshape(5, -1),
    "every second of a tensor": torch.arange(50_000).reshape(5, -1)[:, ::2],
    "bfloat16": torch.arange(50.0).bfloat16(),
    "trained": torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_equal(name):
    body, arrays = parted({"value": [VALUES[name], name]})
    value, text = joined(body, arrays)["value"]
    before, after = (torch.as_tensor(x) for x in (VALUES[name], value))
    assert text == name and type(value) is type(VALUES[name])
    assert torch.equal(before, after) and before.dtype == after.dtype and after.shape == before.shape
    assert len(body) < 1000 or name == "every second"


def test_arrays_are_apart_and_are_not_copied():
    body, (array,) = parted((LARGE, lambda: "by value"))  # which pickle alone does not take
    assert np.shares_memory(array, LARGE) and array.dtype == np.uint8 and array.nbytes == LARGE.nbytes
    value, function = joined(body, [array])
    assert np.shares_memory(value, LARGE) and function() == "by value"
    assert joined(b"", []) is None


def test_a_tensor_on_memory_that_may_only_be_read_is_a_copy():
    body, (array,) = parted(torch.arange(4))
    array.setflags(write=False)
    tensor = joined(body, [array])
    tensor += 1
    assert array.view(np.int64).tolist() == [0, 1, 2, 3]


class Trap:
    """Whoever unpickles it is caught."""

    def __reduce__(self):
        return pytest.fail, ("was unpickled",)


KEY, TRAP = b"a key of 32 bytes, more or less.", parted(Trap())[0]
FORGED = {
    "another key": lambda seal: (4, Seal(b"another key, of 32 bytes or so..", b"worker 0").sealed(4, TRAP)),
    "the other way": lambda seal: (4, Seal(KEY, b"parent").sealed(4, TRAP)),
    "another number": lambda seal: (5, seal.sealed(4, TRAP)),
    "no seal": lambda seal: (4, TRAP),
    "empty": lambda seal: (4, b""),
    "cut": lambda seal: (4, seal.sealed(4, TRAP)[:-1]),
    "longer": lambda seal: (4, seal.sealed(4, TRAP) + b"."),
    "altered": lambda seal: (4, seal.sealed(4, TRAP).replace(b"unpickled", b"unpackled")),
    "repeated": lambda seal: (2, seal.sealed(2, TRAP)),
}


@pytest.mark.parametrize("name", FORGED)
def test_only_what_the_other_end_sealed_is_opened_and_nothing_older(name):
    seals = Seal(KEY, b"worker 0"), Seal(KEY, b"worker 0")
    for number, body in (1, b"first"), (1, b"first"), (2, b""), (3, TRAP):
        assert seals[1].opened(number, seals[0].sealed(number, body)) == body
    forged = FORGED[name](seals[0])
    refused(DamagedDataError, "worker 0", lambda: joined(seals[1].opened(*forged), []))
