"""Policies of a user's package that write NaN, the wrong thing, or nothing: a sentence, before the env is stepped."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import is_a_sentence
from face import open_run
from safetensors.torch import load_file

LATER = {
    "raises_later": (2, ["the policy raised", "ValueError: the net is torn", "step 9 of the batch"]),
    "exits_later": (2, ["the policy raised", "SystemExit: 0"]),
    "nothing_later": (2, ["the policy"]),
    "wide_later": (2, ["the policy", "step 9 of the batch"]),
    "lone_later": (2, ["the policy", "step 9 of the batch"]),
    "float_later": (2, ["action is not what it was", "torch.float32", "the env was not stepped"]),
    "seven_later": (2, ["action is out of range", "expected 0 to 1, got [7 7]", "the env was not stepped"]),
    "minus_later": (2, ["action is out of range", "got [-1 -1]"]),
}


@pytest.mark.parametrize("name", LATER)
def test_a_policy_that_fails_later_is_stopped_before_the_env_is_stepped(hostile, name):
    code, words = LATER[name]
    # the env of this test would accept any action, and use a wrong one without a word
    is_a_sentence(hostile("collect", "env.id=good", f"policy={name}", "run.dir=r"), code, *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("builds_nothing", ["policy=builds_nothing is no module", "None"]),
        ("builder_breaks", ["could not be built", "ZeroDivisionError"]),
        ("scripted", ["policy=scripted holds TorchScript"]),
        ("linear", ["the policy's action does not fit", "expected shape ()", "got (2,)"]),
    ],
)
def test_a_policy_that_cannot_begin_is_named(hostile, name, words):
    is_a_sentence(hostile("collect", "env.id=good", f"policy={name}", "run.dir=r"), 2, *words)


@pytest.mark.parametrize(("name", "error"), [("memory_later", "MemoryError"), ("torch_memory_later", "RuntimeError")])
def test_a_policy_that_runs_out_of_memory_is_no_mistake_and_its_frames_are_gone_on_with(hostile, name, error):
    answer = hostile("collect", "env.id=good", f"policy={name}", "collector.frames_per_batch=16", "run.dir=r")
    said = ["there is not enough memory", error, "Lower env.num", "16 frames are on disk; resume with: rlcli"]
    is_a_sentence(answer, 5, *said)
    assert "the policy raised" not in answer.err


def test_a_builder_that_runs_out_of_memory_is_no_mistake(hostile):
    said = ["there is not enough memory", "MemoryError: of the builder", "Lower env.num"]
    is_a_sentence(hostile("collect", "env.id=good", "policy=builder_needs_memory", "run.dir=r"), 5, *said)


@pytest.mark.parametrize("at", [1, 14, 15, 16])
def test_a_network_that_runs_out_of_memory_does_not_misfit(hostile, at):
    answer = hostile("train", "env.id=good", "policy=critic_needs_memory", f"policy.kwargs={{at:{at}}}", "run.dir=r")
    is_a_sentence(answer, 5, "there is not enough memory", "can't allocate memory", "Lower env.num")
    assert "Compare with" not in answer.err
    assert (at == 1) or "Saved at 256 frames; resume with: rlcli resume r" in answer.err


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_policy_that_does_not_tell_its_weights_is_refused_before_anything_is_made(hostile, verb, tmp_path):
    answer = hostile(verb, "env.id=good", "policy=unsaved", "run.dir=r")
    is_a_sentence(answer, 2, "policy=unsaved cannot be saved", "RuntimeError: no state for you")
    assert not list(tmp_path.iterdir())


def test_training_needs_a_critic_and_says_so(hostile):
    is_a_sentence(hostile("train", "env.id=good", "policy=raises_later"), 2, "needs a critic", "(actor, critic)")


@pytest.mark.parametrize("verb", ["train", "collect"])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("env.id=good policy.kwargs={part:actor}", ["the policy's logits is not finite", "the env was not stepped"]),
        ("env.id=Pendulum-v1 policy.kwargs={part:actor}", ["is not finite", "the env was not stepped"]),
        ("env.id=Pendulum-v1 policy.kwargs={part:deviation}", ["scale is not finite", "the env was not stepped"]),
        (
            "env.id=Pendulum-v1 policy.kwargs={part:deviation,state_dependent:true}",
            ["is not finite", "the env was not stepped"],
        ),
    ],
)
def test_a_policy_with_a_nan_stops_before_the_first_step(hostile, verb, settings, words):
    is_a_sentence(hostile(verb, "policy=poisoned", "run.dir=r", *settings.split()), 6, *words)
    assert open_run("r").summary["frames"] == 0 and not list(Path("r/data").glob("0*"))


def test_what_the_policy_was_shown_is_kept_in_a_file(hostile):
    answer = hostile("collect", "env.id=good", "policy=nan_later", "run.dir=r")
    is_a_sentence(answer, 6, "the policy's logits is not finite", "Its inputs are in r/not_finite.safetensors")
    shown = load_file("r/not_finite.safetensors")["observation"]
    assert shown.shape == (2, 3) and shown.isfinite().all() and shown.any()


def test_a_deviation_too_large_for_a_float_never_reaches_the_data(hostile):
    answer = hostile("train", "env.id=Pendulum-v1", "policy.init_std=1e38", "run.dir=r")
    is_a_sentence(answer, 6, "action is not finite", "policy.init_std")


def test_a_poisoned_critic_moves_no_weight(hostile):
    answer = hostile("train", "env.id=good", "policy=poisoned", "policy.kwargs={part:critic}", "run.dir=r")
    is_a_sentence(answer, 6, "state_value is not finite", "step 0 of env 0", "diverged")
    assert open_run("r").checkpoints == []
