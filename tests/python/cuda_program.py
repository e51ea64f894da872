"""Calls over memory of a GPU that is not there: the fake driver's, which the host cannot touch but by its copies.

  cuda_program.py LIBCUDA ADDRESS CASE      run by test_cuda.py, a process each
"""
import concurrent.futures
import ctypes
import gc
import sys

import numpy as np

DRIVER = ctypes.CDLL(sys.argv[1])  # by its name, ringattn's extension finds this one
DRIVER.cuInit(0)

import ringattn  # noqa: E402
from ringattn import _core, _cuda  # noqa: E402

SHAPE = (1, 192, 2, 64)


class Properties(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int),
                ("location_id", ctypes.c_int), ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class GpuTensor:
    """GPU memory of another library: memory of cuMemCreate that cannot be exported, visible by DLPack alone."""

    def __init__(self, array, device=0, code=None):
        self.shape, self.dtype, self.device, self.streams = array.shape, array.dtype, device, []
        self.code = code or {"float32": (2, 32), "int32": (0, 32), "float64": (2, 64), "uint16": (4, 16)}[array.dtype.name]
        self.nbytes = -(-max(array.nbytes, 1) // (2 << 20)) * (2 << 20)
        properties = Properties(1, 0, 1, device)
        handle, pointer = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        assert DRIVER.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(self.nbytes), ctypes.byref(properties),
                                  ctypes.c_ulonglong(0)) == 0
        assert DRIVER.cuMemAddressReserve(ctypes.byref(pointer), ctypes.c_size_t(self.nbytes), ctypes.c_size_t(0),
                                          ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)) == 0
        assert DRIVER.cuMemMap(pointer, ctypes.c_size_t(self.nbytes), ctypes.c_size_t(0), handle,
                               ctypes.c_ulonglong(0)) == 0
        self.address = pointer.value
        array = np.ascontiguousarray(array)
        assert DRIVER.cuMemcpyHtoD_v2(pointer, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)) == 0

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        return _core.make_cuda_dlpack(self, self.address, self.device, list(self.shape), *self.code)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SHAPE).astype(np.float32) for _ in range(4)]


def expect_equal(got, wanted):
    assert got.shape == wanted.shape and got.dtype == "float32", (got, wanted.shape)
    np.testing.assert_array_equal(got.numpy(), wanted)


def both_passes(client, arrays, **options):
    """Forward and backward over arrays on a GPU, with the reports."""
    q, k, v, dout = (GpuTensor(array) for array in arrays)
    out, lse, forward = client.forward(q, k, v, causal=True, **options)
    gradients = client.backward(dout, q, k, v, out=out, lse=lse, causal=True, **options)
    for tensor in (q, k, v, dout):
        assert set(tensor.streams) == {1}, tensor.streams  # the legacy default stream, by its name
    return (out, lse, *gradients[:3]), forward, gradients.report


def on_host(client, arrays):
    q, k, v, dout = arrays
    out, lse, _ = client.forward(q, k, v, causal=True, transport="relay")
    return out, lse, *client.backward(dout, q, k, v, out=out, lse=lse, causal=True, transport="relay")[:3]


def taken(client):
    """With a worker that supports CUDA memory, no tensor passes the host, for all kinds of allocations."""
    arrays = problem()
    wanted = on_host(client, arrays)
    for options in ({}, {"transport": "cuda_memory"}):
        results, *reports = both_passes(client, arrays, **options)
        for got, want in zip(results, wanted):
            assert isinstance(got, ringattn.CudaArray) and got.device == 0
            expect_equal(got, want)
        forward, backward = reports
        assert forward.transport == backward.transport == "cuda_memory", (forward, backward)
        assert forward.staged_bytes == 3 * arrays[0].nbytes, forward.staged_bytes
        # out and lse lie in the client's memory by now.
        assert backward.staged_bytes == 4 * arrays[0].nbytes, backward.staged_bytes
        assert "copied on their GPU" in forward.transport_reason, forward.transport_reason


