"""A sweep that is stopped says which jobs never ran, and what runs them runs exactly those."""

import gc
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
import weakref
from pathlib import Path

import pytest
from face import main

from rlcli.cli.ls_sweep import lines_of
from rlcli.errors import EnvError, NumericsError, StoppedSafely
from rlcli.runs.folder import Run


def stop_on(monkeypatch, seed, error):
    def train(cfg, overrides):
        if cfg.seed == seed:
            raise error

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)


def begin(cfg, words, status):
    """What a run leaves in its folder."""
    folder = Path(cfg.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    info = {"recipe": None, "env": cfg.env.id, "seed": cfg.seed, "overrides": words}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "summary.json").write_text(json.dumps({"status": status, "frames": 1, "total_frames": 1}))


@pytest.mark.parametrize(
    ("error", "code", "memory"), [(StoppedSafely("saved"), 75, "full,exact"), (KeyboardInterrupt(), 130, "full")]
)
def test_a_stopped_sweep_names_what_never_ran_and_resume_runs_it(
    started, monkeypatch, tmp_path, capsys, error, code, memory
):
    monkeypatch.chdir(tmp_path)
    ran, entry = [], sys.modules["rlcli.build"]

    def train(cfg, overrides):
        ran.append((cfg.seed, cfg.memory.next_obs))
        begin(cfg, overrides, "done" if cfg.seed == 4 else "stopped")
        if cfg.seed == 5 and error is not None:
            raise error

    monkeypatch.setattr(entry, "train", train)
    try:
        got = main(["train", "-m", "seed=4,5,6", f"memory={memory}", "hydra.sweep.dir='my sweep'"])
    except SystemExit as stop:
        got = stop.code
    err = capsys.readouterr().err
    jobs = [(seed, mode) for seed in (4, 5, 6) for mode in memory.split(",")]
    assert ran == jobs[: jobs.index((5, "full")) + 1]
    left = jobs[len(ran) :]
    assert got == code and f"{len(left)} of {len(jobs)} jobs did not run:" in err
    last = " ".join(["seed=6", *(["memory=exact"] if "," in memory else [])])
    assert f"  job {len(jobs) - 1}: {last}\n" in err and "Traceback" not in err
    (command,) = re.findall(r"^  rlcli (resume .*)$", err, re.M)
    resumed, error = [], None
    monkeypatch.setattr(entry, "resume", lambda path: resumed.append(path))
    assert main(shlex.split(command)) == 0
    assert ran == jobs and [str(path) for path in resumed] == [f"my sweep/{len(jobs) - len(left) - 1}"]


def test_a_sweep_file_that_was_edited_or_is_of_other_versions_is_refused(rlcli, started, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["rlcli.build"], "train", lambda cfg, words: begin(cfg, words, "stopped"))
    assert rlcli("train -m seed=1,2 hydra.sweep.dir=sw")[0] == 0
    file = tmp_path / "sw" / "sweep.json"
    written = file.read_text()
    for content, code, said in (
        (written.replace("seed=2", "seed=3"), 4, "its checksum differs"),
        (written[:-9], 4, "it is no JSON"),
        ("{}", 4, "cannot read a sweep's file"),
    ):
        file.write_text(content)
        assert (got := rlcli("resume sw"))[0] == code and said in got[2]
    file.write_text(written)
    assert "are what they were: seed=7" in rlcli("resume sw seed=7")[2]
    monkeypatch.setattr("rlcli.runs.sweep.versions", lambda: {"torch": "0.1"})
    code, _, err = rlcli("resume sw")
    assert code == 2 and "began with other versions" in err and "(now 0.1)" in err
    code, _, err = rlcli("train -m seed=1,2 hydra.sweep.dir=sw")
    assert code == 5 and "the folder holds another sweep" in err


def test_a_job_is_run_by_one_process_at_a_time(rlcli, started, monkeypatch, tmp_path):
    from rlcli.runs.sweep import open_sweep

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", lambda cfg, words: begin(cfg, words, "stopped"))
    assert rlcli("train -m seed=1,2 hydra.sweep.dir=sw")[0] == 0
    sweep, resumed = open_sweep(tmp_path / "sw"), []
    monkeypatch.setattr(sys.modules["rlcli.build"], "resume", resumed.append)
    with sweep.claimed(sweep.jobs[0]) as ours, sweep.claimed(sweep.jobs[0]) as again:
        assert ours and not again
        code, out, _ = rlcli("resume sw")
    assert code == 0 and "job 0: another process runs it" in out and [path.name for path in resumed] == ["1"]


