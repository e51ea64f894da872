"""Process groups of torch.distributed, as the writers of one request.

The ranks of a group need equal request ids that nobody can guess. They exchange one secret when the group is first used.
After that each rank counts its calls, and a request id is a keyed hash of the call's number. Ranks therefore must make
their calls in the same order, as with every collective.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringattn._arguments import type_name, whole_number

_SECRET_BYTES = 32
# Forwards whose graph is retained (retain_graph=True) and whose backwards are counted, for each group.
_MAX_RETAINED = 65536


def _broadcast(value: Any, group: dist.ProcessGroup) -> Any:
    """Returns the value of the group's first rank."""
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]


class Group:
    """This process as one rank of a process group. Thread safe, if the order of calls is the same on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # weak, because `_groups` drops its entry when the group is destroyed
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._secret: bytes = b"" if self.world_size == 1 else _broadcast(secrets.token_bytes(_SECRET_BYTES), group)
        self._lock = threading.Lock()
        self._calls = 0
        self._backwards: dict[int, int] = {}

    def broadcast(self, value: Any) -> Any:
        """Returns the first rank's value. A collective of the group."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return value if self.world_size == 1 else _broadcast(value, group)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in their order. A collective of the group."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=group)
        return values

    def begin_forward(self) -> int:
        """Returns the number of a new call."""
        with self._lock:
            self._calls += 1
            return self._calls

    def begin_backward(self, call: int, is_last: bool) -> int:
        """Returns how many backwards of this call there were. `is_last`: its graph is freed after this one."""
        with self._lock:
            earlier = self._backwards.pop(call, 0)
            if not is_last:
                self._backwards[call] = earlier + 1
                if len(self._backwards) > _MAX_RETAINED:
                    self._backwards.pop(next(iter(self._backwards)))
            return earlier

    def id_of(self, kind: str, *numbers: int) -> str:
        """Returns a request id: equal on all ranks, and unguessable even if other ids are known."""
        text = " ".join([kind, *map(str, numbers)])
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=16).hexdigest()


_lock = threading.Lock()
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
# Groups that were made here, by the default group and the ranks.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary())


def is_initialized() -> bool:
    """Whether this process is a rank of torch.distributed."""
    return dist.is_available() and dist.is_initialized()


def _check_initialized(name: str) -> None:
    if not is_initialized():
        raise RuntimeError(f"{name}: torch.distributed is not initialized; call torch.distributed.init_process_group")


def group_of(group: dist.ProcessGroup | None, name: str = "group") -> Group:
    """Returns the state of a process group. Its first call is a collective of the group.

    Args:
        group: None: the default group.

    Raises:
        ValueError: this process is no member of the group.
        RuntimeError: torch.distributed is not initialized.
    """
    _check_initialized(name)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{name}: this process is no member of the process group")
        raise TypeError(f"{name}: is {type_name(group)}; must be a torch.distributed process group")
    with _lock:
        found = _groups.get(group)
    if found is None:
        found = Group(group)  # without the lock: it is a collective
        with _lock:
            found = _groups.setdefault(group, found)
    return found


def group_of_ranks(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """Returns the process group of these global ranks. The first call with them is a collective of the ranks.

    Raises:
        ValueError: the numbers are no ranks, or this process is not among them.
        RuntimeError: torch.distributed is not initialized.
    """
    _check_initialized(name)
    wanted = tuple(sorted(whole_number(rank, name) for rank in ranks))
    world = dist.get_world_size()
    if len(set(wanted)) != len(wanted) or not wanted or wanted[0] < 0 or wanted[-1] >= world:
        raise ValueError(f"{name}: is {list(ranks)}; must be different ranks from 0 to {world - 1}")
    if dist.get_rank() not in wanted:
        raise ValueError(f"{name}: is {list(ranks)}, without this process's rank {dist.get_rank()}")
    if len(wanted) == world:
        return dist.group.WORLD
    with _lock:
        made = _made.setdefault(dist.group.WORLD, {})
        found = made.get(wanted)
    if found is None:
        found = dist.new_group(list(wanted), use_local_synchronization=True)
        with _lock:
            found = made.setdefault(wanted, found)
    return found


def seed_for(group: Group) -> int:
    """Returns a dropout seed that is equal on all ranks. A collective of the group.

    The first rank draws it from PyTorch's generator, so that `torch.manual_seed` and activation checkpointing reproduce
    the dropped pairs. The other ranks draw too, so that all generators advance equally.
    """
    return int(group.broadcast(int(torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu"))))
