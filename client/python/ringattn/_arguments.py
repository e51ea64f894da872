"""Scalar arguments, checked here so that an error names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

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


def signed_number(value: Any, name: str) -> int:
    """`value` as an int of 64 bits with a sign. InvalidArgumentError for other integers and anything else."""
    result = whole_number(value, name)
    if not -2**63 <= result < 2**63:
        raise invalid(name, f"is {result}; must be at least -2**63 and below 2**63")
    return result


def flag(value: Any, name: str) -> bool:
    """`value` as a bool. InvalidArgumentError for anything but True, False, 1 and 0: "no" is not True."""
    try:
        known = not isinstance(value, (str, bytes)) and value in (True, False)
    except (RuntimeError, ValueError):  # arrays of several elements
        raise invalid(name, f"is {type_name(value)}; must be True or False") from None
    if not known:
        raise invalid(name, f"is {value!r}; must be True or False")
    return bool(value)


_Item = TypeVar("_Item")


def items_of(values: Any, kind: type[_Item], name: str) -> list[_Item]:
    """`values` as a list. None: no items. InvalidArgumentError unless it is a sequence of `kind`."""
    try:
        items = [] if values is None else list(values)
    except TypeError:
        raise invalid(name, f"is {type_name(values)}; must be a sequence of ringattn.{kind.__name__}") from None
    for index, item in enumerate(items):
        if not isinstance(item, kind):
            raise invalid(f"{name}[{index}]", f"is {type_name(item)}; must be a ringattn.{kind.__name__}")
    return items


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


def sizes_of(shape: Any) -> tuple[int, ...]:
    """The sizes of `shape`: one whole number, or a sequence of them."""
    sizes = tuple(whole_number(size, "shape") for size in (shape if isinstance(shape, Iterable) else (shape,)))
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape: {sizes} has a negative size")
    return sizes


def window_pair(window: Any, name: str) -> tuple[int, int]:
    """(left, right) in tokens."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise invalid(name, f"is {window!r}; must be (left, right)") from None
    return signed_number(left, f"{name}[0]"), signed_number(right, f"{name}[1]")
