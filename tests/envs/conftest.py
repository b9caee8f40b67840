import sys
from pathlib import Path

from tests.preloaded import impatient  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
