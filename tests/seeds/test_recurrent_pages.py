"""The blocks on recurrent policies: slices for one, an env wired for one, a module with a backend."""

from __future__ import annotations

from itertools import pairwise

import torch
from seed_blocks import Block, run
from tensordict import TensorDict

from rlcli.envs import TransformedEnv
from rlcli.modules import set_recurrent_mode
from rlcli.transforms import InitTracker, TensorDictPrimer

POLICY = """
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from rlcli.collectors import Collector
from rlcli.data import LazyTensorStorage, TensorDictReplayBuffer
from rlcli.envs import GymEnv
from rlcli.modules import GRUModule
torch.manual_seed(0)
gru = GRUModule(input_size=4, hidden_size=8, in_keys=["observation", "recurrent_state"],
                out_keys=["features", ("next", "recurrent_state")])
head = TensorDictModule(lambda x: torch.nn.functional.one_hot(x[..., :2].argmax(-1), 2), ["features"], ["action"])
recurrent_policy = TensorDictSequential(gru, head)
"""
FILLED = """
for batch in Collector(GymEnv("CartPole-v1"), recurrent_policy, frames_per_batch=500, total_frames=500):
    rb.extend(batch)
"""


def test_seed_003_slices_for_a_recurrent_policy():
    block = Block(
        "003", "from torchrl.data.replay_buffers import SliceSampler", after="The flat 1-D output",
        preamble=POLICY, swap=("# ... extend rb from a collector ...", FILLED),
    )  # fmt: skip
    names = run(block).names
    sample, out, policy = names["sample"], names["out"], names["recurrent_policy"]
    assert 0 < len(sample) <= 128 and out["features"].shape == (len(sample), 8)
    # each slice is a trajectory of its own, that begins from the state stored at its first row
    starts = [*sample["is_init"].reshape(-1).nonzero().reshape(-1).tolist(), len(sample)]
    for first, last in pairwise(starts):
        row = sample[first:last].clone()
        state = row["recurrent_state"][0]
        for t in range(last - first):
            step = TensorDict(
                {"observation": row["observation"][t], "recurrent_state": state, "is_init": row["is_init"][t]}
            )
            policy(step)
            torch.testing.assert_close(out["features"][first + t], step["features"])
            state = step["next", "recurrent_state"]


def test_seed_003_a_flat_sample_gives_what_the_reshaped_one_gives_bit_for_bit():
    preamble = POLICY + """
from rlcli.data.replay_buffers import SliceSampler
rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=96,
                            sampler=SliceSampler(num_slices=12, slice_len=8, strict_length=True))
""" + FILLED  # fmt: skip
    names: dict = {}
    exec(preamble, names)
    sample = names["rb"].sample()
    policy = names["recurrent_policy"]
    with set_recurrent_mode("recurrent"):
        flat, shaped = policy(sample.clone()), policy(sample.clone().reshape(12, 8))
    for key in ("features", ("next", "recurrent_state"), "action"):
        assert torch.equal(flat[key].reshape(12, 8, *flat[key].shape[1:]), shaped[key])


def test_seed_003_a_recurrent_policy_for_an_env():
    names = run(Block("003", "from torchrl.envs import GymEnv")).names
    env = names["env"]
    assert isinstance(env, TransformedEnv)
    assert [type(t) for t in env.transforms] == [InitTracker, TensorDictPrimer]
    first = env.reset()
    assert bool(first["is_init"]) and first["recurrent_state"].shape == (1, 8) and not first["recurrent_state"].any()


def test_seed_004_knob_9():
    rnn = run(Block("004", "from torchrl.modules import GRUModule", after="Knob 9")).names["rnn"]
    assert rnn.recurrent_backend == "scan" and rnn.in_keys == ["obs", "rhs", "is_init"]
    begins = torch.rand(40, 1) < 0.3
    begins[0] = True
    td = TensorDict({"obs": torch.randn(40, 64), "rhs": torch.randn(40, 1, 128), "is_init": begins}, [40])
    assert rnn(td)["features"].shape == (40, 128)  # it runs over sequences without being told: `default_recurrent_mode`
