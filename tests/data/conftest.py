"""Makes `batches.py` importable from the folders below, and lends each module a process for what may crash."""

import pytest
from batches import Child


@pytest.fixture(scope="module")
def child():
    child = Child()
    yield child
    child.close()
