"""Commands drawn at random over all verbs that compose: done or refused in sentences, never an error nobody foresaw."""

from __future__ import annotations

import os
import random
import types
from collections import Counter
from contextlib import suppress
from typing import get_args

import pytest
from face import VERBS, find_recipes, leaves
from omegaconf import OmegaConf

from rlcli.config import compose
from rlcli.config.option import Leaf, groups
from rlcli.config.other_names import NAMES
from rlcli.config.registry import choices
from rlcli.config.schemas import read_with
from rlcli.errors import ConfigError

SEED = int(os.environ.get("FUZZ_SEED", "0"))
JUNK = (
    *("", "null", "true", "-1", "0", "1.5", "1e5", "1e400", "nan", "inf", "''", '"x y"', "[", "[]", "{}", "[1,[2]]"),
    *("{a:1}", "a,b", "range(0,3)", "interval(0,1)", "glob(*)", "choice(1,2)", "${seed}", "${nope}", "${oc.env:HOME}"),
    *("_target_", "os.system(1)", "../x", "\u00fc\U0001f600", "\udcff", "x" * 300, "9" * 30, "a=b", "a:b"),
    *("!!python/object:os.system", "@", "~", "+1"),
)
# key -> values that keep a run small
SMALL = dict(
    (key, values)
    for key, *values in map(
        str.split,
        """
        total_frames 1 64 100 192 2e2
        threads 1 auto
        seed 0 7
        env.id CartPole-v1 Pendulum-v1 MountainCarContinuous-v0 Acrobot-v1 ALE/Pong-v5 FrozenLake-v1 Taxi-v4
        env.num 1 2 3
        env.frame_stack 1 2
        env.max_episode_steps 1 5 20
        env.kwargs {} {render_mode:rgb_array}
        env.wrappers [ClipAction] [{TimeLimit:{max_episode_steps:4}}] [FlattenObservation] [RescaleAction]
        env.transforms [RunningNorm] [{RewardScaling:{loc:0.0,scale:0.1}}] [StepCounter] [ToFloat,DoubleToFloat]
        env.atari.screen_size 84
        env.atari.frame_skip 4
        env.atari.noop_max 0 30
        policy.hidden [4] [8,8] []
        policy.path null
        policy.kwargs {}
        collector.frames_per_batch 1 30 64 128
        collector.init_random_frames 0 10 64
        collector.trajs_per_batch 1 2
        collector.max_frames_per_traj 3 10
        memory.keep [] [logits] [loc]
        storage.max_size 64 200
        storage.init_from null
        storage.scratch_dir null scratch
        storage.kwargs {}
        sampler.batch_size 1 16 32 64
        sampler.slice_len 2 4 16
        sampler.num_slices 2 4
        sampler.kwargs {}
        value.num_chunks 1 2 5
        value.value_chunk_size 1 2
        value.shifted_budget 1 3
        value.kwargs {}
        loss.n_steps 1 3
        loss.target_every 1 7
        loss.kwargs {}
        optim.betas [0.9,0.99] [0,0]
        optim.epochs 1 2
        optim.updates_per_frame 0.1 1
        run.dir r2
        logger.kwargs {}
        run.keep 2
        run.checkpoint_every 1 64
        run.eval_every 64
        run.eval_episodes 0 1
        """.strip().splitlines(),
    )
)


def fitting(draw: random.Random, leaf: Leaf) -> str:
    """A value that the key's type and range allow."""
    if leaf.key in SMALL:
        return draw.choice(SMALL[leaf.key])
    option, kinds = leaf.option, (leaf.hint, *get_args(leaf.hint))
    legal = [*option.choices, *option.words, *(("null",) if types.NoneType in kinds else ())]
    if bool in kinds:
        legal += ["true", "false"]
    if float in kinds:
        low, high = option.ge or option.gt or 0.0, min(option.le or option.lt or 2.0, 2.0)
        legal += [f"{draw.uniform(low, high):.3g}"]
    elif int in kinds:
        legal += [str(int(option.ge or 0) + draw.randrange(3))]
    return draw.choice(legal or ["x"])


def command(draw: random.Random, verb: str, *, sane: float) -> list[str]:
    """Words after the verb: choices, keys, names of other libraries, flags, and what nobody means."""
    schema = VERBS[verb]
    words = []
    for _ in range(draw.randrange(1, 7)):
        what = draw.random()
        key = draw.choice(sorted(leaves(schema)))
        if what < 0.3:
            group = draw.choice([group for group in groups(schema) if f"{group}.kind" in leaves(schema)])
            words.append(
                f"{group}={draw.choice(choices(schema, group)) if draw.random() < sane else draw.choice(JUNK)}"
            )
        elif draw.random() < sane:
            words.append(f"{key}={fitting(draw, leaves(schema)[key])}")
        elif what < 0.8:
            words.append(f"{draw.choice(['', '', '+', '++', '~'])}{key}={draw.choice(JUNK)}")
        elif what < 0.9:
            words.append(f"{draw.choice(NAMES)}={draw.choice(JUNK)}")
        else:
            words += [f"--{draw.choice(NAMES)}", draw.choice(["3", "x", *JUNK])]
    return words


