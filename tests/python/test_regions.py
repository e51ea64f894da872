"""Tensors in memory that workers read and write themselves: allocation, lifetime, and which way calls take."""
import gc
import os

import numpy as np
import pytest
import reference
from conftest import wait_until

import ringattn

MIB = 1 << 20


def tensors(rng, make=np.empty, queries=70, keys=90, heads=4, kv_heads=2, dim=16):
    made = []
    for shape in ((1, queries, heads, dim), (1, keys, kv_heads, dim), (1, keys, kv_heads, dim)):
        array = make(shape, "float32")
        array[:] = rng.standard_normal(shape)
        made.append(array)
    return made


def lies_in(region, array):
    begin = array.__array_interface__["data"][0]
    return region.address <= begin and begin + array.nbytes <= region.address + region.nbytes


# ---------------------------------------------------------------------- allocation


def test_arrays_in_a_region(client):
    with client.region(MIB) as region:
        assert sorted(region.workers) == ["worker-0", "worker-1", "worker-2"] and region.trouble == ""
        assert region.nbytes == MIB and "shared with 3 workers" in repr(region)
        a, b = region.empty((3, 5), "float16"), region.empty(7, np.int32)
        assert a.shape == (3, 5) and a.dtype == np.float16 and a.flags.c_contiguous and a.flags.writeable
        assert b.shape == (7,) and b.dtype == np.int32 and region.empty((2, 2), bool).dtype == np.bool_
        assert lies_in(region, a) and lies_in(region, b) and not np.shares_memory(a, b)
        assert a.ctypes.data % 64 == 0 and b.ctypes.data % 64 == 0
        assert region.empty((0, 4)).shape == (0, 4)
        with pytest.raises(MemoryError, match="no room for 1048576 more"):
            region.empty(MIB, np.uint8)
        with pytest.raises(ringattn.InvalidArgumentError, match="dtype"):
            region.empty(1, np.float64)
    assert region.closed and region.workers == [] and region.trouble == "the region is closed"
    with pytest.raises(ValueError):
        client.region(0)


def test_bfloat16_arrays(client):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    region = client.region(4096)
    for dtype in ("bfloat16", ml_dtypes.bfloat16):
        array = region.empty((2, 3), dtype)
        array[:] = 1.5
        assert array.dtype == ml_dtypes.bfloat16 and (array == 1.5).all()


def test_memory_is_used_again_when_its_last_view_is_gone(client):
    region = client.region(MIB)
    whole = region.empty(MIB, np.uint8)
    view = whole.reshape(1024, 1024)[3:5, ::7]
    address = whole.ctypes.data
    del whole
    gc.collect()
    with pytest.raises(MemoryError):
        region.empty(1)
    del view
    again = region.empty(MIB, np.uint8)
    assert again.ctypes.data == address
    del again
    # In any order, pieces grow together again.
    rng = np.random.default_rng(1)
    pieces = [region.empty(int(size), np.uint8) for size in rng.integers(1, 9000, 100)]
    for index in rng.permutation(100):
        pieces[index] = None
    assert region.empty(MIB, np.uint8).nbytes == MIB


def test_arrays_outlive_their_region_and_client(address):
    client = ringattn.connect(address)
    region = client.region(MIB)
    array = region.empty(1000)
    array[:] = 7
    region.close()
    client.close()
    del region, client
    gc.collect()
    assert (array == 7).all()
    array[:] = 8
    assert array.sum() == 8000


def test_other_libraries_see_the_memory(client):
    array = client.empty((4, 4))
    assert np.shares_memory(np.from_dlpack(array), array)
    assert memoryview(array).nbytes == 64


def test_the_limit_of_own_regions(address):
    with ringattn.connect(address, region_bytes=8 * MIB) as client:
        arrays = [client.empty(MIB, np.uint8) for _ in range(7)]
        with pytest.raises(MemoryError, match="region_bytes=8388608"):
            client.empty(2 * MIB, np.uint8)
        del arrays
        assert client.empty(2 * MIB, np.uint8).nbytes == 2 * MIB


def test_empty_of_the_default_client(default_client):
    array = ringattn.empty((2, 3), "int32")
    assert array.dtype == np.int32 and array.shape == (2, 3)
    assert ringattn.empty(1, client=default_client).shape == (1,)


def test_a_forked_child_has_not_the_memory(client):
    region = client.region(4096)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            region.empty(1)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    assert b"cannot be used in a forked process" in os.read(read, 1000)
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)
    assert region.empty(1).shape == (1,)


# ------------------------------------------------------------------------ transport


def test_tensors_in_regions_are_neither_sent_nor_copied(client, rng):
    q, k, v = tensors(rng, client.empty)
    out, lse, report = client.forward(q, k, v, causal=True)
    assert report.transport == "host_memory" and report.staged_bytes == 0 and report.transport_reason
    expected = reference.forward(q, k, v, causal=True)
    reference.close(out, expected[0], 1e-5)
    reference.close(lse, expected[1], 1e-5)
    # Results were born there too, so that they can go on.
    dout = client.empty(out.shape)
    dout[:] = rng.standard_normal(out.shape)
    by_host = client.backward(dout, q, k, v, out=out, lse=lse, causal=True)
    assert by_host.report.transport == "host_memory" and by_host.report.staged_bytes == 0
    relayed = client.backward(dout, q, k, v, out=out, lse=lse, causal=True, transport="relay")
    assert relayed.report.transport == "relay"
    assert relayed.report.transport_reason == "the caller chose the relay"
    for name in ("dq", "dk", "dv"):
        assert (getattr(by_host, name) == getattr(relayed, name)).all(), name


