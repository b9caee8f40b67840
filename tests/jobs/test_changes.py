"""Thirty things that may be different when a run is resumed: what breaks exactness is refused and listed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from face import Saver, configure, open_run, refused

from rlcli.build import collect, resume, resumed, train
from rlcli.config import registry
from rlcli.data.files import sealed_folder
from rlcli.errors import ConfigError, ResourceError, StoppedSafely
from rlcli.runs import checkpoint
from rlcli.runs.provenance import surroundings

TINY = [
    "total_frames=256", "collector.frames_per_batch=128", "env.num=2", "policy.hidden=[8]", "optim.epochs=1",
    "run.eval_episodes=0", "console=off", "logger=none", "run.checkpoint_every=128", "sampler.batch_size=64",
]  # fmt: skip
NOW = surroundings(1)

# typed on the command line; None where it is harmless, or what the refusal must list
TYPED = {
    "total_frames=384": None,
    "run.checkpoint_every=64": None,
    "run.keep=3": None,
    "run.eval_episodes=1": None,
    "console.kind=plain": None,
    "console=plain": None,
    "logger=auto": None,
    "logger.kind=auto": None,
    "threads=1": None,  # what auto has chosen
    "threads=3": "threads 1 -> 3",
    "seed=7": "seed 0 -> 7",
    "env.num=4": "env.num 2 -> 4",
    "env.id=Acrobot-v1": "env.id 'CartPole-v1' -> 'Acrobot-v1'",
    "collector.frames_per_batch=64": "collector.frames_per_batch 128 -> 64",
    "policy.hidden=[16]": "policy.hidden [8] -> [16]",
    "optim.lr=0.5": "optim.lr 0.0003 -> 0.5",
    "value.gamma=0.5": "value.gamma 0.99 -> 0.5",
    "loss.clip_epsilon=0.5": "loss.clip_epsilon 0.2 -> 0.5",
}
# what the run was saved with, where that is not what is here now
AROUND = {
    ("torch", "1.0.0"): f"torch 1.0.0 -> {NOW['torch']}",
    ("numpy", "1.0.0"): f"numpy 1.0.0 -> {NOW['numpy']}",
    ("tensordict", "0.0.1"): f"tensordict 0.0.1 -> {NOW['tensordict']}",
    ("gymnasium", "0.20"): f"gymnasium 0.20 -> {NOW['gymnasium']}",
    ("numba", "0.1"): f"numba 0.1 -> {NOW['numba']}",
    ("rlcli", "0.0.0"): f"rlcli 0.0.0 -> {NOW['rlcli']}",
    ("mujoco", "1.2"): "mujoco 1.2 -> ",
    ("ale-py", "0.1"): "ale-py 0.1 -> ",
    ("python", "3.7.1"): f"python 3.7.1 -> {NOW['python']}",
    ("python", ".".join([*NOW["python"].split(".")[:2], "99"])): None,  # a bug-fix release
    ("device", "cuda"): "device cuda -> cpu",
    ("cpu", "NEON"): f"cpu NEON -> {NOW['cpu']}",
    ("rich", "1.0"): None,
    ("hydra-core", "0.1"): None,
    ("platform", "another kernel"): None,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folders of a training and of a collecting run, both finished."""
    root = tmp_path_factory.mktemp("finished")
    train(configure("train", words := [*TINY, f"run.dir={root}/train"]), words)
    words = [*TINY[:3], "console=off", "logger=none", "policy=random", f"run.dir={root}/collect"]
    collect(configure("collect", words), words)
    return root


