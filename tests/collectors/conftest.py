import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _workers_begin_with_what_these_files_import():
    from rlcli.processes import worker

    served = worker._served

    def beside(target, theirs, spawn, preload):
        return served(target, theirs, spawn, [*preload, "preloaded"] if preload else preload)

    worker._served = beside
    yield
    worker._served = served
