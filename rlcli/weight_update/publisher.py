"""Publish versions of the models that are trained here to where they act, in this process or in others."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn

from rlcli.arguments import refuse
from rlcli.errors import ArgumentError
from rlcli.weight_update.tensors import Source

POLICY = "policy"


class Target(Protocol):
    """Where models act: `checked` weights fit and are uncopied, those that are sent act all at one instant."""

    trained: dict[str, Any]  # by name, the policy first

    def connect(self, name: str, trained: Any, used: Any) -> None: ...

    def checked(self, name: str, source: Source) -> Any: ...

    def send(self, checked: dict[str, Any], version: int) -> None: ...

    def restart_at(self, version: int) -> None: ...


class Publisher:
    """Publish whole versions of any models to one target, from any thread: of all as they are trained, or of one."""

    def __init__(self, target: Target) -> None:
        self.target, self.version = target, 0  # of the policy, as published last
        self._lock = threading.Lock()

    def register(self, name: str, model: nn.Module, used: Any) -> None:
        check_model(name, model)
        with self._lock:
            self.target.connect(name, model, used)

    def publish(self, source: Source | None = None, model_id: str | None = None) -> None:
        with self._lock:
            new = self._named(source, model_id)
            version = self.version + (POLICY in new)
            self.target.send({name: self.target.checked(name, weights) for name, weights in new.items()}, version)
            self.version = version

    def _named(self, source: Source | None, model_id: str | None) -> dict[str, Any]:
        """Map each model that is published to its new weights."""
        name, trained = model_id or POLICY, self.target.trained
        refuse(name not in trained, f"no model is called '{name}'", why=f"there are {', '.join(trained)}",
               fix="register_model(name, module) adds one.")  # fmt: skip
        if source is not None and not isinstance(trained[name], nn.Module):
            raise ArgumentError(f"'{name}' has no weights to update", why=f"it is {_kind(trained[name])}")
        new = dict(trained) if model_id is None else {name: trained[name]}
        return new if source is None else new | {name: source}

    def restart_at(self, version: int) -> None:
        """Go on counting from there; what was published and does not act yet is of another course."""
        with self._lock:
            self.target.restart_at(version)
            self.version = version


def check_model(name: str, *modules: Any) -> None:
    """Refuse a further model that is none, or is called as the policy is."""
    refuse(name == POLICY, f"the name '{POLICY}' is the collector's own policy", fix="Choose another name.")
    for module in modules:
        refuse(not isinstance(module, nn.Module), f"the model '{name}' has no weights to keep in step",
               why=f"it is a {type(module).__name__}")  # fmt: skip


def _kind(policy: Any) -> str:
    return "random actions" if policy is None else f"a {type(policy).__name__}"
