"""Jobs of the command line and the Python API: train, collect, resume, evaluate, load; each brings what it needs."""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.jobs.collection import collect as collect
    from rlcli.jobs.learner import train as train
    from rlcli.jobs.resumed import resume as resume
    from rlcli.jobs.trained_run import evaluate as evaluate
    from rlcli.jobs.trained_run import load as load

__getattr__, __dir__, __all__ = lazily(__name__)
