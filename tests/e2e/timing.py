"""Bounds on time, on machines that others use as well.

A test under `@timed` measures again where `in_time` says that a bound does not hold, three times
in all: what a busy moment took is not a defect, what is too slow is so every time. Only bounds on
time are judged this way; any other assertion fails the test at once.
"""

import functools

MEASUREMENTS = 3


class TooSlow(AssertionError):
    pass


def in_time(holds, said):
    if not holds:
        raise TooSlow(said)


def timed(test):
    @functools.wraps(test)
    def measured(*args, **kwargs):
        for left in reversed(range(MEASUREMENTS)):
            try:
                return test(*args, **kwargs)
            except TooSlow as slow:
                print(f"too slow, {left} measurements left: {slow}")
                if left == 0:
                    raise
    return measured
