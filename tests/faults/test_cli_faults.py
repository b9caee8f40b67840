"""Whatever is typed wrong, missing, taken, damaged or full: a sentence and an exit code, and nothing is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from answers import is_a_sentence
from face import open_run

from rlcli.data.files import sealed_folder
from rlcli.data.files.disk import digest_of
from rlcli.runs import checkpoint
from rlcli.runs.folder import locked

# ---- what is typed -----------------------------------------------------------------------------------------------
# words -> what the sentence says
TYPED = {
    "recipe=ppo_exat": ["unknown recipe 'ppo_exat'", "did you mean ppo_exact?"],
    "collector.frames_per_bacth=3": ["did you mean collector.frames_per_batch?"],
    "memory=exat": ["unknown memory 'exat'", "did you mean exact?"],
    "env.id=CartPol-v1": ["unknown env id", "did you mean CartPole-v1?"],
    "env.id=CartPole-v9": ["unknown env id", "CartPole-v1"],
    "env.id=../../etc/passwd": ["unknown env id"],
    "env.id=my_env": ["unknown env id", "--import PACKAGE"],
    "collector.frames_per_batch=0": ["collector.frames_per_batch is 0", ">= 1"],
    "collector.frames_per_batch=1.5": ["must be a whole number"],
    "policy.hidden=[64,[3,a]]": ["policy.hidden must be a list of whole numbers", "[64, [3, 'a']]"],
    "policy.hidden=[64,{a:1}]": ["policy.hidden must be a list of whole numbers"],
    "optim.betas=[0.9,x]": ["optim.betas must be a list of numbers"],
    "optim.betas=[0.9]": ["optim.betas is a pair"],
    "env.wrappers=[[ClipAction]]": ["neither a name nor a name with arguments"],
    "env.wrappers=[NoSuchWrapper]": ["unknown wrapper"],
    "env.wrappers=[{TimeLimit:{nonsense:1}}]": ["does not take these arguments", "nonsense"],
    "env.wrappers=[TimeLimit]": ["does not take these arguments", "max_episode_steps"],
    "env.transforms=[ToTensorImage]": ["ToTensorImage needs images [H, W, C]", "observation is [4]"],
    "env.transforms=[{RewardClipping:{clamp_min:x}}]": ["RewardClipping does not take these arguments", "'x'"],
    "env.transforms=[{RewardNorm:{gamma:x}}]": ["RewardNorm does not take these arguments", "'x'"],
    "env.transforms=[{CatFrames:{N:2.5,dim:-1}}]": ["N must be a whole number", "CatFrames of env.transforms"],
    "env.transforms=[{ToFloat:{out_keys:[done]}}]": ["ToFloat writes observations, and done is none"],
    "env.transforms=[{ToFloat:{out_keys:[a,b]}}]": ["ToFloat needs an out_key for each in_key"],
    "env.transforms=[{InitTracker:{init_key:[]}}]": ["InitTracker does not"],
    "env.kwargs={nonsense:1}": ["does not take these settings", "nonsense"],
    "memory.keep=[3]": ["memory.keep holds 3"],
    "memory.keep=[[a,[b]]]": ["memory.keep holds ['a', ['b']]"],
    "memory.keep=[nothere]": ["nothere"],
    "device=cuda": ["device=cuda is not there", "use device=cpu"],
    "device.train_device=cuda:3": ["is not there"],
    "device.env_device=toaster": ["is not a device"],
    "threads=100000": ["threads is 100000", "<= 1024"],
    "total_frames=1e300": ["total_frames is 1000", "<= 1000000000000000"],
    "seed=4294967296": ["<= 4294967295"],
    "optim.lr=nan": ["optim.lr is nan"],
    "env.reward_scale=inf": ["env.reward_scale is inf"],
    "memory=exact memory.next_obs=compact": ["contradict"],
    "policy=random": ["no weights to train", "rlcli collect"],
    "policy.path=x": ["policy=checkpoint"],
    "policy=checkpoint": ["needs policy.path"],
    "policy=cnn": ["needs an image", "policy=mlp"],
    "policy.distribution=normal": ["does not fit this action"],
    "sampler.batch_size=100000000000000000000": ["sampler.batch_size"],
    "run.eval_every=5 run.eval_episodes=0": ["run.eval_every needs run.eval_episodes"],
    "run.keep=1": ["run.keep is 1"],
    "run.dir=''": ["run.dir is empty"],
    "recipe=collect_random": ["no weights to train"],
    "recipe=../../etc/passwd": ["unknown recipe"],
    "env.id=${oc.env:HOME}": ["resolver"],
    "run.dir=${run.dir}": ["ecursive"],
    "env=envpool": ["envpool", "pip install"],
    "env.id=no_such_module_at_all:X-v0": ["no_such_module_at_all"],
    "hydra.job.chdir=true": ["not accepted"],
    "a=b=c": ["cannot read 'a=b=c'"],
    "=3": ["unknown key ''"],
    "--config-dir=x": ["no flag --config-dir"],
}


@pytest.mark.parametrize("words", TYPED)
def test_what_is_typed_wrong_is_a_sentence_and_leaves_nothing_behind(rlcli, tmp_path, words):
    if words == "env=envpool" and __import__("importlib.util").util.find_spec("envpool"):
        pytest.skip("envpool is installed")
    typed = ["run.dir=r", *words.split()]
    answer = rlcli("train", *(typed[1:] if "run.dir" in words else typed))
    is_a_sentence(answer, 2, *TYPED[words])
    assert answer.out == "" or "failed" not in answer.out


@pytest.mark.parametrize("verb", ["train", "collect"])
@pytest.mark.parametrize(
    "words",
    [
        ["--import", "hostile_package", "env.id=unbuildable"],
        ["env.wrappers=[TimeLimit]"],
        ["policy.kwargs={a:1}"],
    ],
    ids=["env", "settings", "options"],
)
def test_a_run_that_is_refused_before_its_first_batch_leaves_no_folder(rlcli, tmp_path, verb, words):
    (tmp_path / "hostile_package.py").write_text(
        "import rlcli\n@rlcli.register_env('unbuildable')\ndef unbuildable():\n    raise RuntimeError('no license')\n"
    )
    sys.modules.pop("hostile_package", None)
    answer = rlcli(verb, "run.dir=r", "console=off", *words)
    assert answer.code in (2, 3) and not (tmp_path / "r").exists(), answer
    assert "Traceback" not in answer.err


@pytest.mark.skipif(sys.platform == "darwin", reason="its file system takes only UTF-8")
def test_a_run_in_a_folder_whose_name_is_no_text(rlcli, run):
    name = os.fsdecode(b"r\xff\xfe")
    run.rename(run.with_name(name))
    for words in (["eval", "--episodes", "1"], ["inspect"], ["verify"], ["resume", "logger.kind=none"]):
        assert rlcli(words[0], name, *words[1:]).code == 0
    if find_spec("tensorboard"):
        is_a_sentence(rlcli("resume", name, "logger.kind=tensorboard", "total_frames=1280"), 5, "logger.kind=none")
    is_a_sentence(rlcli("train", f"run.dir={name}"), 2, "cannot read")


def test_a_folder_whose_first_files_cannot_be_written_is_taken_back(rlcli, tmp_path, monkeypatch):
    from rlcli.runs import folder

    def full(*a, **k):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.json, "dumps", full)
    is_a_sentence(rlcli("train", "run.dir=r"), 5, "No space left")
    assert not (tmp_path / "r").exists()


def test_frames_are_exact_to_one_step_of_all_envs_and_the_run_says_so(rlcli):
    answer = rlcli("collect", "env.num=5", "total_frames=256", "run.dir=r", "console=plain")
    assert answer.code == 0 and open_run("r").summary["frames"] == 260
    assert "total_frames 256 rounded up to 260, a multiple of 5 envs" in answer.out + answer.err


def test_stacks_may_be_stacked_again(rlcli):
    stacks = "env.transforms=[{CatFrames:{N:3,dim:-1}},{CatFrames:{N:2,dim:-1}}]"
    assert rlcli("collect", "run.dir=r", "total_frames=256", stacks).code == 0


def test_several_mistakes_are_on_one_page_and_nothing_runs(rlcli, tmp_path):
    answer = rlcli("train", "env.nm=3", "seed=x", "memory=exat", "optim.lr=-1", "policy.hidden=[a]", "device=cuda")
    lines = answer.err.strip().splitlines()
    assert answer.code == 2 and "6 problems" in lines[0] and len(lines) == 7 and "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


def test_settings_of_an_env_may_be_given_as_one_mapping(rlcli):
    assert rlcli("train", "env.id=Pendulum-v1", "env.kwargs={g:9.0}", "run.dir=r").code == 0
    assert open_run("r").config["env"]["kwargs"] == {"g": 9.0}


def test_what_does_not_fit_into_memory_names_what_to_lower(rlcli):
    """A size that no machine has: refused by the allocator at once."""
    answer = rlcli("train", "policy.hidden=[1000000000000]", "env.mode=native", "run.dir=r")
    assert answer.code == 5 and "memory" in answer.err and "ower" in answer.err + "lower", answer.err
    assert "Traceback" not in answer.err


# ---- the run folder ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", ["train", "collect"])
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("taken", "contains no run (run.dir=taken): runs never overwrite files"),
        ("file", "File exists"),
        ("file/below", "Not a directory"),
        ("/proc/below", "cannot write the run folder"),
        ("/dev/full", "cannot write the run folder"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be_used_is_refused(rlcli, tmp_path, verb, folder, why):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    is_a_sentence(rlcli(verb, f"run.dir={folder}"), 5, why)
    assert (tmp_path / "taken" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]


@pytest.mark.parametrize("name", ["a\0b", "a\tb", "a\nb"])
def test_a_run_folder_with_a_control_character_is_refused(rlcli, tmp_path, name):
    is_a_sentence(rlcli("train", f"run.dir='{name}'"), 2, "cannot be printed")


def test_a_read_only_run_folder_is_refused(rlcli, tmp_path):
    """Where this process may mount: a mode that root does not heed would test nothing."""
    (tmp_path / "ro").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "none", tmp_path / "ro"], capture_output=True
    ).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    try:
        is_a_sentence(rlcli("train", "run.dir=ro/r"), 5, "Read-only file system", "run.dir")
    finally:
        subprocess.run(["umount", tmp_path / "ro"], check=True)


def hold(folder, held, done) -> None:
    with locked(folder):
        held.set()
        done.wait(30)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with two checkpoints."""
    from answers import SHORT

    from rlcli.cli.main import main

    folder = tmp_path_factory.mktemp("finished") / "r"
    assert main(["train", f"run.dir={folder}", *SHORT]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that may be spoilt: `r`."""
    return Path(shutil.copytree(finished, tmp_path / "r"))


def test_a_run_folder_in_use_is_refused_with_the_pid_of_its_holder(rlcli, run):
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(run, held, done))
    holder.start()
    try:
        assert held.wait(10)
        is_a_sentence(rlcli("resume", "r"), 5, "in use", f"process {holder.pid}")
        is_a_sentence(rlcli("train", "run.dir=r"), 5, "the run folder exists")
    finally:
        done.set()
        holder.join(10)
    assert rlcli("resume", "r").code == 0


def test_a_stale_lock_is_no_obstacle(rlcli, run):
    (run / "lock").write_text('{"pid": 999999, "host": "elsewhere", "started": 0.0, "since": "long ago"}')
    assert rlcli("resume", "r").code == 0
    (run / "lock").write_text("nonsense")
    assert rlcli("resume", "r").code == 0


def test_of_two_processes_that_find_a_folder_empty_one_gets_it(rlcli, tmp_path, monkeypatch):
    """The other has written its configuration after this one looked."""
    from rlcli.runs import folder

    def state():
        (tmp_path / "r" / "config.json").write_text("the other's")
        return None, b""

    monkeypatch.setattr(folder, "git_state", state)
    is_a_sentence(rlcli("train", "run.dir=r"), 5, "the run folder exists")
    assert (tmp_path / "r" / "config.json").read_text() == "the other's"


# ---- damage ------------------------------------------------------------------------------------------------------
def flip(*files: Path) -> None:
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "console"),
    [
        ("tensors.safetensors", "plain"),
        ("state.json", "off"),
        ("manifest.json", "plain"),
        *(pytest.param(name, "off", marks=pytest.mark.slow) for name in ("tensors.safetensors", "manifest.json")),
        pytest.param("state.json", "plain", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_loudly(rlcli, run, name, console):
    flip(run.joinpath("checkpoints", "checkpoint_000004", name))
    for verb, rest in (("eval", ["--episodes", "1"]), ("resume", [f"console.kind={console}"])):
        answer = rlcli(verb, "r", *rest)
        said = answer.out + answer.err
        assert answer.code == 0 and "damaged" in said and f"checkpoint_000004/{name}" in said, answer
        assert "Traceback" not in said and 'File "' not in said
    assert open_run(run).summary["status"] == "done"


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_4_and_changes_nothing(rlcli, run):
    flip(*run.glob("checkpoints/*/tensors.safetensors"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for words in (["eval", "r"], ["resume", "r"], ["collect", "policy=checkpoint", "policy.path=r", "run.dir=c"]):
        answer = rlcli(*words)
        is_a_sentence(answer, 4, "no checkpoint can be read", "checkpoint_000003", "checkpoint_000004")
        assert "or start again: rlcli train total_frames=1024 collector.frames_per_batch=128" in answer.err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert all(before[path] == data for path, data in after.items())


def test_frames_may_be_collected_with_one_checkpoint_of_a_run_damaged_ones_are_refused(rlcli, run):
    path = run / "checkpoints" / "checkpoint_000003"
    words = ["collect", "policy=checkpoint", f"policy.path={path}"]
    assert rlcli(*words, "run.dir=c").code == 0
    flip(path / "tensors.safetensors")
    is_a_sentence(rlcli(*words, "run.dir=d"), 4, "checkpoint_000003/tensors.safetensors")


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(rlcli, run):
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()  # it was killed before its first one
    is_a_sentence(rlcli("resume", "r"), 5, "there is no checkpoint", "smaller run.checkpoint_every: rlcli train ")


@pytest.mark.parametrize(
    "text", [None, b"", b"\xff\xfe", b'3\n[]\n{"frames": "x"}\n{"frames": null}\n', b"[" * 99_999 + b"\n"]
)
def test_lost_or_spoilt_metrics_do_not_stop_a_resume(rlcli, run, text):
    if text is None:
        (run / "metrics.jsonl").unlink()
    else:
        (run / "metrics.jsonl").write_bytes(text)
    assert rlcli("resume", "r", "total_frames=1280").code == 0
    assert [record["frames"] for record in open_run(run).metrics()] == [1152, 1280]


@pytest.mark.parametrize("name", ["config.json", "run.json"])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", "[" * 99_999, '{"seed":' + "9" * 5000 + "}", "\udcff"],
    ids=lambda t: t[:9] or "empty",
)
def test_a_spoilt_file_of_a_run_ends_with_4(rlcli, run, name, text):
    (run / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    is_a_sentence(rlcli("resume", "r"), 4, f"r/{name}")


NONSENSE = {
    "no value of its type": ({"env.num": "many"}, 2, "env.num must be a whole number"),
    "a list for a group": ({"env": []}, 2, "env cannot be []"),
    "another size": ({"env.num": 4}, 2, "env.num 2 -> 4 would change the result of this run"),
    "another env": ({"env.id": "Acrobot-v1"}, 2, "'CartPole-v1' -> 'Acrobot-v1'"),
    "another net": ({"policy.hidden": [16]}, 2, "policy.hidden [8] -> [16]"),
    "another seed": ({"seed": 9}, 2, "seed 0 -> 9"),
    "another optimizer": ({"optim.kind": "sgd"}, 2, "'adam' -> 'sgd'"),
    "several changes": ({"seed": 9, "optim.lr": 1.0}, 2, "optim.lr 0.0003 -> 1.0, seed 0 -> 9"),
    "code": ({"env.kwargs": {"_target_": "os.system"}}, 2, "nothing in a configuration runs"),
    "a module": ({"env.id": "os:X-v0"}, 2, "would import the module"),
    "a device that is not here": ({"device.kind": "cuda"}, 2, "device=cuda is not there"),
    "a key less": ({"env.num": None}, 2, "env.num"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_config_edited_by_hand_is_refused_and_the_checkpoints_stay(rlcli, run, name):
    changes, code, words = NONSENSE[name]
    config = json.loads((run / "config.json").read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        node = config
        for part in path:
            node = node[part]
        node[last] = value
    (run / "config.json").write_text(json.dumps(config))
    metrics = (run / "metrics.jsonl").read_bytes()
    answer = rlcli("resume", "r")
    assert answer.code == code and words in answer.err and "Traceback" not in answer.err, answer.err
    assert (run / "metrics.jsonl").read_bytes() == metrics and len(open_run(run).checkpoints) == 2


def test_an_empty_config_does_not_become_the_defaults(rlcli, run):
    (run / "config.json").write_text("{}")
    is_a_sentence(rlcli("resume", "r"), 2, "would change the result of", "env.num 2 -> 8", "policy.hidden [8] ->")


def test_weights_are_read_with_the_configuration_that_is_sealed_with_them(rlcli, run):
    config = json.loads((run / "config.json").read_text())
    config["policy"]["hidden"] = [16]
    (run / "config.json").write_text(json.dumps(config))
    assert rlcli("eval", "r", "--episodes", "2").code == 0
    assert rlcli("collect", "policy=checkpoint", "policy.path=r", "run.dir=c").code == 0


# every part missing, and with one of the other two values; with both in the long form
WRONG = [
    pytest.param(part, value, id=f"{value}-{part}", marks=[pytest.mark.slow] * (value is not None and k % 2 != v % 2))
    for k, part in enumerate(["policy", "update", "collector", "loop", "reporter", "random"])
    for v, value in enumerate([None, {}, 3])
]


@pytest.mark.parametrize(("part", "value"), WRONG)
@pytest.mark.every(3)
def test_a_checkpoint_with_a_fitting_seal_and_a_wrong_content_is_refused(rlcli, run, part, value):
    for path in checkpoint.FOLDERS.paths(run / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        if value is None:
            del state[part]
        else:
            state[part] = value
        text = json.dumps(state).encode()
        manifest = checkpoint.read_manifest(path)
        manifest["files"]["state.json"] = {"size": len(text), "digest": digest_of(text)}
        (path / "state.json").write_bytes(text)
        (path / "manifest.json").write_bytes(sealed_folder.sealed(manifest))
    answer = rlcli("resume", "r", "total_frames=1280")
    is_a_sentence(answer, 4, "does not fit", "checkpoint_000004")


def test_checkpoints_that_were_saved_and_are_gone_are_called_that_by_every_verb(rlcli, run):
    shutil.rmtree(run / "checkpoints")
    saved = f"{open_run(run).saved_frames:,} frames were saved when the run ended"
    for words in (["resume", "r", "total_frames=4096"], ["eval", "r"], ["inspect", "r"]):
        is_a_sentence(rlcli(*words), 4, "the checkpoints of this run are gone", saved, "start again: rlcli train")
    is_a_sentence(rlcli("collect", "policy=checkpoint", "policy.path=r", "run.dir=c"), 4, saved)
    verified = rlcli("verify", "r")
    assert verified.code == 4 and saved in verified.out


def test_frames_that_were_saved_and_are_gone_are_called_that(rlcli):
    assert rlcli("collect", "run.dir=c").code == 0
    is_a_sentence(rlcli("collect", "policy=checkpoint", "policy.path=c", "run.dir=d"), 2, "only training runs hold")
    shutil.rmtree("c/data")
    is_a_sentence(rlcli("inspect", "c"), 4, "frames were saved when the run ended")
    assert rlcli("verify", "c").code == 4


def test_a_run_whose_description_is_gone_does_not_verify(rlcli, run):
    (run / "run.json").unlink()
    answer = rlcli("verify", "r")
    is_a_sentence(answer, 4, "1 of", "r/run.json")
    assert "it is gone" in answer.out


# ---- disks that are full -----------------------------------------------------------------------------------------
@pytest.fixture
def disk(tmp_path):
    """`disk(kilobytes)`: a file system of that size, at `small`."""
    small = tmp_path / "small"
    small.mkdir()

    def mount(kilobytes: int, *options: str) -> Path:
        how = ",".join([f"size={kilobytes}k", *options])
        if subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", small], capture_output=True).returncode:
            pytest.skip("a small file system cannot be mounted here")
        return small

    yield mount
    subprocess.run(["umount", "-l", small], capture_output=True)


def fill(small: Path, leave: int) -> None:
    free = shutil.disk_usage(small).free
    (small / "ballast").write_bytes(bytes(max(0, free - leave)))


@pytest.mark.parametrize("verb", ["train", "collect"])
def test_a_disk_that_is_full_at_the_start_refuses_the_run(rlcli, disk, verb):
    fill(disk(8192), 0)
    answer = rlcli(verb, "run.dir=small/r")
    is_a_sentence(answer, 5, "small/r")
    assert "No space left" in answer.err or "full" in answer.err


def test_a_disk_that_fills_up_before_a_checkpoint_keeps_the_one_before(rlcli, disk, monkeypatch):
    small, save, saved = disk(8192), checkpoint.save, []

    def save_and_fill(*args, **options):
        if len(saved) == 2:
            fill(small, 8192)
        saved.append(1)
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", save_and_fill)
    answer = rlcli("train", "run.dir=small/r")
    is_a_sentence(answer, 5, "the disk is full", "bytes are needed", "are free")
    monkeypatch.undo()
    (small / "ballast").unlink()
    assert checkpoint.load_latest(small / "r" / "checkpoints").manifest["number"] == 768  # kept in memory, and saved
    assert rlcli("resume", str(small / "r")).code == 0


def test_a_disk_that_fills_up_in_the_log_ends_with_5_and_the_log_stays_whole(rlcli, disk, monkeypatch):
    from rlcli.report import metrics

    small, write, lines = disk(8192), metrics.MetricsWriter.write, []

    def write_and_fill(self, record):
        if len(lines) == 5:
            fill(small, 0)
        lines.append(1)
        if len(lines) > 5:  # a log of one page grows within it: say what a log at the end of its page would
            with metrics.written(self.path, 400):
                raise OSError(28, os.strerror(28))
        write(self, record)

    monkeypatch.setattr(metrics.MetricsWriter, "write", write_and_fill)
    answer = rlcli("train", "run.dir=small/r")
    is_a_sentence(answer, 5, "cannot write the metrics", "No space left")
    (small / "ballast").unlink()
    monkeypatch.undo()
    assert len(open_run(small / "r").metrics()) == 5
    assert rlcli("resume", str(small / "r")).code == 0


def test_a_disk_that_fills_up_while_collecting_keeps_the_frames_that_fit(rlcli, disk):
    from rlcli.data import open_segments

    small = disk(1024)
    answer = rlcli("collect", "run.dir=small/r", "total_frames=1000000", "collector.frames_per_batch=2048")
    is_a_sentence(answer, 5, "the disk is full")
    found = open_segments(small / "r" / "data")
    assert len(found) >= 1 and all(batch.numel() == 2048 for batch in found)


def test_a_disk_without_room_for_another_file_is_a_full_disk(rlcli, disk):
    disk(8192, "nr_inodes=14")
    is_a_sentence(rlcli("train", "run.dir=small/r"), 5, "the disk is full")


def test_a_run_folder_that_vanishes_ends_with_5(hostile, tmp_path, monkeypatch):
    from rlcli.learning.loops import OnPolicy

    learn, batches = OnPolicy.learn, []

    def vanish(self, *delivered):
        batches.append(1)
        if len(batches) == 3:
            (tmp_path / "r").rename(tmp_path / "elsewhere")
        return learn(self, *delivered)

    monkeypatch.setattr(OnPolicy, "learn", vanish)
    is_a_sentence(hostile("train", "env.id=good", "run.dir=r"), 5, "r/metrics.jsonl")
    monkeypatch.undo()
    assert open_run(tmp_path / "elsewhere").checkpoints


def test_a_file_limit_is_met_like_a_full_disk(rlcli, run):
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        answer = rlcli("train", "run.dir=small")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    is_a_sentence(answer, 5, "small")


# ---- numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", ["env.reward_scale=1e38", "optim.lr=1e30", "loss.critic_coeff=1e38"])
def test_a_loss_that_is_not_finite_ends_with_6_and_the_weights_before_it(rlcli, settings):
    answer = rlcli("train", "run.dir=r", settings, "collector.frames_per_batch=64")
    is_a_sentence(answer, 6, "3 updates in a row were not finite", "The weights are those of the last good step")
    for path in open_run("r").checkpoints:
        assert checkpoint.FOLDERS.verify(path) is None


def test_a_nan_that_comes_late_leaves_the_good_checkpoint_and_is_counted(rlcli, monkeypatch):
    from rlcli.learning.gradient import GradientChoice

    choose, calls = GradientChoice.of, []

    def poisoned(self, columns):
        gradient = choose(self, columns)

        def call(minibatch):
            figures = gradient(minibatch)
            calls.append(1)
            if len(calls) in (3, 4, 18, 19, 20):
                self.flat.grad[0] = float("nan")
            return figures

        return call

    with monkeypatch.context() as patch:
        patch.setattr(GradientChoice, "of", poisoned)
        answer = rlcli("train", "run.dir=r")
    is_a_sentence(answer, 6, "3 updates in a row were not finite")
    run = open_run("r")
    assert [record["skipped"] for record in run.metrics()] == [2.0, 0.0, 0.0, 0.0]  # counted; the fifth batch ended it
    assert run.summary["status"] == "failed"
    found = checkpoint.load_latest(run.path / "checkpoints")
    assert found.manifest["number"] == 512 and all(x.isfinite().all() for x in found.state["policy"].values())
    assert rlcli("resume", "r").code == 0
