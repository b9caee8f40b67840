"""Compiling where nothing may be written."""

import numba

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
    monkeypatch.setattr("rlcli.kernels.compiled._newest_source", lambda: 1)  # as if another kernel's file had changed
    after = compiled()(double)._cache._cache_file._source_stamp
    assert before != after
