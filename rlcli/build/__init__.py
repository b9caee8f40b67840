"""Build runs and their parts from a configuration, one file a group; nothing below knows the configuration.

What a command of the terminal or of `rlcli.api` starts is a function here.
"""

from typing import TYPE_CHECKING

from rlcli.exports import lazily

if TYPE_CHECKING:
    from rlcli.build.collecting import collect as collect
    from rlcli.build.resumed import resume as resume
    from rlcli.build.trained_run import evaluate as evaluate
    from rlcli.build.trained_run import load as load
    from rlcli.build.training import train as train

__getattr__, __dir__, __all__ = lazily(__name__)