def own_memory(client):
    """Tensors of Client.cuda_empty are used in place; copies' blocks are reused once they are free."""
    arrays = problem(1)
    given = []
    for array in arrays[:3]:
        tensor = client.cuda_empty(array.shape)
        pointer = _core.DlpackTensor(tensor.__dlpack__()).address
        assert DRIVER.cuMemcpyHtoD_v2(ctypes.c_ulonglong(pointer), ctypes.c_void_p(array.ctypes.data),
                                      ctypes.c_size_t(array.nbytes)) == 0
        given.append(tensor)
    wanted = client.forward(*arrays[:3], transport="relay")
    places = set()
    for _ in range(50):
        out, lse, report = client.forward(*given, transport="cuda_memory")
        assert report.staged_bytes == 0 and report.transport == "cuda_memory"
        expect_equal(out, wanted.out)
        capsule = _core.DlpackTensor(out.__dlpack__())
        places.add(capsule.address)
        view = np.array([capsule.address])
        del out
        other = client.cuda_empty(arrays[0].shape)  # a view keeps the place
        assert _core.DlpackTensor(other.__dlpack__()).address not in view
        del other, capsule
    assert len(places) < 4, places
    gc.collect()
    synchronized = ctypes.c_uint.in_dll(DRIVER, "fake_vmm_synchronized")
    before = synchronized.value
    client.forward(*given)
    assert synchronized.value > before, "the GPU's streams are waited for"


def refused(client):
    """With a service without CUDA memory, an explicit request fails; by default tensors pass the host, with the
    reason."""
    arrays = problem(2)
    wanted = on_host(client, arrays)
    results, *reports = both_passes(client, arrays)
    for got, want in zip(results, wanted):
        expect_equal(got, want)
    for report in reports:
        assert report.transport != "cuda_memory"
        assert "copied through host memory" in report.transport_reason, report.transport_reason
        assert report.staged_bytes > 0
    try:
        both_passes(client, arrays, transport="cuda_memory")
    except ringattn.FailedPreconditionError as error:
        assert error.reason == "TRANSPORT_UNAVAILABLE", error
    else:
        raise AssertionError("transport='cuda_memory' went another way")


def other_ways(client):
    """Ways that read host memory: the tensors pass through it, and the report says why."""
    arrays = problem(3)
    wanted = on_host(client, arrays)
    for transport in ("relay", "host_memory"):
        results, *reports = both_passes(client, arrays, transport=transport)
        for got, want in zip(results, wanted):
            expect_equal(got, want)
        for report in reports:
            assert f"transport is '{transport}'" in report.transport_reason, report.transport_reason


def bad_input(client):
    q, k, v, _ = problem(4)

    class Strided(GpuTensor):
        def __dlpack__(self, *, stream=None):
            raise BufferError("no stream to wait on")

    for make, field, words in (
            (lambda: client.forward(GpuTensor(q.astype(np.float64)), GpuTensor(k), GpuTensor(v)), "q", "64 bits"),
            (lambda: client.forward(q, GpuTensor(k), v), "k", "is on a GPU"),
            (lambda: client.forward(GpuTensor(q), GpuTensor(k[:, :, :1, :32]), GpuTensor(v)), "k", "head_dim")):
        try:
            make()
        except ringattn.InvalidArgumentError as error:
            assert [violation.field for violation in error.violations] == [field], error
            assert words in str(error), error
        else:
            raise AssertionError(field)
    try:
        client.forward(Strided(q), GpuTensor(k), GpuTensor(v))
    except BufferError as error:
        assert "no stream" in str(error)


def beyond_the_limit(client):
    """No room on the GPU for what is copied there: through the host, with the reason."""
    small = ringattn.connect(sys.argv[2], region_bytes=2 << 20)
    rng = np.random.default_rng(5)
    arrays = [rng.standard_normal((1, 4096, 2, 64)).astype(np.float32) for _ in range(3)]
    # Nor for the results, which only the arena could hold: the call fails before any computation.
    try:
        small.forward(*(GpuTensor(array) for array in arrays))
    except MemoryError as error:
        assert "region_bytes" in str(error)
    else:
        raise AssertionError("there was room")
    try:
        small.forward(*(GpuTensor(array) for array in arrays), transport="cuda_memory")
    except ringattn.ResourceExhaustedError as error:
        assert "region_bytes" in str(error), error
    else:
        raise AssertionError("there was room")
    # With room for the results alone they come, the inputs through the host.
    some = ringattn.connect(sys.argv[2], region_bytes=4 << 20)
    wanted = client.forward(*arrays, transport="relay")
    out, _, report = some.forward(*(GpuTensor(array) for array in arrays))
    expect_equal(out, wanted.out)
    assert "no space left in region_bytes" in report.transport_reason, report


