"""Loading torch: said before the wait, and the garbage collector rests meanwhile."""

from __future__ import annotations

import subprocess
import sys


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_word_goes_to_the_standard_error_before_torch_is_loaded():
    ran = in_a_process(
        "import sys\n"
        "from rlcli.cli.main import loading\n"
        "with loading():\n"
        "    assert 'torch' not in sys.modules\n"
        "    import torch\n"
        "with loading():\n"
        "    pass\n"
    )
    assert ran.stderr == "loading torch ...\n" and ran.stdout == ""


def test_nothing_is_collected_while_modules_load_and_everything_after():
    ran = in_a_process(
        "import gc\n"
        "from rlcli.cli.main import loading\n"
        "with loading(quiet=True):\n"
        "    assert not gc.isenabled()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 0\n"
    )
    assert ran.stderr == ""


def test_a_collector_that_was_off_stays_off():
    in_a_process(
        "import gc; gc.disable()\n"
        "from rlcli.cli.main import loading\n"
        "with loading(quiet=True):\n"
        "    pass\n"
        "assert not gc.isenabled() and gc.get_freeze_count() == 0\n"
    )


def test_a_verb_without_a_console_says_once_that_it_compiles():
    ran = in_a_process(
        "import numba\n"
        "from rlcli.cli.main import announced\n"
        "with announced():\n"
        "    numba.njit(lambda x: x + 1)(1)\n"
        "    numba.njit(lambda x: x + 2)(1)\n"
        "numba.njit(lambda x: x + 3)(1)\n"
    )
    assert ran.stderr == "compiling kernels, once: later runs find them compiled ...\n" and ran.stdout == ""
