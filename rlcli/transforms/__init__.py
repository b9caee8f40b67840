"""Transforms of what an env gives and takes, one idea per file."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.transforms.base import RowOp as RowOp
    from rlcli.transforms.base import Transform as Transform
    from rlcli.transforms.compose import Compose as Compose
    from rlcli.transforms.compose import Faces as Faces
    from rlcli.transforms.compose import by_name as by_name
    from rlcli.transforms.compose import choose_faces as choose_faces
    from rlcli.transforms.counters import InitTracker as InitTracker
    from rlcli.transforms.counters import RewardSum as RewardSum
    from rlcli.transforms.counters import StepCounter as StepCounter
    from rlcli.transforms.frame_stack import CatFrames as CatFrames
    from rlcli.transforms.frame_stack import FrameStack as FrameStack
    from rlcli.transforms.maps import ChannelsFirst as ChannelsFirst
    from rlcli.transforms.maps import DoubleToFloat as DoubleToFloat
    from rlcli.transforms.maps import RewardClipping as RewardClipping
    from rlcli.transforms.maps import RewardScaling as RewardScaling
    from rlcli.transforms.maps import SignTransform as SignTransform
    from rlcli.transforms.maps import ToFloat as ToFloat
    from rlcli.transforms.maps import ToTensorImage as ToTensorImage
    from rlcli.transforms.multi_step import MultiStepTransform as MultiStepTransform
    from rlcli.transforms.next_observation_delta import NextObservationDelta as NextObservationDelta
    from rlcli.transforms.next_state import NextStateReconstructor as NextStateReconstructor
    from rlcli.transforms.norms import RewardNorm as RewardNorm
    from rlcli.transforms.norms import RunningNorm as RunningNorm
    from rlcli.transforms.primer import TensorDictPrimer as TensorDictPrimer

__getattr__, __dir__, __all__ = lazily(__name__)
