"""The sum of an episode's rewards has one reward and one name."""

import pytest
from face import refused

from rlcli.errors import ArgumentError
from rlcli.transforms import RewardSum


@pytest.mark.parametrize("options", [{"in_keys": ["score"]}, {"out_keys": ["a", "b"]}, {"in_keys": ["reward", "cost"]}])
def test_other_rewards_are_refused(options):
    refused(ArgumentError, "RewardSum", lambda: RewardSum(**options))
    assert RewardSum(in_keys=["reward"]).out_keys == ["episode_reward"]
