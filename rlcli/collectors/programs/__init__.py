"""Policies as the loop calls them: `act(t)` reads rows t and returns the action, everything else decided beforehand.

| file | what it runs |
|---|---|
| `program` | no policy: uniform actions of the action space |
| `lowered` | an actor taken apart into stages: `replay` (addmm over the weights), `call` (any module), `sample` |
| `tensordict_policy` | any callable on a tensordict, as it is |
| `lower` | decides between the last two |
"""

from rlcli.collectors.programs.lower import lower
from rlcli.collectors.programs.program import Bound, Masked, PolicyContext, Program, RandomProgram, holding
from rlcli.collectors.programs.tensordict_policy import TensorDictProgram

__all__ = ["Bound", "Masked", "PolicyContext", "Program", "RandomProgram", "TensorDictProgram", "holding", "lower"]
