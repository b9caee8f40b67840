"""Compiling where nothing may be written."""

import sys
from pathlib import Path

import numba
import pytest

from rlcli.kernels import compiled as kernels
from rlcli.kernels.compiled import compiled


def double(x):
    return x + x


def test_without_a_folder_for_the_cache_the_loop_is_compiled_all_the_same(monkeypatch):
    real, asked = numba.njit, []

    def read_only(*args, **options):
        asked.append(options.get("cache", False))
        if options.get("cache"):

            def refuse(loop):
                raise RuntimeError("cannot cache function: no locator available")

            return refuse
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", read_only)
    kernel = compiled()(double)
    assert asked == [True, False]
    assert kernel(2.5) == 5.0 and kernel.signatures


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(monkeypatch):
    before = compiled()(double)._cache._cache_file._source_stamp
    monkeypatch.setattr("rlcli.kernels.compiled.NEWEST_SOURCE", 1)  # as if another kernel's file had changed
    after = compiled()(double)._cache._cache_file._source_stamp
    assert before != after


@pytest.mark.parametrize("left", [0, 20, 200])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.every(2)
def test_files_that_a_power_cut_left_short_are_compiled_anew_with_one_line(kind, left, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "__pycache__"
    (tmp_path / "short_kernels.py").write_text(
        "def first(x):\n    return x + 1\n\n\ndef second(x):\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "compiled.py"))
    kernels._say.cache_clear()
    import short_kernels

    def used():
        return compiled()(short_kernels.first)(2), compiled()(short_kernels.second)(2)

    assert used() == (3, 4) and kernels.damaged() == []
    for path in folder.glob(f"*.{kind}"):
        path.write_bytes(path.read_bytes()[:left])
    assert len(kernels.damaged()) == (2 if kind == "nbi" else 0)
    assert used() == (3, 4) and kernels.damaged() == []
    (line,) = capfd.readouterr().err.splitlines()
    assert "compiled kernels were damaged" in line and str(folder) in line and Path(folder).is_dir()
    assert used() == (3, 4) and capfd.readouterr().err == ""
    del sys.modules["short_kernels"]