def test_other_tensors_are_staged(client, rng):
    q, k, v = tensors(rng)
    relayed = client.forward(q, k, v, transport="relay")
    staged = client.forward(q, k, v, transport="host_memory")
    assert staged.report.transport == "host_memory" and "; staged" in staged.report.transport_reason
    # Results lie where workers write: the inputs alone were copied.
    assert staged.report.staged_bytes == q.nbytes + k.nbytes + v.nbytes
    assert (staged.out == relayed.out).all() and (staged.lse == relayed.lse).all()
    assert client.forward(q, k, v).report.transport == "relay"


def test_large_tensors_are_staged_when_memory_is_ready(client, rng):
    """One call of a client is faster by the relay than by memory that has to be made first."""
    q, k, v = tensors(rng, queries=4096, keys=32)
    first = client.forward(q, k, v)
    # Straight to the workers meanwhile: the ring of `ringattn up` has ports for it.
    assert first.report.transport == "direct" and first.report.staged_bytes == 0
    reports = []

    def is_staged():
        reports.append(client.forward(q, k, v))
        return reports[-1].report.staged_bytes > 0

    wait_until(is_staged, 20, "staged")
    staged = reports[-1]
    assert staged.report.transport == "host_memory" and "; staged" in staged.report.transport_reason
    assert staged.report.staged_bytes == 2 * q.nbytes + 2 * k.nbytes + 4096 * 4 * 4
    assert (staged.out == first.out).all() and (staged.lse == first.lse).all()


def test_one_tensor_elsewhere_is_staged_alone(client, rng):
    q, k, v = tensors(rng, client.empty)
    report = client.forward(q.copy(), k, v, transport="host_memory").report
    assert report.transport == "host_memory" and report.staged_bytes == q.nbytes


def test_staging_has_a_limit(address, rng):
    q, k, v = tensors(rng, queries=4096)
    with ringattn.connect(address, staging_bytes=2 * MIB, region_bytes=0) as client:
        report = client.forward(q, k, v).report
        assert report.transport == "direct" and report.staged_bytes == 0
        with pytest.raises(ringattn.FailedPreconditionError, match="limit of staging") as error:
            client.forward(q, k, v, transport="host_memory")
        assert error.value.reason == "TRANSPORT_UNAVAILABLE"


def test_ways_that_do_not_exist(client, rng):
    q, k, v = tensors(rng)
    with pytest.raises(ringattn.InvalidArgumentError, match="transport"):
        client.forward(q, k, v, transport="pigeon")
    from ringattn import _core

    if "direct" not in _core.TRANSPORTS:
        with pytest.raises(NotImplementedError, match="transport: 'direct'"):
            client.forward(q, k, v, transport="direct")


def test_a_closed_region_is_memory_like_any_other(client, rng):
    region = client.region(MIB)
    q, k, v = tensors(rng, region.empty)
    assert client.forward(q, k, v).report.transport == "host_memory"
    region.close()
    expected = reference.forward(q, k, v)[0]
    report = client.forward(q, k, v)
    assert report.report.transport == "relay"
    reference.close(report.out, expected, 1e-5)
    assert client.forward(q, k, v, transport="host_memory").report.staged_bytes > 0


def test_regions_of_another_client_are_not_found(address, client, rng):
    q, k, v = tensors(rng, client.empty)
    with ringattn.connect(address) as other:
        report = other.forward(q, k, v).report
        assert report.transport == "relay" and "region" in report.transport_reason


def test_results_keep_their_place_until_they_are_gone(client, rng):
    q, k, v = tensors(rng, client.empty)
    results = [client.forward(q, k, v, softmax_scale=0.1 * i).out for i in range(1, 9)]
    for i, out in enumerate(results, 1):
        reference.close(out, reference.forward(q, k, v, softmax_scale=0.1 * i)[0], 1e-5)


# -------------------------------------------------------------------------- PyTorch


def test_torch_tensors(client):
    torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)
    region = client.region(MIB)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool):
        tensor = region.empty((2, 3), dtype)
        assert tensor.dtype == dtype and tuple(tensor.shape) == (2, 3) and tensor.is_contiguous()
        assert region.address <= tensor.data_ptr() < region.address + region.nbytes
        tensor.fill_(1)
        assert (tensor == 1).all()
        assert region.empty((0, 2), dtype).numel() == 0
    with pytest.raises(ringattn.InvalidArgumentError, match="dtype"):
        region.empty(1, torch.float64)
    view = region.empty(MIB // 8, torch.float32)[5:7].view(2)
    gc.collect()
    with pytest.raises(MemoryError):
        region.empty(MIB - 4096, torch.uint8)
    del view, tensor
    assert region.empty(MIB - 4096, torch.uint8).shape == (MIB - 4096,)


def test_torch_calls_by_host_memory(client, default_client):
    torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)
    q, k, v = (client.empty((1, 300, 4, 16), torch.bfloat16).normal_() for _ in range(3))
    result = client.forward(q, k, v, causal=True)
    assert result.report.transport == "host_memory" and result.report.staged_bytes == 0
    relayed = client.forward(q, k, v, causal=True, transport="relay")
    assert (result.out == relayed.out).all() and result.out.dtype == torch.bfloat16
    ringattn.set_default_client(client, transport="host_memory")
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    ringattn.flash_attn_func(*leaves, causal=True).float().square().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
