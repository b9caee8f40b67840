"""Where code that was written for torchrl looks for a name, it finds it: the same object, wherever it is looked for."""

from __future__ import annotations

from importlib import import_module

import pytest

# module below the import root -> names that are looked for there
PATHS = {
    "collectors": "Collector SyncDataCollector DataCollector DataCollectorBase BaseCollector RandomPolicy",
    "collectors.utils": "split_trajectories",
    "data": "Binary Bounded Categorical Composite MultiCategorical MultiOneHot OneHot TensorSpec Unbounded "
    "ReplayBuffer TensorDictReplayBuffer ReplayBufferEnsemble LazyTensorStorage LazyMemmapStorage ListStorage "
    "SliceSampler",
    "data.replay_buffers": "ReplayBuffer SliceSampler LazyTensorStorage PrioritizedSampler",
    "data.replay_buffers.samplers": "SliceSampler SamplerWithoutReplacement RandomSampler",
    "data.replay_buffers.storages": "LazyTensorStorage LazyMemmapStorage",
    "data.tensor_specs": "Bounded BoundedContinuous Categorical Composite OneHot Unbounded UnboundedContinuous",
    "envs": "EnvBase GymEnv GymWrapper SerialEnv TransformedEnv Compose DoubleToFloat ExplorationType InitTracker "
    "RewardSum MultiStepTransform NextObservationDelta RewardScaling StepCounter TensorDictPrimer ToTensorImage "
    "Transform check_env_specs exploration_type set_exploration_type step_mdp",
    "envs.transforms": "Compose InitTracker NextObservationDelta NextStateReconstructor RewardSum StepCounter "
    "TransformedEnv",
    "envs.utils": "ExplorationType RandomPolicy check_env_specs exploration_type set_exploration_type step_mdp",
    "modules": "MLP EGreedyModule NormalParamExtractor ProbabilisticActor QValueActor TanhNormal ValueOperator "
    "ActorValueOperator IndependentNormal OneHotCategorical Delta",
    "modules.distributions": "TanhNormal IndependentNormal OneHotCategorical Delta",
    "modules.tensordict_module": "ActorValueOperator EGreedyModule ProbabilisticActor QValueActor QValueModule "
    "RandomPolicy ValueOperator",
    "objectives": "A2CLoss ClipPPOLoss DQNLoss HardUpdate KLPENPPOLoss PPOLoss ReinforceLoss SACLoss SoftUpdate "
    "ValueEstimators",
    "objectives.utils": "HardUpdate SoftUpdate TargetNetUpdater ValueEstimators",
    "objectives.value": "GAE TD0Estimator TD1Estimator TDLambdaEstimator VTrace",
    "objectives.value.functional": "generalized_advantage_estimate td_lambda_return_estimate vtrace_advantage_estimate",
}
OLDER = {"SyncDataCollector", "DataCollector", "DataCollectorBase"}  # spellings that upstream has given up
FOUND = [(module, name) for module, names in PATHS.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), FOUND, ids=[".".join(pair) for pair in FOUND])
def test_a_name_is_found_and_is_one_thing(module, name):
    found = getattr(import_module(f"rlcli.{module}"), name)
    root = module.split(".")[0]
    others = {m for m, n in FOUND if n == name and m.split(".")[0] == root}
    assert all(getattr(import_module(f"rlcli.{other}"), name) is found for other in others)


@pytest.mark.parametrize("module", PATHS)
def test_the_same_paths_exist_elsewhere(module):
    theirs = pytest.importorskip("torchrl")
    there = import_module(f"{theirs.__name__}.{module}")
    assert not [name for name in PATHS[module].split() if name not in OLDER and not hasattr(there, name)]


def test_exploration_is_one_setting():
    from rlcli import envs, modules

    assert envs.ExplorationType is modules.ExplorationType
    with envs.set_exploration_type(envs.ExplorationType.MEAN):
        assert modules.exploration_type() is modules.ExplorationType.MEAN
