"""Ctrl-C at a chosen instruction of the code under test."""

from __future__ import annotations

import sys


def instructions(files, call, *args, at: int = -1, **settings) -> int:
    """Call, and raise KeyboardInterrupt before the instruction number `at` in these files; how many were begun."""
    begun = 0

    def instruction(frame, event, arg):
        nonlocal begun
        if event == "opcode":
            if begun == at:
                raise KeyboardInterrupt
            begun += 1
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
