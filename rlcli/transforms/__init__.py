"""Transforms of what an env gives and takes, one idea per file."""

from rlcli.transforms.base import RowOp, Transform
from rlcli.transforms.compose import Compose, Faces, by_name, choose_faces
from rlcli.transforms.counters import InitTracker, RewardSum, StepCounter
from rlcli.transforms.frame_stack import CatFrames, FrameStack
from rlcli.transforms.maps import (
    ChannelsFirst,
    DoubleToFloat,
    RewardClipping,
    RewardScaling,
    SignTransform,
    ToFloat,
    ToTensorImage,
)
from rlcli.transforms.multi_step import MultiStepTransform
from rlcli.transforms.next_observation_delta import NextObservationDelta
from rlcli.transforms.next_state import NextStateReconstructor
from rlcli.transforms.norms import RewardNorm, RunningNorm
from rlcli.transforms.primer import TensorDictPrimer

__all__ = [
    "CatFrames",
    "ChannelsFirst",
    "Compose",
    "DoubleToFloat",
    "Faces",
    "FrameStack",
    "InitTracker",
    "MultiStepTransform",
    "NextObservationDelta",
    "NextStateReconstructor",
    "RewardClipping",
    "RewardNorm",
    "RewardScaling",
    "RewardSum",
    "RowOp",
    "RunningNorm",
    "SignTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToFloat",
    "ToTensorImage",
    "Transform",
    "by_name",
    "choose_faces",
]
