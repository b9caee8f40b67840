"""Differences of observations, encoded and decoded: within the bound that is stated, or exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlcli.transforms.delta_codec import bytes_a_row, code_of, decode, encode, largest_error, saves

FLOATS = [torch.float16, torch.bfloat16, torch.int8]
LIMIT = {torch.float16: 3e4, torch.bfloat16: 1e30, torch.int8: 1e30}


@given(data=st.data(), code=st.sampled_from(FLOATS), source=st.sampled_from([np.float32, np.float64]))
def test_no_element_is_off_by_more_than_the_stated_bound(data, code, source):
    limit = float(np.float32(LIMIT[code]))
    width = 32 if source is np.float32 else 64
    rows = hnp.arrays(source, (3, 5), elements=st.floats(-limit, limit, width=width))
    obs, after = (torch.from_numpy(data.draw(rows)) for _ in range(2))
    got = decode(obs, encode(obs, after, code, 1))
    assert got.dtype == obs.dtype
    change, size = float((after - obs).abs().max()), float(after.abs().max())
    assert float((got - after).abs().max()) <= largest_error(obs.dtype, code, change, size)


@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e3]))
def test_the_bound_of_small_steps_is_small(seed, scale):
    random = np.random.default_rng(seed)
    obs = torch.from_numpy(random.normal(size=(64, 4)) * scale)
    after = obs + torch.from_numpy(random.normal(size=(64, 4)) * scale * 0.01)
    change = float((after - obs).abs().max())
    for code, share in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.int8, 1 / 254)):
        bound = largest_error(obs.dtype, code, change, float(after.abs().max()))
        assert float((decode(obs, encode(obs, after, code, 1)) - after).abs().max()) <= bound
        assert bound <= share * change * 1.01 + 1e-7


@given(data=st.data(), dtype=st.sampled_from([np.int32, np.int64]))
def test_long_integers_come_back_exactly_if_they_change_by_little(data, dtype):
    info = np.iinfo(dtype)
    obs = data.draw(hnp.arrays(dtype, (6,), elements=st.integers(info.min + 40_000, info.max - 40_000)))
    step = data.draw(hnp.arrays(dtype, (6,), elements=st.integers(-(2**15), 2**15 - 1)))
    obs, after = torch.from_numpy(obs), torch.from_numpy(obs + step)
    coded = encode(obs, after, torch.float16, 1)
    assert coded.delta.dtype is torch.int16 and torch.equal(decode(obs, coded), after)


def test_int8_scales_each_row_on_its_own():
    obs = torch.zeros(3, 4)
    after = torch.tensor([[1.0, 0.5, -1.0, 0.0], [1e6, 1e5, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    coded = encode(obs, after, torch.int8, 1)
    assert coded.scale.shape == (3, 1) and coded.scale[2].item() == 0
    error = (decode(obs, coded) - after).abs().amax(-1)
    assert (error <= torch.tensor([1 / 254, 1e6 / 254, 0]) * 1.0001).all()


def test_scalars_and_images_have_their_scale_beside_the_batch_dims():
    for shape in ((2, 7), (2, 7, 3), (2, 7, 3, 4, 4)):
        obs, after = torch.randn(shape), torch.randn(shape)
        coded = encode(obs, after, torch.int8, 2)
        assert coded.delta.shape == shape and coded.scale.shape == (2, 7, 1)
        assert float((decode(obs, coded) - after).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("elements", "dtype", "wanted", "worth"),
    [
        (4, torch.float32, torch.float16, True),
        (4, torch.float16, torch.float16, False),
        (4, torch.float16, torch.int8, False),  # 4 + 4 bytes instead of 8
        (1, torch.float32, torch.int8, False),
        (2, torch.float32, torch.int8, True),
        (84 * 84 * 4, torch.uint8, torch.float16, False),
        (1, torch.int16, torch.float16, False),
        (1, torch.int64, torch.float16, True),
        (1, torch.bool, torch.int8, False),
    ],
)
def test_a_codec_is_used_only_where_it_saves(elements, dtype, wanted, worth):
    assert saves(elements, dtype, wanted) is worth
    code = code_of(dtype, wanted)
    assert worth == (code is not None and bytes_a_row(elements, code) < elements * dtype.itemsize)
