import sys
from pathlib import Path

from tests.preloaded import cold_workers, impatient, workers_begin_with_what_tests_import  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
