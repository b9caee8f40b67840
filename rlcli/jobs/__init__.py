"""What the command line and the Python API start: train, collect, resume, evaluate, load."""

from rlcli.jobs.collect import collect
from rlcli.jobs.evaluate import evaluate
from rlcli.jobs.load import load
from rlcli.jobs.resume import resume
from rlcli.jobs.train import train

__all__ = ["collect", "evaluate", "load", "resume", "train"]
