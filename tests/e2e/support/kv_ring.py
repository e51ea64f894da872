"""Rings whose workers serve K/V caches over every transport, and step rings in host memory through
plain stubs and Python's own memory."""

import ctypes
import itertools
import struct
import time

import pytest

from direct_ring import LISTEN
from kv import DIRECT, HOST, RELAY, TIMEOUT, Model, Spec, Stream, Writer, create, delete, direct_metadata
from local_ring import local_flags
from stubs import kv_cache_pb2 as kv

SLOTS, SLOT_BYTES = 2, 256 << 10
RING_BYTES = 4096 + 2 * SLOTS * SLOT_BYTES
POSTED, DONE = 0, 64  # offsets of the counters
SYS_FUTEX, FUTEX_WAKE = 202, 1  # x86-64
LIBC = ctypes.CDLL(None)
WAYS = pytest.mark.parametrize("transport", [RELAY, DIRECT, HOST],
                               ids=["relay", "direct", "host_memory"])


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    directory = tmp_path_factory.mktemp("kv")
    cluster = Cluster(directory, workers=4, worker_flags=LISTEN + local_flags(directory))
    yield cluster
    print(cluster.tail())
    cluster.close()


@pytest.fixture
def opened(ring):
    """opened(spec, transport, **fields of CreateCacheRequest): a writer and the model of its cache."""
    made = []

    def make(spec=None, transport=RELAY, seed=0, **fields):
        spec = spec or Spec()
        cache = create(ring, spec, **fields)
        writer = Writer(ring, cache.cache_id, spec, transport)
        made.append((cache.cache_id, writer))
        return writer, Model(spec, seed)

    yield make
    for cache_id, writer in made:
        writer.close()
        delete(ring, cache_id)


@pytest.fixture
def make_kv_ring(make_ring, tmp_path):
    numbers = itertools.count()

    def make(workers=2, **options):
        sockets = tmp_path / f"sockets-{next(numbers)}"
        sockets.mkdir()
        flags = LISTEN + local_flags(sockets) + options.pop("worker_flags", [])
        return make_ring(workers=workers, worker_flags=flags, **options)
    return make


class RingStream(Stream):
    """A Steps stream whose messages travel in a ring. It ends as any stream does."""

    def __init__(self, method, hello, region, offset):
        self.memory, self.offset = region.memory, offset
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory, offset))
        self.posted = self.taken = None  # StepHello travels on the stream
        self.store(POSTED, 0)
        hello.ring.CopyFrom(kv.StepRing(region_id=region.id, offset=offset, slots=SLOTS,
                                        request_bytes=SLOT_BYTES, response_bytes=SLOT_BYTES))
        super().__init__(method, hello, direct_metadata(hello))
        self.posted = self.taken = 0

    def load(self, at):
        return struct.unpack_from("<I", self.memory, self.offset + at)[0]

    def store(self, at, value):
        struct.pack_into("<I", self.memory, self.offset + at, value)
        LIBC.syscall(SYS_FUTEX, ctypes.c_void_p(self.address + at), FUTEX_WAKE, 1)

    def send(self, request):
        if self.posted is None:
            return super().send(request)
        data = request.SerializeToString()
        assert len(data) <= SLOT_BYTES - 64 and self.posted - self.taken < SLOTS
        slot = self.offset + 4096 + self.posted % SLOTS * SLOT_BYTES
        struct.pack_into("<I", self.memory, slot, len(data))
        self.memory[slot + 64:slot + 64 + len(data)] = data
        self.posted += 1
        self.store(POSTED, self.posted)

    def read(self):
        if self.posted is None:
            return super().read()
        end = time.monotonic() + TIMEOUT
        while self.load(DONE) == self.taken:
            if not self.call.is_active():
                return super().read()
            assert time.monotonic() < end, "no answer in the ring"
            time.sleep(50e-6)
        slot = self.offset + 4096 + (SLOTS + self.taken % SLOTS) * SLOT_BYTES
        length = struct.unpack_from("<I", self.memory, slot)[0]
        assert length <= SLOT_BYTES - 64
        self.taken += 1
        return kv.StepResponse.FromString(bytes(self.memory[slot + 64:slot + 64 + length]))