def test_ctrl_c_in_a_real_sweep(tmp_path):
    words = [sys.executable, "-m", "rlcli", "train", "-m", "seed=0,1,2", "total_frames=100_000_000", "console=plain"]
    here = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"}
    job = subprocess.Popen(
        words,
        cwd=tmp_path,
        env={**os.environ, **here},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job has it ignored
    )
    try:
        until = time.monotonic() + 300
        # the file is there before the run begins, when a signal finds nothing to resume; its first line is not
        while not any(path.stat().st_size for path in tmp_path.glob("runs/**/metrics.jsonl")):
            assert time.monotonic() < until and job.poll() is None
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        err = job.communicate(timeout=300)[1]
    finally:
        job.kill()
    assert job.returncode == 75, err
    assert "rlcli resume runs/train/sweep_" in err
    assert err.endswith(
        "2 of 3 jobs did not run:\n  job 1: seed=1\n  job 2: seed=2\n"
        f"Run what is left with:\n  rlcli resume {next(tmp_path.glob('runs/train/*')).relative_to(tmp_path)}\n"
    )


def test_a_job_that_was_killed_before_its_first_checkpoint_begins_anew(rlcli, started, monkeypatch, tmp_path):
    ran = []

    def train(cfg, words):
        ran.append(cfg.seed)
        begin(cfg, words, "failed" if len(ran) == 1 else "done")
        Path(cfg.run.dir, "checkpoints").mkdir()

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    assert rlcli("train -m seed=1,2 hydra.sweep.dir=sw")[0] == 0
    (tmp_path / "sw/0/output.txt").write_text("what it printed")
    assert rlcli("resume sw")[0] == 0
    assert ran == [1, 2, 1] and Run(tmp_path / "sw/0").status == "done"
    assert (tmp_path / "sw/0/output.txt").exists() and Run(tmp_path / "sw/0_before").status == "failed"


def test_a_sweep_of_more_jobs_than_anyone_runs_is_refused_at_once(rlcli, started):
    code, _, err = rlcli("train -m seed=range(0,300) env.num=range(1,300) env.nmu=3")
    assert (code, started) == (2, []) and "89,700 jobs" in err and "env.nmu" in err