def autograd(client):
    """The operators of PyTorch over the GPU's memory. PyTorch itself has no GPU here: what it shows by DLPack and makes
    of it is stood in for, copied to the GPU and back, and everything between is as it is with one."""
    import torch

    from ringattn import torch_ops  # noqa: F401

    def take(value, _):
        array = value.detach().contiguous().numpy()
        return _cuda_take(GpuTensor(array), _)

    _cuda_take, is_cuda, finish = _cuda.take, _cuda.is_cuda, _cuda.CudaLibrary.finish
    _cuda.is_cuda = lambda value: isinstance(value, torch.Tensor) and value.dtype == torch.float32
    _cuda.take = take

    def to_torch(self, tensor):
        self.of_torch = False
        return torch.from_numpy(finish(self, tensor).numpy())

    _cuda.CudaLibrary.finish = to_torch
    arrays = problem(6)
    ringattn.set_default_client(client, transport="cuda_memory")
    for residual in ("off", "auto"):
        q, k, v = (torch.tensor(array, requires_grad=True) for array in arrays[:3])
        out, lse = ringattn.attention(q, k, v, causal=True, residual=residual)
        out.backward(torch.tensor(arrays[3]))
        p, r, s = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays[:3])
        want = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in (p, r, s)), is_causal=True).transpose(1, 2)
        want.backward(torch.tensor(arrays[3], dtype=torch.float64))
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
        for got, judge in ((q, p), (k, r), (v, s)):
            torch.testing.assert_close(got.grad.double(), judge.grad, rtol=1e-3, atol=1e-3)
    _cuda.is_cuda, _cuda.take, _cuda.CudaLibrary.finish = is_cuda, _cuda_take, finish


def event_loop(client):
    import asyncio

    q, k, v, _ = problem(7)
    wanted = client.forward(q, k, v, transport="relay")

    async def main():
        calls = [client.forward_async(*(GpuTensor(array) for array in (q, k, v)), transport="cuda_memory") for _ in range(4)]
        return await asyncio.gather(*calls)

    for result in asyncio.run(main()):
        expect_equal(result.out, wanted.out)


def writers(client):
    """Two clients share each request. Each has its rows in GPU memory and receives its own results there: the bits
    of one client's call. No tensor passes the host. A residual serves the backward of both."""
    arrays = problem(8)
    tokens, half = SHAPE[1], 80
    spans = [[(0, half)], [(half, tokens - half)]]
    out, lse, _ = client.forward(*arrays[:3], causal=True, transport="relay")
    wanted = (out, lse, *on_host(client, arrays)[2:])

    def rank(index, retain):
        rows = slice(spans[index][0][0], sum(spans[index][0]))
        writer = ringattn.Writer(index, 2, spans[index], spans[index], tokens, tokens)
        options = {"writer": writer, "transport": "cuda_memory"}
        q, k, v, dout = (GpuTensor(array[:, rows]) for array in arrays)
        with ringattn.connect(sys.argv[2]) as mine:
            out, lse, forward = mine.forward(q, k, v, causal=True, retain=retain, request_id=f"forward-{retain}", **options)
            if retain:
                gradients = mine.backward(dout, residual=forward.residual, request_id="backward-residual", **options)
            else:
                gradients = mine.backward(dout, q, k, v, out=out, lse=lse, causal=True, request_id="backward", **options)
            for report in (forward, gradients.report):
                assert report.transport == "cuda_memory" and "copied on their GPU" in report.transport_reason, report
            for got, want in zip((out, *gradients[:3]), (wanted[0], *wanted[2:])):
                expect_equal(got, want[:, rows])
            expect_equal(lse, wanted[1][..., rows])

    for retain in (False, True):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(rank, index, retain) for index in range(2)]:
                done.result(60)


with ringattn.connect(sys.argv[2]) as connected:
    globals()[sys.argv[3]](connected)
print("passed")
