"""Block tables of a cache with numbering "blocks": which parts the service does not know yet."""

from __future__ import annotations

import numpy as np

TableUpdate = tuple[int, int, list[int]]  #: (group, first, blocks), as in Row.tables


class KnownTables:
    """The block tables as the service has them, by sequence and group."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def forget(self) -> None:
        """The next updates send everything."""
        self._known.clear()

    def update(self, sequence: int, group: int, table: np.ndarray, begin: int, end: int) -> TableUpdate | None:
        """What to send so that the service has entries [begin, end) of `table`; None: nothing.

        Entries before `begin` are sent only if the service's table ends before them. They may differ otherwise: no
        query sees them.

        Args:
            table: [at least end] block numbers.
        """
        known = self._known.get((sequence, group))
        if known is None:
            known = table[:0]
        first = min(begin, len(known))
        common = min(end, len(known))
        differing = np.flatnonzero(known[first:common] != table[first:common])
        if end > len(known):
            start, stop = first + int(differing[0]) if len(differing) else len(known), end
        elif len(differing):
            start, stop = first + int(differing[0]), first + int(differing[-1]) + 1
        else:
            return None
        self._known[sequence, group] = np.concatenate([known[:start], table[start:stop], known[stop:]])
        return group, start, table[start:stop].tolist()
