"""Host memory that workers are shown, over stock stubs and Python's own sockets."""

import fcntl
import mmap
import os
import socket
import struct
import time

import numpy as np

from attention import Result, header_for, requests
from stubs import (attention_pb2 as pb, local_memory_pb2 as lm, local_memory_pb2_grpc,
                   tensor_pb2 as T)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
(ATTACHED, NOT_UNDERSTOOD, NO_SUCH_TOKEN, DESCRIPTOR_REFUSED, _, FOREIGN_USER, FENCED,
 KIND_REFUSED) = range(8)
VERSION = 2
HOST_MEMFD, CUDA_VMM = 1, 2


def attach_message(token, memory=HOST_MEMFD, allocation=b"", version=VERSION):
    return struct.pack("<II", version, 1) + token + struct.pack("<I", memory) + allocation


def make_memfd(size, allocate=True, seals=SEALS):
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def connect(path):
    """A path may be longer than an address: by way of its folder."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(20)
        link.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        return link
    finally:
        os.close(folder)


def answer_of(link):
    data = link.recv(512)
    assert len(data) >= 8, "closed without an answer"
    version, code = struct.unpack_from("<II", data)
    assert version == VERSION
    return code, data[8:]


def show(link, token, fds):
    socket.send_fds(link, [attach_message(token)], fds)
    return answer_of(link)


class Region:
    """A region attached at all workers that accept it; `close()` detaches it."""

    def __init__(self, ring, size, attach=True):
        self.size = (size + 4095) // 4096 * 4096
        self.fd = make_memfd(self.size)
        self.memory = mmap.mmap(self.fd, self.size)
        self.stub = local_memory_pb2_grpc.LocalMemoryServiceStub(ring.channel)
        self.links = {}
        self.id = b""
        self.used = 0
        if attach:
            self.attach()

    def offer(self):
        reply = self.stub.Attach(lm.AttachRequest(bytes=self.size, region_id=self.id), timeout=10)
        self.id = reply.region_id
        return reply

    def attach(self, only=None):
        for point in self.offer().points:
            if only is not None and point.worker not in only:
                continue
            self.links[point.worker] = connect(point.socket_path)
            code, words = show(self.links[point.worker], point.token, [self.fd])
            assert code == ATTACHED, words
        self.confirm()

    def confirm(self):
        """Waits until the workers have reported the region to the coordinator."""
        end = time.monotonic() + 20
        while not set(self.links) <= set(self.offer().attached):
            assert time.monotonic() < end, "the workers have not reported the region"
            time.sleep(0.01)

    def fence(self, worker, number):
        self.links[worker].send(struct.pack("<IIQ", VERSION, 2, number))
        return answer_of(self.links[worker])

    def close(self):
        for link in self.links.values():
            link.close()
        self.links = {}
        os.close(self.fd)

    # ------------------------------------------------------------ tensors in it

    def place(self, size, gap=64):
        """Room for a tensor, `gap` bytes after the one before."""
        self.used += gap
        offset, self.used = self.used, self.used + size
        assert self.used <= self.size
        return offset

    def put(self, array):
        data = np.ascontiguousarray(array).tobytes()
        offset = self.place(len(data))
        self.memory[offset:offset + len(data)] = data
        return offset

    def read(self, offset, size):
        return bytes(self.memory[offset:offset + size])


def output_bytes(inputs, name):
    batch, sq, heads, dim = inputs["q"].shape
    if name == "lse":
        return batch * heads * sq * 4
    if name == "out":
        return batch * sq * heads * inputs["v"].shape[3] * inputs["q"].itemsize
    return inputs[name[1:]].nbytes


class HostCall:
    """A header whose tensors all lie in `region`."""

    def __init__(self, region, inputs, backward=False, required=True, fence_number=0, **options):
        self.region, self.inputs = region, inputs
        self.header = header_for(inputs, backward=backward, **options)
        names = ["q", "k", "v"] + (["dout"] if backward else [])
        if options.get("forward_result"):
            names += ["out", "lse"]
        transport = self.header.transport
        transport.accept.append(pb.TRANSPORT_HOST_MEMORY)
        transport.required = required
        transport.fence_number = fence_number
        for name in names:
            self.add(name, region.put(inputs[name]))
        self.outputs = {}
        for name in ("dq", "dk", "dv") if backward else ("out", "lse"):
            size = output_bytes(inputs, name)
            self.outputs[name] = (region.place(size), size)
            self.add(name, self.outputs[name][0])

    def add(self, name, offset):
        self.header.transport.places.append(pb.TensorLocation(
            tensor=getattr(T, f"TENSOR_ID_{name.upper()}"), region_id=self.region.id,
            offset=offset))

    def start(self, stub, timeout=120):
        method = stub.Backward if isinstance(self.header, pb.BackwardHeader) else stub.Forward
        return method(requests(self.header, []), timeout=timeout)

    def run(self, stub, timeout=120):
        result = Result()
        for response in self.start(stub, timeout):
            result.take(response)
        assert result.summary is not None
        return result

    def bytes(self, name):
        return self.region.read(*self.outputs[name])

    def output_span(self):
        begin = min(offset for offset, _ in self.outputs.values())
        end = max(offset + size for offset, size in self.outputs.values())
        return begin, end
