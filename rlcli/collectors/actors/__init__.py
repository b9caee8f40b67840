"""Policies as the loop calls them: `act(t)` reads rows t and returns the action, everything else decided beforehand.

| file | what it runs |
|---|---|
| `actor` | no policy: uniform actions of the action space |
| `lowered` | a policy taken apart into stages: `replay` (addmm over the weights), `call` (any module), `sample` |
| `tensordict_policy` | any callable on a tensordict, as it is |
| `lower` | decides between the last two |
"""

from rlcli.collectors.actors.actor import ActorRunner, BoundActor, Masked, PolicyContext, RandomActor, holding
from rlcli.collectors.actors.lower import lower
from rlcli.collectors.actors.tensordict_policy import TensorDictActor

__all__ = ["ActorRunner", "BoundActor", "Masked", "PolicyContext", "RandomActor", "TensorDictActor", "holding", "lower"]
