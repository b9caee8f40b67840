"""The documents' import path for transforms."""

from rlcli.envs.transformed import TransformedEnv
from rlcli.transforms import (
    CatFrames,
    Compose,
    DoubleToFloat,
    InitTracker,
    MultiStepTransform,
    NextObservationDelta,
    NextStateReconstructor,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    StepCounter,
    TensorDictPrimer,
    ToTensorImage,
    Transform,
)

__all__ = [
    "CatFrames",
    "Compose",
    "DoubleToFloat",
    "InitTracker",
    "MultiStepTransform",
    "NextObservationDelta",
    "NextStateReconstructor",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SignTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
]
