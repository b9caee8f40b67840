"""Codes packed and unpacked by loops from numba's cache, as the second process on a machine has them."""

import os
import subprocess
import sys

ROUND = """
import numpy as np
from rlcli.kernels.codes import cpu

for size, whole in ((2, np.int16), (4, np.int32), (8, np.int64)):
    for wide, narrow in ((1, np.int8), (2, np.int16), (4, np.int32)):
        for elements in (1, 2, 3) if wide < size else ():
            for count in (1, 3, 33):
                values = np.random.default_rng(0).integers(
                    np.iinfo(narrow).min, np.iinfo(narrow).max, (count, elements), endpoint=True
                ).astype(whole)
                table = np.array([[2, 1, elements, size, wide, 1]])
                record, out = np.zeros((count, 16), np.uint8), np.full((count + 64, elements), 7, whole)
                sources, targets = np.array([values.ctypes.data]), np.array([out.ctypes.data])
                assert cpu.pack(table, record.ctypes.data, 16, count, sources) == -1
                cpu.unpack(table, record.ctypes.data, 16, count, targets)
                assert (out[:count] == values).all() and (out[count:] == 7).all(), (size, wide, elements, count)
print(sum(cpu.unpack.stats.cache_hits.values()))
"""


def test_whole_numbers_in_few_bytes_read_the_same_from_a_warm_cache(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        int(subprocess.run([sys.executable, "-c", ROUND], env=environment, check=True, capture_output=True).stdout)
        for _ in range(2)
    ]
    assert hits == [0, 1]
