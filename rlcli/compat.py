"""Upstream's import paths that are no file here: `rlcli.envs.utils` and others, made of names that live elsewhere.

`PATHS` is the whole table. A module of it is made when somebody imports it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# path -> module that has the names -> the names ("*": all that it exports), `name=other` under another name
PATHS = {
    "rlcli.collectors.utils": {
        "rlcli.collectors.finish": "TrajectoryPool=_TrajectoryPool",
        "rlcli.data.splitting": "split_trajectories",
    },
    "rlcli.data.replay_buffers": {"rlcli.data.buffer": "*", "rlcli.data.samplers": "*", "rlcli.data.storages": "*"},
    "rlcli.data.replay_buffers.samplers": {"rlcli.data.samplers": "*"},
    "rlcli.data.replay_buffers.storages": {"rlcli.data.storages": "*"},
    "rlcli.data.tensor_specs": {
        "rlcli.specs": "Binary Bounded Categorical Composite MultiCategorical MultiOneHot OneHot TensorSpec Unbounded "
        "Bounded=BoundedContinuous Bounded=BoundedTensorSpec Unbounded=UnboundedContinuous "
        "Unbounded=UnboundedContinuousTensorSpec Binary=BinaryDiscreteTensorSpec Composite=CompositeSpec "
        "Categorical=DiscreteTensorSpec MultiCategorical=MultiDiscreteTensorSpec "
        "MultiOneHot=MultiOneHotDiscreteTensorSpec OneHot=OneHotDiscreteTensorSpec",
    },
    "rlcli.envs.transforms": {
        "rlcli.envs.transformed": "TransformedEnv",
        "rlcli.transforms": "CatFrames Compose DoubleToFloat "
        "InitTracker MultiStepTransform NextObservationDelta NextStateReconstructor RewardClipping RewardScaling "
        "RewardSum SignTransform StepCounter TensorDictPrimer ToTensorImage Transform",
    },
    "rlcli.envs.utils": {
        "rlcli.envs.mdp": "step_mdp",
        "rlcli.envs.spec_check": "check_env_specs",
        "rlcli.modules.exploration": "ExplorationType RandomPolicy exploration_type set_exploration_type",
    },
    "rlcli.modules.tensordict_module": {
        "rlcli.modules.actors": "ActorValueOperator ProbabilisticActor ValueOperator",
        "rlcli.modules.exploration": "RandomPolicy",
        "rlcli.modules.values": "EGreedyModule QValueActor QValueModule",
    },
    "rlcli.objectives.utils": {
        "rlcli.objectives.bootstrap": "HardUpdate SoftUpdate TargetUpdate=TargetNetUpdater",
        "rlcli.objectives.value.estimators": "ValueEstimators",
    },
    "rlcli.weight_update.weight_sync_schemes": {
        "rlcli.weight_update.receiver": "WeightReceiver",
        "rlcli.weight_update.schemes": "DistributedWeightSyncScheme MultiProcessWeightSyncScheme NoWeightSyncScheme "
        "RayWeightSyncScheme RPCWeightSyncScheme SharedMemWeightSyncScheme WeightSyncScheme",
        "rlcli.weight_update.sender": "WeightSender WeightStrategy",
        "rlcli.weight_update.transport": "DistributedTransport MPTransport RayTransport RPCTransport TransportBackend",
        "rlcli.weight_update.versions": "SharedVersions=SharedMemTransport",
    },
}


# ---- this module is the finder and the loader of the paths, see `rlcli/__init__.py` ----------------------------------
def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Return the spec of a path, for Python's import."""
    if name not in PATHS:
        return None
    packages = any(other.startswith(f"{name}.") for other in PATHS)
    return ModuleSpec(name, sys.modules[__name__], is_package=packages)  # type: ignore[arg-type]


def create_module(spec: ModuleSpec) -> None:
    """As Python does it; `importlib.abc.Loader` has this too, and costs 25 ms to import."""


def exec_module(module: ModuleType) -> None:
    """Give a path's module its names."""
    offered = {}
    for home, names in PATHS[module.__name__].items():
        there = import_module(home)
        for name in there.__all__ if names == "*" else names.split():
            name, _, other = name.partition("=")
            offered[other or name] = getattr(there, name)
    vars(module).update(offered, __all__=sorted(offered))