def test_a_sweep_under_torchrun_is_refused(rlcli, started, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = rlcli("train -m learner.world_size=2 seed=1,2")
    assert code == 2 and "a sweep does not run under torchrun" in err and not started


def test_a_child_recipe_wins_over_its_parent_whatever_becomes_of_their_files(rlcli, started, monkeypatch, tmp_path):
    (tmp_path / "recipes").mkdir()
    child, parent = (tmp_path / "recipes" / f"{name}.yaml" for name in ("a_child", "parent"))
    child.write_text("defaults: [parent]\nhydra: {sweeper: {params: {seed: '1,2'}}}")
    parent.write_text("hydra: {sweeper: {params: {seed: '7,8', total_frames: '1e3,2e3'}}}")
    ran = []

    def train(cfg, overrides):
        ran.append((cfg.seed, cfg.total_frames))
        begin(cfg, overrides, "done")
        if len(ran) == 1:
            raise StoppedSafely("saved")

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    with pytest.raises(SystemExit):
        rlcli("train -m recipe=a_child hydra.sweep.dir=sw")
    child.unlink()
    parent.write_text("seed: 9")
    assert rlcli("resume sw")[0] == 0
    assert sorted(ran) == [(seed, frames) for seed in (1, 2) for frames in (1000, 2000)]


def test_a_sweep_over_recipes_says_that_it_leaves_out_theirs(rlcli, started, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "three.yaml").write_text("hydra: {sweeper: {params: {seed: '1,2,3'}}}")
    code, _, err = rlcli("train -m recipe=three,ppo_exact")
    assert (code, started) == (2, []) and "leaves out the sweep of recipe three; add seed=1,2,3" in err
    assert rlcli("train -m recipe=three,ppo_exact seed=5")[0] == 0
    assert [cfg.seed for _, (cfg, _), _ in started] == [5, 5]


def test_a_sweep_ends_with_a_table_and_means_over_seeds(rlcli, started, monkeypatch):
    def train(cfg, overrides):
        if cfg.seed == 3:
            if cfg.optim.lr == 2:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            raise EnvError("it broke")
        folder = Path(cfg.run.dir)
        folder.mkdir(parents=True, exist_ok=True)
        info = {"recipe": None, "env": cfg.env.id, "seed": cfg.seed, "overrides": overrides}
        (folder / "run.json").write_text(json.dumps(info))
        ended = {"status": "done", "frames": 10, "evaluation": {"mean_return": cfg.optim.lr * 100 + cfg.seed}}
        (folder / "summary.json").write_text(json.dumps(ended))

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    code, out, err = rlcli(
        "train -m optim.lr=1,2 seed=1,2,3 value.gamma=0.9 env.kwargs.sutton_barto_reward=true hydra.sweep.dir=sw"
    )
    table = out[out.index("job  differs") :].splitlines()
    assert [line.split()[:3] for line in table[1:7]] == [
        [str(job), f"optim.lr={lr}", f"seed={seed}"]  # what all were given is not repeated
        for job, (lr, seed) in enumerate(itertools.product((1, 2), (1, 2, 3)))
    ]
    assert table[5].split()[3:] == ["done", "10", "202", "eval"] and table[6].split()[3:] == ["waiting"]
    assert table[7:] == [
        "4 done, 2 waiting",
        "mean return over seeds, and its 95 % interval (Student's t)",
        "  optim.lr=1 (eval): 101.5 [95.15, 107.9] over 2 seeds",
        "  optim.lr=2 (eval): 201.5 [195.1, 207.9] over 2 seeds",
    ]
    typed = r"optim\.lr=2 seed=2 value\.gamma=0\.9 env\.kwargs\.sutton_barto_reward=true"  # no ++, which Hydra needs
    assert re.search(rf"^job 4, 5 of 6 \(about [\d:]+ left\): {typed}$", out, re.M), out
    assert "\njob 4: done, evaluation return 202, 10 frames\n" in out  # whatever the console shows
    assert code == 3 and err.endswith("rlcli train: 2 of 6 jobs failed; job 2: it broke\n")
    assert "job 5 failed: there is not enough memory: RuntimeError" in err
    assert "Error executing" not in err


class Large:
    """What only a job holds."""


def test_a_job_that_failed_is_let_go_of_whatever_it_raised_and_counted(rlcli, started, monkeypatch):
    held, alive = [], []

    def train(cfg, overrides):
        alive.append(sum(ref() is not None for ref in held))
        large = Large()
        held.append(weakref.ref(large))
        try:
            raise KeyError("of a package")
        except KeyError as error:
            if cfg.seed == 2:
                raise
            broken = NumericsError("it broke", where="here", why="so", fix="Do that")
            broken.evidence = {"observation": large}
            raise broken from error

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    gc.collect()
    code, _, err = rlcli("train -m seed=1,2,3")
    assert alive == [0, 0, 0]
    assert "job 1 failed: unexpected error: KeyError: 'of a package'" in err
    assert code == 6 and err.endswith("rlcli train: 3 of 3 jobs failed; job 0: it broke (here): so. Do that\n")
    with pytest.raises(NumericsError) as caught:
        rlcli("train -m seed=1,2 --debug")
    assert "raise broken from error" in "".join(traceback.format_exception(caught.value))
    code, _, err = rlcli("train -m seed=2")
    assert code == 1 and "1 of 1 jobs failed; job 0: unexpected error" in err


@pytest.mark.parametrize(
    "words",
    [
        "hydra.sweep.dir=q hydra.sweep.subdir=x",
        "hydra.sweep.dir=q run.dir=q",
        "run.dir=z_${env.id}",
        "run.dir=z",
        "recipe=fixed",
    ],
)
def test_a_sweep_whose_jobs_would_have_one_folder_is_refused_before_the_first(rlcli, started, tmp_path, words):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "fixed.yaml").write_text("run: {dir: runs/fixed}")
    code, _, err = rlcli(f"train -m seed=1,2 {words}")
    assert (code, started) == (2, []) and "jobs 0 and 1 would have one folder" in err
    assert rlcli(f"train -m seed=1 {words}")[0] == 0


