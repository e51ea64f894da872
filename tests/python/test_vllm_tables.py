"""Block tables as the vLLM plugin sends them: the service always has what a query sees. Needs no vLLM."""
import numpy as np
import pytest

from ringattn._vllm_tables import KnownTables

BLOCK, GROUPS = 4, {0: None, 1: 6}  # windows by group


class Service:
    """Applies updates as the workers do."""

    def __init__(self):
        self.tables = {}

    def apply(self, sequence, update):
        group, first, blocks = update
        table = self.tables.setdefault((sequence, group), [])
        assert first <= len(table) and blocks
        table[first:first + len(blocks)] = blocks


def needed(keep, length, window):
    return (0 if window is None else max(0, keep - window)) // BLOCK, -(-length // BLOCK)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_query_sees_is_always_known(seed):
    """Rows of the batch change hands, drafts are rolled back, blocks before a window become 0."""
    rng = np.random.default_rng(seed)
    known, service, lengths, tables = KnownTables(), Service(), {}, {}
    for _ in range(400):
        row = int(rng.integers(3))
        if row not in lengths or rng.random() < 0.03:  # another request takes the row, perhaps after a shared prefix
            lengths[row] = int(rng.integers(4)) * BLOCK
            tables[row] = {group: rng.integers(1, 100, 64) for group in GROUPS}
            for group, window in GROUPS.items():
                tables[row][group][:needed(lengths[row], lengths[row], window)[0]] = 0
        if rng.random() < 0.02:
            known.forget()  # after an error
        keep = max(0, lengths[row] - int(rng.integers(3)))
        length = keep + int(rng.integers(1, 9))
        if length > 64 * BLOCK:
            del lengths[row]
            continue
        for group, window in GROUPS.items():
            table = tables[row][group]
            begin, end = needed(keep, length, window)
            table[:begin] = 0
            if update := known.update(row, group, table, begin, end):
                service.apply(row, update)
            assert service.tables[row, group][begin:end] == table[begin:end].tolist()
            assert known.update(row, group, table, begin, end) is None  # nothing is sent twice
        lengths[row] = length


def test_a_decode_step_sends_only_new_blocks():
    known, table = KnownTables(), np.array([7, 3, 9, 5])
    assert known.update(0, 0, table, 0, 3) == (0, 0, [7, 3, 9])
    assert known.update(0, 0, table, 0, 3) is None
    assert known.update(0, 0, table, 0, 4) == (0, 3, [5])
    assert known.update(0, 0, np.array([0, 3, 9, 5]), 1, 4) is None  # before the window
    assert known.update(0, 0, np.array([0, 3, 8, 5]), 1, 4) == (0, 2, [8])
    assert known.update(1, 0, np.array([0, 0, 9, 5]), 2, 4) == (0, 0, [0, 0, 9, 5])
