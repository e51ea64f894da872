"""Scalar arguments, checked here so that an error names the argument."""

from __future__ import annotations

import math
import operator
from typing import Any

from ringattn._errors import invalid


def type_name(value: Any) -> str:
    """The type of `value` for an error text, with its article: "an int", "a numpy.ndarray"."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def whole_number(value: Any, name: str) -> int:
    """`value` as an int. InvalidArgumentError for anything but an integer: 2.5 is not truncated."""
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise invalid(name, f"is {value!r}; must be a whole number") from None


def flag(value: Any, name: str) -> bool:
    """`value` as a bool. InvalidArgumentError for anything but True, False, 1 and 0: "no" is not True."""
    if isinstance(value, (str, bytes)) or value not in (True, False):
        raise invalid(name, f"is {value!r}; must be True or False")
    return bool(value)


def number(value: Any, name: str) -> float:
    """`value` as a float. InvalidArgumentError for a string, or anything that is not a number."""
    if isinstance(value, (str, bytes)):
        raise invalid(name, f"is {value!r}; must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise invalid(name, f"is {type_name(value)}; must be a number") from None


def seed_number(value: Any, name: str) -> int:
    """A seed: a whole number of 64 bits without a sign."""
    seed = whole_number(value, name)
    if not 0 <= seed < 2**64:
        raise invalid(name, f"is {seed}; must be at least 0 and below 2**64")
    return seed


def positive_seconds(value: Any, name: str, more: str = "") -> float:
    """A positive, finite number of seconds. `more`: what else the argument may be, for the error text."""
    seconds = number(value, name)
    if not 0 < seconds < math.inf:
        raise invalid(name, f"is {value}; must be a positive number of seconds{more}")
    return seconds


def window_pair(window: Any, name: str) -> tuple[int, int]:
    """(left, right) in tokens."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise invalid(name, f"is {window!r}; must be (left, right)") from None
    return whole_number(left, f"{name}[0]"), whole_number(right, f"{name}[1]")
