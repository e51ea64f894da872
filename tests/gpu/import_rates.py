#!/usr/bin/env python3
"""How fast a process copies out of and into another process's GPU memory that it has mapped, by the kind of that
memory: cuMemCreate's by descriptor (vmm), cudaMalloc's by CUDA's legacy handle (ipc), each on the importer's GPU and
on another, compared with local memory. Uses the driver only, no PyTorch. Prints JSON: bytes per second and the first
copy's milliseconds by kind, place and direction; "bare" is the time that cuMemcpyDtoDAsync took to return.

  import_rates.py [--bytes=N] [--block=N] [--rounds=N]
"""
import argparse
import array
import ctypes
import json
import os
import socket
import statistics
import time
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_void_p


class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location_type", c_int), ("location_id", c_int),
                ("windows", c_void_p), ("flags", c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location_type", c_int), ("location_id", c_int), ("flags", c_int)]


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", c_ubyte * 64)]


class Cuda:
    """The driver, on one device."""

    def __init__(self, device):
        self.driver, self.device = ctypes.CDLL("libcuda.so.1"), device
        self("cuInit", 0)
        context = c_void_p()
        self("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *arguments):
        result = getattr(self.driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name}: {result}")

    def device_count(self):
        count = c_int()
        self("cuDeviceGetCount", byref(count))
        return count.value

    def allocate(self, size):
        pointer = c_ulonglong()
        self("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        return pointer

    def map(self, handle, size, device):
        pointer = c_ulonglong()
        self("cuMemAddressReserve", byref(pointer), c_size_t(size), c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        self("cuMemMap", pointer, c_size_t(size), c_size_t(0), handle, c_ulonglong(0))
        self("cuMemSetAccess", pointer, c_size_t(size), byref(Access(1, device, 3)), c_size_t(1))
        return pointer

    def create(self, size):
        handle = c_ulonglong()
        self("cuMemCreate", byref(handle), c_size_t(size), byref(Properties(1, 1, 1, self.device)), c_ulonglong(0))
        return handle


def export(channel, device, kind, size):
    """The other process: allocates the memory, exports it, and keeps it until the parent ends it."""
    cuda = Cuda(device)
    if kind == "ipc":
        handle = IpcHandle()
        cuda("cuIpcGetMemHandle", byref(handle), cuda.allocate(size))
        channel.send(bytes(handle.bytes))
    else:
        handle, fd = cuda.create(size), c_int()
        cuda.map(handle, size, device)
        cuda("cuMemExportToShareableHandle", byref(fd), handle, c_int(1), c_ulonglong(0))
        channel.sendmsg([b"fd"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.value]))])
    channel.recv(1)


def imported(cuda, channel, kind, size):
    if kind == "ipc":
        pointer, handle = c_ulonglong(), IpcHandle.from_buffer_copy(channel.recv(64))
        cuda("cuIpcOpenMemHandle_v2", byref(pointer), handle, c_int(1))
        return pointer
    _, ancillary, _, _ = channel.recvmsg(2, socket.CMSG_SPACE(4))
    fd = array.array("i", ancillary[0][2])[0]
    handle = c_ulonglong()
    cuda("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(1))
    os.close(fd)
    return cuda.map(handle, size, cuda.device)


def copies(cuda, theirs, ours, args):
    """As a worker does: blocks, each waited for."""
    stream, found = c_void_p(), {}
    cuda("cuStreamCreate", byref(stream), c_int(1))
    for direction, to, source in (("in", ours, theirs), ("out", theirs, ours)):
        seconds, bare = [], []
        for _ in range(args.rounds + 1):
            begin = time.perf_counter()
            for offset in range(0, args.bytes, args.block):
                called = time.perf_counter()
                cuda("cuMemcpyDtoDAsync_v2", c_ulonglong(to.value + offset), c_ulonglong(source.value + offset),
                     c_size_t(min(args.block, args.bytes - offset)), stream)
                bare.append(time.perf_counter() - called)
                cuda("cuStreamSynchronize", stream)
            seconds.append(time.perf_counter() - begin)
        found[direction] = {"bytes_per_second": args.bytes / statistics.median(seconds[1:]),
                            "first_ms": round(seconds[0] * 1e3, 3), "bare_ms": round(statistics.median(bare) * 1e3, 4)}
    return found


def measure(kind, device, args):
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    result, results = os.pipe()
    children = []
    for work in ("export", "import"):  # a process each: neither has used CUDA before
        child = os.fork()
        if child == 0:
            try:
                if work == "export":
                    export(there, device, kind, args.bytes)
                else:
                    cuda = Cuda(0)
                    theirs = cuda.allocate(args.bytes) if kind == "own" else imported(cuda, here, kind, args.bytes)
                    os.write(results, json.dumps(copies(cuda, theirs, cuda.allocate(args.bytes), args)).encode())
            except (RuntimeError, OSError, AttributeError) as error:
                os.write(results, json.dumps({"error": f"{work}: {error}"}).encode())
            os._exit(0)
        children.append(child)
        if kind == "own" and work == "export":
            os.kill(child, 9)
    text = os.read(result, 65536)
    here.close()
    there.close()
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    os.close(result)
    os.close(results)
    return json.loads(text)


def visible():
    """Returns the number of GPUs, counted in a child process, which alone initialises the driver."""
    result, results = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(results, str(Cuda(0).device_count()).encode())
        finally:
            os._exit(0)
    os.close(results)
    count = os.read(result, 16)
    os.close(result)
    os.waitpid(child, 0)
    return int(count or 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=768 << 20)
    parser.add_argument("--block", type=int, default=64 << 20, help="as worker/region copies them")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    found = {"own": measure("own", 0, args)}
    for device in range(min(2, visible())):
        for kind in ("vmm", "ipc"):
            found[f"{kind}, {'same' if device == 0 else 'other'} GPU"] = measure(kind, device, args)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