def is_foreseen(answer, words, codes=(0, 2)) -> None:
    said = answer.err + answer.out
    assert answer.code in codes, (words, answer)
    assert "Traceback" not in said and 'File "' not in said and "unexpected error" not in said, (words, answer)
    assert answer.code == 0 or 10 < len(answer.err) < 20_000, (words, answer)


def looked_at(rlcli, folder, numbers) -> None:
    for number in numbers:
        draw = random.Random(f"look {SEED} {number}")
        verb = draw.choice(list(VERBS))
        words = command(draw, verb, sane=draw.choice([0.2, 0.9]))
        how = draw.choice(["cfg", "cfg", "show", "why", "multirun"])
        if how == "cfg":
            answer = rlcli(verb, *words, "--cfg", "job")
        elif how == "multirun":
            answer = rlcli(verb, "-m", *words, "seed=1,2", "env.num=0,-1")  # a sweep that is refused by its values
        else:
            answer = rlcli("show", verb, *words, *(["--why"] if how == "why" else []))
        is_foreseen(answer, (number, how, verb, words))
        assert list(folder.iterdir()) == []


SHORT = """
total_frames=128 threads=1 collector.frames_per_batch=64 env.num=2 sampler.batch_size=32 policy.hidden=[8]
optim.epochs=1 storage.max_size=256 run.eval_episodes=0 console=off logger=none
""".split()  # noqa: SIM905


def short(schema: type, words: list[str]) -> list[str]:
    """What makes a run small, is not among the words, and means something beside them."""
    typed = {word.partition("=")[0] for word in words}
    idle = set() if "storage" in typed else {"storage.max_size"}
    idle |= {"policy.hidden"} if "policy" in typed or "loss.kind" not in leaves(schema) else set()
    idle |= {"optim.epochs"} if {"loss=dqn", "loss=sac"} & set(words) else set()
    idle |= {key for key, leaf in leaves(schema).items() if read_with(schema, leaf) is None}
    keys = {*leaves(schema), *groups(schema)}
    return [word for word in SHORT if word.partition("=")[0] in keys - typed - idle]


def run_for_real(rlcli, numbers) -> list[int]:
    codes = []
    for number in numbers:
        draw = random.Random(f"run {SEED} {number}")
        verb = draw.choice(["train", "train", "collect", "plan"])
        job = draw.choice(list(VERBS)) if verb == "plan" else verb
        words = command(draw, job, sane=1.0)
        if job == "train" and draw.random() < 0.4:
            loss = draw.choice(["loss=dqn", "loss=sac env.id=Pendulum-v1"])
            words = [*loss.split(), "storage=tensor", "sampler=random", *words]
        answer = rlcli(
            verb, *([job] if verb == "plan" else [f"run.dir=run_{number}"]), *short(VERBS[job], words), *words
        )
        is_foreseen(answer, (number, verb, job, words), (0, 2, 3, 5, 6))
        codes.append(answer.code)
    return codes


def test_drawn_commands_compose_or_are_refused(rlcli, tmp_path):
    looked_at(rlcli, tmp_path, range(20))


def test_drawn_runs_end_or_are_refused(rlcli):
    assert 0 in run_for_real(rlcli, range(5))


def as_hydra_composes(monkeypatch, numbers) -> int:
    """Compose drawn commands twice, the second time by Hydra alone; how many were composed and how many refused."""
    composed, found = compose._composed, Counter()

    def tried(make, *args):
        try:
            job = compose._job(make(*args), None, any(text.startswith("hydra.run.dir=") for text in args[1]))
        except ConfigError as error:
            return str(error)
        return OmegaConf.to_yaml(job.node), repr(job.cfg), job.choices, OmegaConf.is_struct(job.node)

    def both(verb, overrides, stored):
        ours, hydras = tried(composed, verb, overrides, stored), tried(compose.compose_tree, verb, overrides)
        assert ours == hydras, (verb, overrides)
        found[type(ours)] += 1
        return composed(verb, overrides, stored)

    monkeypatch.setattr(compose, "_composed", both)
    for number in numbers:
        draw = random.Random(f"compose {SEED} {number}")
        verb = draw.choice(list(VERBS))
        recipe = draw.choice([f"recipe={name}" for name, recipe in find_recipes().items() if recipe.verb == verb])
        own = draw.choice(
            ["${seed}", "${hydra.job.override_dirname}", "${hydra.overrides.task}", "${hydra.runtime.cwd}"]
        )
        words = [*draw.choice([[], [recipe], [f"hydra.run.dir=x/{own}"]]), *command(draw, verb, sane=0.9)]
        with suppress(ConfigError):
            compose.plan(verb, words, look=True)
    return found[tuple]


def test_choices_with_values_on_top_are_what_hydra_composes(monkeypatch):
    assert as_hydra_composes(monkeypatch, range(8)) > 4


@pytest.mark.slow
def test_many_choices_with_values_on_top_are_what_hydra_composes(monkeypatch):
    assert as_hydra_composes(monkeypatch, range(1000, 2000)) > 750


@pytest.mark.slow
def test_many_drawn_commands_compose_or_are_refused(rlcli, tmp_path):
    looked_at(rlcli, tmp_path, range(1000, 2000))


@pytest.mark.slow
def test_many_drawn_runs_end_or_are_refused(rlcli):
    codes = run_for_real(rlcli, range(1000, 1400))
    assert codes.count(0) > 50
