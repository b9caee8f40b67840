"""Jobs of a sweep side by side: told apart, stopped together, and finished by `rlcli resume`, each by one process."""

import csv
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from face import main

from rlcli.cli.ls_sweep import interval
from rlcli.cli.slurm import SCRIPT
from rlcli.runs.sweep import note_sweep, open_sweep

HERE = Path(__file__).parent


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def begin(folder, *words, **settings):
    """Start a command with quick jobs."""
    paths = f"{HERE / 'quick_jobs'}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-m", "rlcli", *words, "--import", "quick_jobs"], cwd=folder, text=True,
        env={**os.environ, "PYTHONPATH": paths, "BEGUN": str(folder / "begun.txt")}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **settings,
    )  # fmt: skip


def run(folder, *words):
    process = begin(folder, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def begun(folder):
    path = folder / "begun.txt"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition, seconds=300):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def states(folder):
    sweep = open_sweep(folder / "sw")
    return [sweep.state(job) for job in sweep.jobs]


def test_a_job_that_fails_or_is_killed_or_stopped_takes_no_other_with_it(folder):
    (folder / "sw/7").mkdir(parents=True)
    (folder / "sw/7/output.txt").symlink_to("/dev/full")
    code, out, err = run(folder, "train", "-m", "seed=1,2,3,4,5,6,9,7,8", "sweep.jobs=2", "hydra.sweep.dir=sw")
    assert code == 3
    ended = {2: "interrupted", 4: "interrupted", 6: "stopped", 7: "interrupted"}
    assert states(folder) == [ended.get(number, "done") for number in range(9)]
    assert re.search(r"^job 2 failed: it broke; what it printed: sw/2/output.txt$", err, re.M)
    assert re.search(r"^job 4 failed: its process was ended by SIGKILL: the system kills", err, re.M)
    assert re.search(r"^job 7 failed: unexpected error: OSError: \[Errno 28\] No space left", err, re.M)
    assert "jobs were stopped by a signal to their process" in err and "rlcli resume sw" in err
    assert "3 of 9 jobs failed; job 2: it broke" in err
    assert "Traceback" in (folder / "sw/2/output.txt").read_text()
    assert "job 3: done, training return 4, 10 frames" in out
    assert "I am job with seed 3" in (folder / "sw/2/output.txt").read_text()
    assert Counter(begun(folder))["start 4"] == 1
    code, out, err = run(folder, "resume", "sw", "sweep.jobs=2")
    assert (code, states(folder)) == (0, ["done"] * 9), err
    assert sorted(begun(folder)[-8:]) == [f"{x} {seed}" for x in ("done", "resume") for seed in (3, 5, 7, 9)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_jobs_and_each_saves(folder, number):
    process = begin(folder, "train", "-m", "seed=100,101,102", "sweep.jobs=2", "hydra.sweep.dir=sw")
    wait_for(lambda: len(begun(folder)) == 2)
    process.send_signal(number)
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 75, err
    assert states(folder) == ["stopped", "stopped", "waiting"] and "1 of 3 jobs did not run:\n  job 2: seed=102" in err
    assert err.endswith("Run what is left with:\n  rlcli resume sw --import quick_jobs\n")
    assert run(folder, "resume", "sw", "sweep.jobs=2", "seed=1")[0] == 2
    process = begin(folder, "resume", "sw", "sweep.jobs=3")
    wait_for(lambda: "start 102" in begun(folder) and {"done 100", "done 101"} <= {*begun(folder)})
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == 75 and states(folder) == ["done", "done", "stopped"]


def test_a_failed_job_can_stop_the_sweep(folder):
    code, _, err = run(
        folder, "train", "-m", "seed=100,3,1", "sweep.jobs=2", "sweep.fail_fast=true", "hydra.sweep.dir=sw"
    )
    assert code == 3 and states(folder)[0] in ("stopped", "waiting") and "stopped since a job failed" in err
    assert "rlcli resume sw" in err


def test_fewer_jobs_run_at_a_time_where_memory_lacks(folder, monkeypatch):
    monkeypatch.setenv("NEEDS", str(1 << 50))
    code, out, _ = run(folder, "train", "-m", "seed=51,52,54", "sweep.jobs=3", "hydra.sweep.dir=sw")
    assert (
        code == 0
        and len(re.findall(r"fewer jobs at a time: job \d needs 1024 TiB, those that run 1024 TiB of", out)) == 1
    )
    order = [line.split()[0] for line in begun(folder)]
    assert order == ["start", "done"] * 3


def test_what_a_killed_sweep_has_begun_ends_and_is_finished_by_two_at_a_time(folder):
    process = begin(folder, "train", "-m", "seed=100,101,1,2,6,7", "sweep.jobs=2", "hydra.sweep.dir=sw")
    wait_for(lambda: len(begun(folder)) == 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(children, timeout=100)[1]
    assert states(folder)[:2] == ["stopped", "stopped"]
    both = [begin(folder, "resume", "sw", *words) for words in ([], ["sweep.jobs=2"])]
    assert [process.communicate(timeout=300) and process.returncode for process in both] == [0, 0]
    assert states(folder) == ["done"] * 6 and max(Counter(begun(folder)).values()) == 1


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_no_job_is_run_twice_or_left_out_whatever_is_killed(folder, kills):
    draw = random.Random(kills)
    words = ["train", "-m", "seed=range(10,50)", "sweep.jobs=2", "hydra.sweep.dir=sw"]
    process = begin(folder, *words)
    words = ["resume", "sw", "sweep.jobs=2"]
    for _ in range(kills):
        enough = len(begun(folder)) + draw.randrange(2, 6)
        wait_for(lambda: len(begun(folder)) >= enough)  # noqa: B023
        mine = psutil.Process(process.pid)
        one = draw.choice([mine, *mine.children()])
        one.kill()
        if one is mine:
            process.communicate()
            process = begin(folder, *words)
    process.communicate(timeout=300)
    assert run(folder, *words)[0] == 0
    assert states(folder) == ["done"] * 40
    ended = Counter(line for line in begun(folder) if line.startswith("done"))
    assert len(ended) == 40 and set(ended.values()) == {1}


def test_a_sweep_is_submitted_as_one_array(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(folder)
    command = ["train", "-m", "seed=1,2", "sweep.launcher=slurm", "sweep.slurm={time: '8:00:00'}", "hydra.sweep.dir=sw"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(command) == 2 and "there is no sbatch" in capsys.readouterr().err and not (folder / "sw").exists()
    script = "#!/bin/sh\n[ -e refuse ] && { echo 'sbatch: error: no such partition' >&2; exit 1; }\necho '77;here'\n"
    (tmp_path / "sbatch").write_text(script)
    (tmp_path / "sbatch").chmod(0o755)
    (folder / "refuse").touch()
    assert main(command) == 5 and "no such partition" in capsys.readouterr().err
    (folder / "refuse").unlink()
    assert main(command) == 0 and "submitted 2 jobs as array 77" in capsys.readouterr().out
    assert main(["resume", "sw", "sweep.launcher=slurm", "sweep.slurm={array: '1-9'}"]) == 2
    assert main(["resume", "sw", "sweep.launcher=slurm", "sweep.fail_fast=true"]) == 2
    assert main(["resume", "sw", "--force"]) == 2 and "--force is for a run" in capsys.readouterr().err
    settings = "sweep.slurm={mem: '4G', exclusive: true}"
    assert main(["resume", "sw", "sweep.launcher=slurm", "sweep.jobs=3", settings]) == 0
    assert "submitted 2 jobs as array 77" in capsys.readouterr().out
    array = (folder / "sw" / "array.sh").read_text()
    assert "#SBATCH --array=0,1%3\n" in array and "#SBATCH --requeue\n" in array
    assert "#SBATCH --mem=4G\n#SBATCH --exclusive\n" in array and "#SBATCH --signal=B:USR1@120\n" in array
    (line,) = re.findall(r"^.* (resume .*) --job .*$", array, re.M)
    assert line.split()[:2] == ["resume", str(folder / "sw")]
    code, _, err = run(folder, *line.split(), "--job", "1")
    assert (code, states(folder)) == (0, ["waiting", "done"]), err
    assert main(["resume", "sw", "--job", "2"]) == 2 and "there is no job 2" in capsys.readouterr().err
    assert main(["resume", "sw", "--job", "0", "sweep.jobs=2"]) == 2
    assert "sweep.jobs=2 has no meaning with --job" in capsys.readouterr().err


@pytest.mark.parametrize("number, again", [(signal.SIGUSR1, "requeue 77_1\n"), (signal.SIGTERM, "")])
def test_a_job_of_an_array_asks_for_another_turn_at_the_end_of_its_time_alone(tmp_path, number, again):
    job = "sh -c 'trap \"exit 75\" TERM; sleep 0.2; echo ready; while :; do sleep 0.02; done' job"
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)
    array = subprocess.Popen(
        ["sh", "-c", SCRIPT.format(options="", folder=tmp_path, command=job)], stdout=subprocess.PIPE, text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1"},
    )  # fmt: skip
    assert array.stdout.readline() == "ready\n"
    array.send_signal(number)
    assert array.communicate(timeout=300)[0] == again and array.returncode == (0 if again else 75)


def test_a_recipe_names_no_launcher_and_a_run_has_no_sweep(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "far.yaml").write_text("sweep: {launcher: slurm}")
    for words, said in (
        (["-m", "recipe=far", "seed=1,2"], "far.yaml: sweep.launcher is not taken from a file"),
        (["sweep.jobs=2"], "sweep.jobs is for a sweep; add -m"),
        (["-m", "seed=1,2", "sweep.jobs=1,2"], "a sweep is run in one way"),
        (["-m", "seed=1,2", "hydra.sweep.dir=a,b"], "a sweep lies in one folder"),
        (["-m", "seed=1,2", "hydra.sweep.dir=a/${seed}"], "a sweep lies in one folder, and ${seed} is of one job"),
        (["-m", "seed=1,2", "hydra.sweep.dir=${hydra:job.num}"], "and ${hydra:} is of one job"),
        (["-m", "seed=1,2", "sweep.slurm={mem: 4G}"], "sweep.slurm has no meaning with sweep.launcher=here"),
    ):
        assert main(["train", *words]) == 2 and said in capsys.readouterr().err


def test_two_hundred_jobs_are_listed_at_once(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    jobs = [([f"seed={n}", f"optim.lr={n % 2 + 1}", "env.num=2"], f"sw/{n}") for n in range(200)]
    sweep = note_sweep(Path("sw"), "train", jobs, {})
    for job in sweep.jobs[:100]:
        path = sweep.folder(job)
        path.mkdir()
        words = str(sweep.typed(job)).replace("'", '"')
        (path / "run.json").write_text(f'{{"env": "E", "seed": {job.number}, "overrides": {words}}}')
        (path / "summary.json").write_text(f'{{"status": "done", "frames": 9, "learning": {{"return": {job.number}}}}}')
    began = time.process_time()
    assert main(["ls", "sw"]) == 0
    assert time.process_time() - began < 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["job", "differs", "state", "frames", "return", "frames/s", "peak", "time"]
    assert lines[3].split() == ["2", "seed=2", "optim.lr=1", "done", "9", "2", "train"] and len(lines) == 205
    assert lines[201] == "100 done, 100 waiting"
    (path / "run.json").write_text('{"env"')  # of the last of them
    assert main(["ls", "sw"]) == 0 and "99 done, 1 damaged, 100 waiting" in capsys.readouterr().out
    low, high = interval([float(n) for n in range(0, 100, 2)])
    assert (
        lines[203] == f"  optim.lr=1 (train): 49 [{low:.4g}, {high:.4g}] over 50 seeds"
        and 38 < low < 46 < 52 < high < 60
    )
    for quantile, n in ((12.706, 2), (3.182, 4), (2.228, 11), (2.045, 30)):  # of Student's t, from a table
        low, high = interval([1.0, *[0.0] * (n - 1)])
        assert (high - low) / 2 == pytest.approx(quantile / n, rel=2e-3)
    assert main(["ls", "sw", "--csv", "t.csv"]) == 0
    rows = list(csv.DictReader((folder / "t.csv").read_text().splitlines()))
    assert len(rows) == 200 and rows[7]["return"] == "7" and rows[150]["state"] == "waiting"
    assert main(["ls", "sw", "--csv", "t.csv"]) == 0 and main(["ls", "sw", "--csv", "sw/sweep.json"]) == 2
    (folder / "sw/0/summary.json").write_text('{"')
    sweep = open_sweep(Path("sw"))
    assert (sweep.state(sweep.jobs[0]), sweep.state(sweep.jobs[1])) == ("damaged", "done")
    assert main(["ls", "sw"]) == 0 and "summary cannot be read" in capsys.readouterr().out