@pytest.mark.parametrize("name", ["z_${seed}", "z_${hydra:job.num}", "${hydra:runtime.output_dir}/x", "null"])
def test_jobs_have_the_folders_that_they_are_given_one_by_one(rlcli, started, tmp_path, name):
    code, _, err = rlcli(f"train -m seed=0,1 run.dir={name} hydra.sweep.dir=sw")
    folders = [os.path.abspath(cfg.run.dir) for _, (cfg, _), _ in started]
    wanted = {"${hydra:runtime.output_dir}/x": ["sw/0/x", "sw/1/x"], "null": ["sw/0", "sw/1"]}
    assert code == 0 and folders == [str(tmp_path / path) for path in wanted.get(name, ["z_0", "z_1"])], err


def test_the_folder_of_one_run_is_none_of_a_sweep(rlcli, started):
    code, _, err = rlcli("train -m seed=1,2 hydra.run.dir=x")
    assert (code, started) == (2, []) and "hydra.run.dir is the folder of one run; use hydra.sweep.dir=..." in err


def test_a_job_whose_folder_another_run_has_is_no_run_of_the_sweep(rlcli, started, monkeypatch, tmp_path):
    def train(cfg, overrides):
        raise EnvError("the run folder exists")

    monkeypatch.setattr(sys.modules["rlcli.build"], "train", train)
    (tmp_path / "sw" / "1").mkdir(parents=True)
    (tmp_path / "sw" / "1" / "run.json").write_text("{}")
    code, out, _ = rlcli("train -m seed=1,2 hydra.sweep.dir=sw")
    assert code == 3 and "sw/1" not in out and "over" not in out


def test_what_a_recipe_sweeps_over_may_be_nested_and_any_value(rlcli, started, tmp_path):
    (tmp_path / "recipes").mkdir()
    swept = "{env: {num: '1,2', kwargs: {a: 3}}, policy.hidden: [8], run.eval_every: null}"
    (tmp_path / "recipes" / "nested.yaml").write_text(f"hydra: {{sweeper: {{params: {swept}}}}}")
    assert rlcli("train recipe=nested --cfg job")[0] == rlcli("train -m recipe=nested")[0] == 0
    made = [(cfg.env.num, cfg.env.kwargs, cfg.policy.hidden, cfg.run.eval_every) for _, (cfg, _), _ in started]
    assert made == [(1, {"a": 3}, [8], None), (2, {"a": 3}, [8], None)]


def test_a_mean_is_of_jobs_that_are_done_and_of_results_of_one_kind():
    ended = [("done", 1.0, "eval"), ("done", 3.0, "eval"), ("failed", 500.0, "train"), ("done", 500.0, "train")]
    other = dict.fromkeys(("frames", "frames/s", "peak", "time"))
    rows = [
        {"job": i, "differs": f"seed={i}", "state": state, "return": x, "return_of": of, **other}
        for i, (state, x, of) in enumerate(ended)
    ]
    *_, line = lines_of(rows)
    assert line == "  (eval): 2 [-10.71, 14.71] over 2 seeds"


def test_an_empty_mapping_takes_away_what_a_choice_gives_in_its_own_job_alone(rlcli, started):
    code, _, err = rlcli("train -m env=atari env.kwargs={},{a:1} hydra.sweep.dir=sw")
    assert code == 0, err
    given = {"frameskip": 1, "repeat_action_probability": 0.0}
    assert [arguments[0].env.kwargs for _, arguments, _ in started] == [{}, given | {"a": 1}]


def test_every_command_of_the_page_runs(started, monkeypatch, tmp_path, capsys):
    from rlcli.cli.help import PAGES
    from rlcli.cli.main import main

    monkeypatch.chdir(tmp_path)
    page = (PAGES / "sweeps.md").read_text(encoding="utf-8")
    (tmp_path / "recipes").mkdir()
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "recipes" / "own.yaml").write_text(recipe)
    found = re.findall(r"^(rlcli train -m [^#\n]*)", page, re.M)
    commands = [command for command in found if "sweep." not in command.replace("hydra.sweep.", "")]

    def stops(cfg, overrides):
        raise StoppedSafely("saved")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["rlcli.build"], "train", stops)  # in its first job
        for command, jobs in zip(commands, (3, 6, 5, 2, 18, 6, 5, 2), strict=True):
            with pytest.raises(SystemExit):
                main(shlex.split(command)[1:])
            assert f"{jobs} of {jobs} jobs did not run" in capsys.readouterr().err, command
    assert main(["train", "-m", "recipe=own"]) == 0, capsys.readouterr().err
    assert len(started) == 6