@pytest.fixture
def copied(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def reseal(folder: Path, **parts) -> None:
    """Let the checkpoints of a run say something else in their manifests, under a seal that fits."""
    for path in checkpoint.FOLDERS.paths(folder / "checkpoints"):
        manifest = checkpoint.read_manifest(path)
        for name, change in parts.items():
            manifest[name].update(change)
        (path / checkpoint.MANIFEST).write_bytes(sealed_folder.sealed(manifest))


def is_refused_until_forced(path, listed: str, overrides=()) -> None:
    before = {file: file.read_bytes() for file in Path(path).rglob("*.json*")}
    with pytest.raises(ConfigError) as refused:
        resume(path, overrides)
    command = shlex.join(["rlcli", "resume", str(path), *overrides, "--force"])
    assert listed in str(refused.value) and str(refused.value).rstrip(".").endswith(command)
    assert all(file.read_bytes() == data for file, data in before.items()), "a refusal changes nothing"
    resume(path, overrides, force=True)


def test_there_are_thirty_of_them():
    assert len(TYPED) + len(AROUND) >= 30


@pytest.mark.parametrize("override", TYPED)
def test_a_typed_change(copied, override):
    if TYPED[override] is None:
        resume("train", [override])
    elif override.startswith(("env.id", "policy")):  # forced, these fit no weights: the refusal alone
        with pytest.raises(ConfigError) as refused:
            resume("train", [override])
        assert TYPED[override] in str(refused.value)
    else:
        is_refused_until_forced("train", TYPED[override], [override])


@pytest.mark.parametrize("override", ["env.id=Acrobot-v1", "policy.hidden=[16]", "env.num=4"])
def test_a_forced_change_that_fits_nothing_saved_is_named(copied, override):
    with pytest.raises(ConfigError) as refused:
        resume("train", [override, "total_frames=384"], force=True)
    assert f"the saved state does not fit {TYPED[override]}" in str(refused.value)
    assert not open_run(Path("train")).info.get("resumed")
    assert resume("train", ["total_frames=384"]).summary["frames"] == 384


def test_the_help_lists_what_may_change():
    text = (Path(resumed.__file__).parents[1] / "help" / "runs.md").read_text()
    (told,) = re.findall(r"`total_frames`,.*?may change on resume", text, re.DOTALL)
    for name in resumed.HARMLESS:
        assert f"`{name}`" in told or f"`{name}.*`" in told


@pytest.mark.parametrize("name, was", AROUND)
def test_another_version_or_machine(copied, name, was):
    reseal(copied / "train", versions={name: was})
    listed = AROUND[name, was]
    if listed is None:
        assert resume("train", ["total_frames=384"]).summary["frames"] == 384
        (record,) = open_run("train").info["resumed"]
        assert f"{name} {was} -> " in record["said"], "harmless, and listed all the same"
    else:
        is_refused_until_forced("train", listed)


@pytest.mark.parametrize("override", ["policy.init_std=0.5", "policy.orthogonal=false", "run={dir: elsewhere}"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_read_only_when_a_run_begins_is_refused_though_it_is_forced(copied, override, force):
    refused(ConfigError, "nothing", lambda: resume("train", [override, "total_frames=384"], force=force))
    assert not open_run(Path("train")).info.get("resumed")


def test_another_folder_is_refused_with_how_to_move_a_run(copied):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as refused:
        patch.setattr(registry, "imported", ["mine"])
        resume("train", ["run.dir=there", "total_frames=384"], force=True)
    moved = r"mv train there; rlcli resume there --import mine total_frames=384 --force"
    assert re.search(moved, str(refused.value))
    shutil.move("train", "there")
    assert resume("there", ["total_frames=384"]).summary["frames"] == 384


@pytest.mark.parametrize("there", ["null", "collect", "missing/there"])
def test_a_folder_that_a_run_cannot_be_moved_to_gets_no_such_command(copied, there):
    with pytest.raises(ConfigError, match="would change nothing") as refused:
        resume("train", [f"run.dir={there}"])
    assert "mv " not in str(refused.value) and "Leave it out" in str(refused.value)


def test_the_folder_that_a_run_is_in_may_be_spelled_otherwise(copied):
    assert resume("train", ["run.dir=./train", "total_frames=384"]).summary["frames"] == 384
    shutil.move("train", "there")
    assert resume("there", ["total_frames=512"]).summary["frames"] == 512


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_finished_run_says_what_was_not_changed(copied, verb, capsys):
    resume(verb)
    assert capsys.readouterr().out.count("\n") == 1
    resume(verb, ["env.num=4"], force=True)
    assert "not changed, since the run is finished: env.num 2 -> 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "built"), [("train", "rlcli.build.training.env_of_run"), ("collect", "rlcli.build.collecting.env_of_run")]
)
def test_a_resume_that_is_stopped_while_its_parts_are_made_is_told_as_it_was_typed(copied, monkeypatch, verb, built):
    """What was typed is noted in the run folder only after that."""
    monkeypatch.setattr(built, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    typed = ["total_frames=2048", "env.num=4"]
    with pytest.raises(StoppedSafely) as stopped:
        resume(verb, typed, force=True)
    command = shlex.join(["rlcli", "resume", verb, *typed, "--force"])
    assert str(stopped.value).endswith(f"Resume with: {command}")


@pytest.mark.parametrize(
    ("verb", "start", "built"),
    [("train", train, "rlcli.build.training.env_of_run"), ("collect", collect, "rlcli.build.collecting.env_of_run")],
)
def test_a_run_that_is_stopped_before_it_began_begins_in_the_folder_that_was_typed(
    tmp_path, monkeypatch, verb, start, built
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(built, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    typed = [*TINY[:3], "policy=random", "run.dir=r"] if verb == "collect" else [*TINY, "run.dir=r"]
    with pytest.raises(StoppedSafely) as stopped:
        start(configure(verb, typed), typed)
    assert f"Start it with: {shlex.join(['rlcli', verb, *typed])}" in str(stopped.value) and not Path("r").exists()


def test_all_differences_are_in_one_list(copied):
    reseal(copied / "train", versions={"torch": "1.0.0"}, config={"seed": 5})
    with pytest.raises(ConfigError) as refused:
        resume("train", ["optim.lr=0.5"])
    for listed in ("optim.lr 0.0003 -> 0.5", "seed 5 -> 0", "torch 1.0.0 -> "):
        assert listed in str(refused.value)


def test_more_cores_matter_only_where_auto_took_them_all(copied, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    resume("train")  # a small net: one thread then, and now
    reseal(copied / "train", versions={"threads": "4", "cores": "4"})
    refused(ConfigError, "64 threads", lambda: resume("train"))


@pytest.mark.parametrize(
    "override, listed", [("seed=7", "seed 0 -> 7"), ("env.reward_scale=2.0", "env.reward_scale 1.0 -> 2.0")]
)
def test_a_collecting_run_is_as_strict(copied, override, listed):
    is_refused_until_forced("collect", listed, [override])
    assert resume("collect", ["total_frames=384"]).summary["frames"] == 384


def test_what_was_changed_once_stays_changed_and_is_reported(copied):
    run = resume("train", ["total_frames=384"])
    assert run.config["total_frames"] == 384
    assert resume("train").summary["frames"] == 384, "not told again, and finished at what it was told"
    assert resume("train", ["total_frames=512"]).summary["frames"] == 512
    run = open_run("train")
    assert [record["said"] for record in run.info["resumed"]] == ["total_frames 256 -> 384", "total_frames 384 -> 512"]
    assert run.summary["resumed"] == run.info["resumed"]
    report = (run.path / "report.md").read_text()
    assert "at 256 frames: total_frames 256 -> 384" in report and "at 384 frames: total_frames 384 -> 512" in report
    sealed = checkpoint.load_latest(run.path / "checkpoints").manifest["config"]
    assert sealed == json.loads((run.path / "config.json").read_text()) and sealed["total_frames"] == 512


def test_what_was_forced_need_not_be_forced_again_even_if_it_was_killed_before_the_next_checkpoint(copied, monkeypatch):
    from rlcli.learning.update import Update

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Update, "improve", lambda *_, **__: 1 / 0)
        resume("train", ["total_frames=384", "optim.lr=0.5"], force=True)
    assert resume("train").summary["frames"] == 384
    assert resume("train", ["total_frames=512"]).config["optim"]["lr"] == 0.5
    refused(ConfigError, "optim.lr 0.5 0.1", lambda: resume("train", ["optim.lr=0.1"]))


def test_a_change_that_is_taken_back_before_the_next_checkpoint_is_gone(copied, monkeypatch):
    from rlcli.learning.update import Update

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Update, "improve", lambda *_, **__: 1 / 0)
        patch.setattr(Saver, "rescuing", contextlib.nullcontext)  # as where it is killed
        resume("train", ["total_frames=512", "optim.lr=0.5"], force=True)
    assert resume("train", ["total_frames=384", "optim.lr=3e-4"]).config["total_frames"] == 384
    said = [record["said"] for record in open_run("train").info["resumed"]]
    assert "total_frames 256 -> 384" in said[1] and "optim.lr 0.5 -> 0.0003" in said[1], said
    assert resume("train").summary["frames"] == 384, "finished at what it was told last"
    assert resume("train", ["total_frames=512"]).config["optim"]["lr"] == 3e-4


def test_a_refused_resume_leaves_the_metrics_as_they_were(copied):
    shutil.move("train/checkpoints/checkpoint_000002", "aside")
    before = Path("train/metrics.jsonl").read_bytes()
    refused(ConfigError, "fit", lambda: resume("train", ["policy.hidden=[16]"], force=True))
    assert Path("train/metrics.jsonl").read_bytes() == before
    shutil.move("aside", "train/checkpoints/checkpoint_000002")
    assert [line["frames"] for line in resume("train", ["total_frames=384"]).metrics()] == [128, 256, 384]


def test_a_value_that_returns_is_forced_and_noted_anew(copied):
    for frames, lr in [(384, 1e-3), (512, 3e-4)]:
        resume("train", [f"total_frames={frames}", f"optim.lr={lr}"], force=True)
    refused(ConfigError, "optim.lr 0.0003 0.001", lambda: resume("train", ["total_frames=640", "optim.lr=1e-3"]))
    for frames, console in [(640, "plain"), (768, "off"), (896, "plain")]:
        resume("train", [f"total_frames={frames}", f"console={console}"])
    said = [record["said"] for record in open_run("train").info["resumed"]]
    assert len(said) == 5 and all(
        f"console.kind {was!r} -> {now!r}" in text
        for text, was, now in zip(said[2:], ["off", "plain", "off"], ["plain", "off", "plain"], strict=True)
    ), said


def test_a_change_by_hand_that_was_never_forced_is_refused_whatever_was_forced_before(copied):
    resume("train", ["total_frames=384", "optim.lr=0.5"], force=True)
    config = json.loads(Path("train/config.json").read_text())
    config["optim"]["lr"] = 0.25
    Path("train/config.json").write_text(json.dumps(config))
    refused(ConfigError, "optim.lr 0.5 0.25", lambda: resume("train"))


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_what_a_copy_by_hard_links_shares_is_not_written_to(copied, verb):
    shutil.copytree(verb, "copy", copy_function=os.link)
    before = {path: path.read_bytes() for path in Path("copy").rglob("*") if path.is_file() and path.name != "lock"}
    assert resume(verb, ["total_frames=384"]).summary["frames"] == 384
    assert all(path.read_bytes() == content for path, content in before.items())
    assert resume("copy", ["total_frames=384"]).summary["frames"] == 384


@pytest.mark.parametrize(("verb", "name"), [("train", "checkpoints"), ("collect", "data")])
def test_a_folder_of_a_run_that_is_a_link_is_not_written_to(copied, verb, name):
    shutil.move(f"{verb}/{name}", "elsewhere")
    Path(verb, name).symlink_to(Path("elsewhere").absolute())
    before = sorted(Path("elsewhere").rglob("*"))
    refused(ResourceError, name, lambda: resume(verb, ["total_frames=384"]))
    assert sorted(Path("elsewhere").rglob("*")) == before
