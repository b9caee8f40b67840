"""For every test: one thread per operation on shared cores, and hypothesis without a clock."""

import os

# before anything imports torch or numba; subprocesses inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile("shared_cores", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared_cores")
