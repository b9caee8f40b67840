"""Ctrl-C at a chosen instruction of the code under test."""

from __future__ import annotations

import sys


def _broken_off() -> None:
    raise KeyboardInterrupt


def instructions(files, call, *args, at: int = -1, happens=_broken_off, **settings) -> int:
    """Call; before the instruction number `at` in these files something happens, a Ctrl-C; how many were begun."""
    begun = 0

    def instruction(frame, event, arg):
        nonlocal begun
        if event == "opcode":
            begun += 1
            if begun - 1 == at:
                happens()
        return instruction

    def entered(frame, event, arg):
        frame.f_trace_opcodes = True
        return instruction if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call(*args, **settings)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return begun
