"""What others have started for a process ends with it."""

import os
import subprocess
import sys

import psutil

from rlcli.processes.reaper import MARK, Reaper

LEADER = "import subprocess; subprocess.Popen(['sleep', '60'], env={}, stdout=2).wait()"


def test_a_process_without_the_mark_ends_with_the_session_of_one_that_has_it():
    """As Ray's agents do, whose titles stand where their environment was; a marked process takes no session of ours."""
    reaper = Reaper()
    marked = {"env": {**os.environ, MARK: reaper.mark}, "stderr": subprocess.DEVNULL}
    ours = subprocess.Popen(["sleep", "60"], **marked)
    leader = subprocess.Popen([sys.executable, "-S", "-c", LEADER], start_new_session=True, **marked)
    while not (children := psutil.Process(leader.pid).children()) or children[0].environ():
        pass
    other = subprocess.Popen(["sleep", "60"])
    reaper.clear_up()
    assert not psutil.wait_procs([*children, ours, leader], timeout=10)[1]
    assert other.poll() is None and not os.path.exists(reaper.folder)
    other.kill()
    other.wait()
