"""What a command answered, and what an answer must be; the runs that these tests make."""

from __future__ import annotations

from typing import NamedTuple

SHORT = [
    "total_frames=1024",
    "collector.frames_per_batch=128",
    "sampler.batch_size=64",
    "optim.epochs=2",
    "env.num=2",
    "policy.hidden=[8]",
    "run.checkpoint_every=256",
    "run.eval_episodes=0",
    "console=plain",
    "threads=1",
    "logger=none",
]
FRAMES = [
    "total_frames=512",
    "collector.frames_per_batch=128",
    "env.num=2",
    "policy=random",
    "console=plain",
    "logger=none",
]


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def is_a_sentence(answer: Answer, code: int, *words: str) -> None:
    """One paragraph on standard error, the right exit code, and no trace of Python."""
    lines = [line for line in answer.err.splitlines() if not line.endswith(" ...")]  # what is waited for
    text = "\n".join(line for line in lines if not line.startswith("warning: "))
    assert answer.code == code, answer
    assert text.count("\n") == 0 and 20 < len(text) < 700, text
    assert "Traceback" not in answer.err and 'File "' not in answer.err and "unexpected error" not in text, text
    assert all(word in text for word in words), text
