"""Combines separate layer calls into steps, for flash-attn's functions and Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringattn._kv_cache import Row, Step, WorkerCache


class PassRow(NamedTuple):
    """One sequence in a forward pass of the model."""

    sequence: int
    keep: int  #: entries before the new ones
    append: int
    queries: int


class Passes:
    """Joins layer calls to steps: a layer that was called in the current step begins the next one."""

    def __init__(self, cache: WorkerCache) -> None:
        self._cache = cache
        self._step: Step | None = None
        self._rows: tuple[PassRow, ...] = ()
        self._called: set[int] = set()
        self._lengths: dict[int, int] = {}  # before the current step

    def length(self, layer: int, sequence: int) -> int:
        """The sequence's length before the pass that a call of `layer` belongs to."""
        if self._step is not None and layer not in self._called:
            return self._lengths.get(sequence, 0)
        return self._cache.length(sequence)

    def step_of(self, layer: int, rows: Sequence[PassRow],
                commands: Callable[[], tuple[list[tuple[int, int, int]], list[int]]] | None = None) -> Step:
        """The step of a call of `layer`. `commands` returns the forks and drops of a new step."""
        rows = tuple(rows)
        if self._step is None or layer in self._called or rows != self._rows:
            fork, drop = commands() if commands is not None else ([], [])
            lengths = self._cache.sequences
            step = self._cache.step([Row(row.sequence, row.append, row.queries, row.keep) for row in rows], fork=fork,
                                    drop=drop)
            self._step, self._rows, self._called, self._lengths = step, rows, set(), lengths
        return self._step

    def called(self, layer: int) -> None:
        """A call of `layer` has succeeded."""
        self._called.add(layer)

    def forget(self) -> None:
        """The current step was refused or is over."""
        self._step = None
