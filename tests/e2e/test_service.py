"""The public API through stock stubs: results, options, limits, protocol."""

import os
import pathlib
import threading
import time

import grpc
import numpy as np
import pytest

from attention import (assert_close, chunks_of, details, header_for, make_inputs, reference,
                       requests, run)
from cluster import wait_until
from secure_ring import metric
from stubs import attention_pb2 as pb, cluster_pb2, tensor_pb2 as T

RING = pb.SCHEDULE_RING
LAYOUTS = [pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG, pb.LAYOUT_STRIPED]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(window=(20, 5)), dict(causal=True, window=(17, -1)),
    dict(causal=True, softcap=3.0)])
def test_forward_and_backward_match_the_definition(ring, layout, options):
    inputs = make_inputs(batch=2, sq=203, sk=211, heads=4, kv_heads=2, dim=24, dim_v=40)
    plan = dict(layout=layout, schedule=RING, world_size=4)
    exact = reference(inputs, **options)
    forward = run(ring.attention, inputs, **options, **plan)
    assert len(forward.accepted.plan.members) == 4
    for name in ("out", "lse"):
        assert_close(forward.array(name), exact[name], 1e-4)
    inputs["out"], inputs["lse"] = forward.array("out"), forward.array("lse")
    for stateless in (False, True):
        backward = run(ring.attention, inputs, backward=True, forward_result=stateless,
                       **options, **plan)
        for name in ("dq", "dk", "dv"):
            assert_close(backward.array(name), exact[name], 2e-4)


def test_topology_says_at_once_what_is_reserved(make_ring):
    # Workers report every 60 s: what is seen before that is the coordinator's own account.
    ring = make_ring(workers=2,
                     server_flags=["--heartbeat_interval=60s", "--heartbeat_timeout=180s"])

    def reserved(topology):
        return [w.reserved_bytes for w in topology.workers]

    def logged():  # only what concerns the members
        return (ring.directory / "server.log").read_text().count('"topology changed"')

    logged_before = logged()
    watch = ring.cluster.WatchTopology(cluster_pb2.WatchTopologyRequest(), timeout=50)
    assert reserved(next(watch).topology) == [0, 0]
    inputs, go_on = make_inputs(), threading.Event()

    def held_back():
        go_on.wait(40)
        yield from chunks_of(inputs, ["q", "k", "v"])

    stream = ring.attention.Forward(
        requests(header_for(inputs, schedule=RING, world_size=2), held_back()), timeout=40)
    ranks = next(stream).accepted.plan.ranks
    assert reserved(ring.topology()) == [rank.buffer_bytes for rank in ranks]
    while reserved(next(watch).topology) != [rank.buffer_bytes for rank in ranks]:
        pass  # until the requested bytes are reserved
    go_on.set()
    for _ in stream:
        pass
    while any(reserved(next(watch).topology)):
        pass  # the workers' answers to Release
    assert logged() == logged_before


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_request_may_name_its_ring_size(ring, world_size):
    inputs = make_inputs(sq=97)
    schedule = RING if world_size > 1 else pb.SCHEDULE_SINGLE
    result = run(ring.attention, inputs, causal=True, world_size=world_size, schedule=schedule)
    assert result.accepted.plan.world_size == world_size
    assert len(result.summary.ranks) == world_size
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)


@pytest.mark.parametrize("sq,sk", [(0, 5), (5, 0), (0, 0), (1, 1), (3, 3), (1, 50), (50, 1)])
def test_short_and_empty_sequences(ring, sq, sk):
    inputs = make_inputs(sq=sq, sk=sk)
    exact = reference(inputs, causal=True)
    result = run(ring.attention, inputs, causal=True, schedule=RING, world_size=4)
    assert_close(result.array("out"), exact["out"], 1e-4)
    assert_close(result.array("lse"), exact["lse"], 1e-4)
    backward = run(ring.attention, inputs, backward=True, causal=True, schedule=RING, world_size=4)
    assert_close(backward.array("dk"), exact["dk"], 1e-4)


def test_results_are_bit_equal_on_the_same_ring(ring):
    inputs = make_inputs(sq=300, dim=32, dtype=np.float16)
    results = [run(ring.attention, inputs, backward=True, causal=True, schedule=RING,
                   world_size=4) for _ in range(3)]
    for name in ("dq", "dk", "dv"):
        assert all((r.array(name) == results[0].array(name)).all() for r in results)


def test_chunks_may_come_in_any_order_and_with_a_crc_back(ring):
    inputs = make_inputs(sq=120, dim=32)
    chunks = list(chunks_of(inputs, ["q", "k", "v"], chunk_bytes=777))
    np.random.default_rng(3).shuffle(chunks)
    header = header_for(inputs, schedule=RING, world_size=3, crc=True, chunk_bytes=1024)
    from attention import Result
    result = Result()
    for response in ring.attention.Forward(requests(header, chunks), timeout=30):
        if response.WhichOneof("message") == "chunk":
            assert len(response.chunk.data) <= 1024
            assert response.chunk.HasField("crc32c")
        result.take(response)
    assert_close(result.finish().array("out"), reference(inputs)["out"], 1e-4)


def test_chunks_down_fit_a_stock_client(ring):
    inputs = make_inputs(sq=4096, heads=4, dim=128)
    result = run(ring.attention, inputs, window=(16, 0), schedule=RING)
    sizes = [end - begin for _, _, ranges in result.tensors.values() for begin, end in ranges]
    assert max(sizes) <= 1 << 20


def test_many_requests_at_once_are_all_right(ring):
    inputs = [make_inputs(sq=40 + i, seed=i) for i in range(24)]
    results = [None] * len(inputs)

    def work(i):
        results[i] = run(ring.attention, inputs[i], causal=True, schedule=RING if i % 2 else 0,
                         world_size=2 + i % 3 if i % 2 else None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for data, result in zip(inputs, results):
        assert_close(result.array("out"), reference(data, causal=True)["out"], 1e-4)


def test_the_number_of_callback_threads_can_be_chosen(make_ring):
    ring = make_ring(workers=1, server_flags=["--callback_threads=3"])
    inputs = make_inputs(sq=40, sk=40, heads=2, dim=16)
    assert_close(run(ring.attention, inputs).array("out"), reference(inputs)["out"], 1e-4)
    tasks = pathlib.Path(f"/proc/{ring.server.pid}/task").glob("*/comm")
    assert [task.read_text().strip() for task in tasks].count("nexting_thread") == 3


def test_callback_threads_rest_until_tensors_pass_through(make_ring):
    ring = make_ring(workers=1, server_flags=["--callback_threads=5"])

    def wait_for_resting(threads, seconds):
        wait_until(lambda: metric(ring, "ringattn_resting_callback_threads") == threads, seconds, "resting threads")

    serving = 1 if os.sysconf("SC_NPROCESSORS_CONF") <= 2 else 2
    wait_for_resting(5 - serving, 10)
    inputs = make_inputs(sq=512, sk=512, heads=2, dim=64)
    go_on = threading.Event()

    def messages():
        header, *chunks = requests(header_for(inputs), chunks_of(inputs, "qkv"))
        yield header
        go_on.wait(30)
        yield from chunks

    stream = ring.attention.Forward(messages())
    next(stream)  # accepted
    wait_for_resting(0, 5)
    go_on.set()
    assert len(list(stream)) > 0
    wait_for_resting(5 - serving, 10)
    small = make_inputs(sq=16, sk=16, heads=1, dim=16)
    assert_close(run(ring.attention, small).array("out"), reference(small)["out"], 1e-4)
    assert metric(ring, "ringattn_resting_callback_threads") == 5 - serving


def test_nan_stays_in_the_request_and_the_rows_that_see_it(ring):
    inputs = make_inputs(sq=64)
    inputs["v"][0, 40] = np.nan
    result = run(ring.attention, inputs, causal=True, schedule=RING, world_size=4).array("out")
    assert not np.isnan(result[0, :40]).any()
    assert np.isnan(result[0, 40:]).all()
    clean = make_inputs(sq=64)
    assert not np.isnan(run(ring.attention, clean).array("out")).any()


def test_the_summary_and_the_timeline(ring):
    inputs = make_inputs(sq=512, dim=64)
    result = run(ring.attention, inputs, causal=True, schedule=RING, world_size=4, timeline=True,
                 layout=pb.LAYOUT_ZIGZAG)
    stages = {s.stage for s in result.summary.stages}
    assert {pb.STAGE_QUEUE, pb.STAGE_UPLOAD, pb.STAGE_COMPUTE, pb.STAGE_DOWNLOAD} <= stages
    assert result.summary.flops > 0
    for rank in result.summary.ranks:
        assert rank.tiles > 0
        categories = {bar.category for bar in rank.timeline}
        assert {pb.TIMELINE_CATEGORY_COMPUTE, pb.TIMELINE_CATEGORY_EXCHANGE} <= categories
        (kernel,) = rank.kernels
        assert (kernel.call, kernel.family, kernel.kernel_class) == ("forward", "cpu_fp32", "plain")
        assert kernel.instructions  # the processor's
        forwards = [bar for bar in rank.timeline if bar.name.endswith(" forward")]
        assert kernel.calls == len(forwards) > 0
        assert {(bar.kernel_family, bar.kernel_class) for bar in forwards} == {("cpu_fp32", "plain")}
        assert not any(bar.kernel_family for bar in rank.timeline if bar not in forwards)


# ---------------------------------------------------------------- operations


def test_operations_can_be_seen_and_cancelled(ring):
    inputs = make_inputs(sq=64)
    header = header_for(inputs, request_id="cancel-me", schedule=RING, world_size=4)
    gate = threading.Event()

    def slow_chunks():
        gate.wait(20)
        yield from chunks_of(inputs, ["q", "k", "v"])

    call = ring.attention.Forward(requests(header, slow_chunks()), timeout=30)
    assert next(call).WhichOneof("message") == "accepted"
    state = ring.attention.GetStatus(pb.GetStatusRequest(request_id="cancel-me"))
    assert state.state == pb.REQUEST_STATE_UPLOADING
    ring.attention.Cancel(pb.CancelRequest(request_id="cancel-me"))
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    gate.set()
    assert error.value.code() == grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.RpcError) as error:
        ring.attention.Cancel(pb.CancelRequest(request_id="never-seen"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_repeated_request_id_supersedes(ring):
    inputs = make_inputs(sq=64)
    header = header_for(inputs, request_id="twice")
    gate = threading.Event()

    def stuck():
        gate.wait(20)
        return
        yield

    older = ring.attention.Forward(requests(header, stuck()), timeout=30)
    assert next(older).WhichOneof("message") == "accepted"
    newer = run(ring.attention, inputs, request_id="twice")
    with pytest.raises(grpc.RpcError) as error:
        list(older)
    gate.set()
    assert error.value.code() == grpc.StatusCode.ABORTED
    assert_close(newer.array("out"), reference(inputs)["out"], 1e-4)


def test_a_reused_request_id_with_another_header_is_refused(ring):
    inputs = make_inputs(sq=64)
    gate = threading.Event()

    def stuck():
        gate.wait(20)
        return
        yield

    first = ring.attention.Forward(requests(header_for(inputs, request_id="same"), stuck()),
                                   timeout=30)
    assert next(first).WhichOneof("message") == "accepted"
    with pytest.raises(grpc.RpcError) as error:
        run(ring.attention, inputs, request_id="same", causal=True)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details(error.value)["BadRequest"].field_violations[0].field == "request_id"
    gate.set()
    first.cancel()


def test_more_ranks_than_workers(ring):
    def refused_for_good():
        with pytest.raises(grpc.RpcError) as error:
            run(ring.attention, make_inputs(), world_size=5, schedule=RING)
        assert "only 4 workers are ready" in error.value.details()
        # While a young service may still get its workers, the answer is "later".
        if error.value.code() == grpc.StatusCode.UNAVAILABLE:
            assert "RetryInfo" in details(error.value)
            return False
        return error.value.code() == grpc.StatusCode.FAILED_PRECONDITION

    wait_until(refused_for_good, 10, "FAILED_PRECONDITION")


def test_rejection_costs_no_tensor_bytes(ring):
    """The status arrives although the client has sent nothing but the header."""
    inputs = make_inputs()
    header = header_for(inputs)
    header.shape.head_dim = 1000
    gate = threading.Event()

    def stuck():
        gate.wait(10)
        return
        yield

    begin = time.monotonic()
    with pytest.raises(grpc.RpcError) as error:
        list(ring.attention.Forward(requests(header, stuck()), timeout=30))
    gate.set()
    assert time.monotonic() - begin < 5
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    found = details(error.value)
    assert [v.field for v in found["BadRequest"].field_violations] == ["shape.head_dim"]
    assert found["ErrorInfo"].domain == "ringattn"


def test_compressed_messages_are_refused(ring):
    """A small compressed message may expand to gigabytes (docs/transports.md)."""
    inputs = make_inputs(sq=8, dim=8)
    sent = requests(header_for(inputs), chunks_of(inputs, "qkv"))
    with pytest.raises(grpc.RpcError) as refused:
        list(ring.attention.Forward(sent, timeout=20, compression=grpc.Compression.Gzip))
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in refused.value.details()
    with pytest.raises(grpc.RpcError) as refused:
        ring.cluster.GetServerInfo(cluster_pb2.GetServerInfoRequest(), timeout=20,
                                   compression=grpc.Compression.Deflate)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    run(ring.attention, inputs)


# ---------------------------------------------------------------- shapes


def test_a_batch_without_rows(ring):
    """Results are empty, and the gradient of a tensor that all rows share is zero."""
    inputs = make_inputs(batch=0, sq=70, sk=90, heads=4, kv_heads=2, dim=16)
    inputs["bias"] = np.ones((1, 4, 70, 90), np.float32)
    for world_size in (1, 4):
        options = dict(causal=True, world_size=world_size, schedule=RING)
        forward = run(ring.attention, inputs, **options)
        assert forward.array("out").shape == (0, 70, 4, 16)
        assert forward.array("lse").shape == (0, 4, 70)
        backward = run(ring.attention, inputs, backward=True, terms=["bias"], bias_gradient=True,
                       **options)
        assert backward.array("dk").shape == (0, 90, 2, 16)
        dbias = backward.array("dbias")
        assert dbias.shape == (1, 4, 70, 90) and not dbias.any()


def check_causal(ring, inputs):
    """Compares both directions with the reference, on one rank and on four."""
    exact = reference(inputs, causal=True)
    for world_size in (1, 4):
        options = dict(causal=True, world_size=world_size)
        assert_close(run(ring.attention, inputs, **options).array("out"), exact["out"], 1e-4)
        backward = run(ring.attention, inputs, backward=True, **options)
        for name in ("dq", "dk", "dv"):
            assert_close(backward.array(name), exact[name], 2e-4)


def test_a_batch_of_many_short_rows(ring):
    inputs = make_inputs(batch=15_000, sq=4, sk=5, heads=2, kv_heads=1, dim=8)
    check_causal(ring, inputs)


def test_wide_heads(ring):
    """Those of multi-head latent attention in its absorbed form."""
    inputs = make_inputs(sq=130, heads=2, kv_heads=1, dim=576, dim_v=512)
    check_causal(ring, inputs)


# ---------------------------------------------------------------- cluster


def test_server_info_and_topology(ring):
    info = ring.cluster.GetServerInfo(cluster_pb2.GetServerInfoRequest())
    assert info.version
    assert info.limits.max_head_dim == 576 and info.limits.max_kv_head_dim == 256
    assert info.limits.max_batch == 65_535 and info.limits.max_dilated_parts == 1024
    assert "softcap" in info.options
    assert T.DATA_TYPE_BFLOAT16 in info.dtypes
    topology = ring.topology()
    assert [w.rank for w in topology.workers] == [0, 1, 2, 3]
    assert all(w.memory_bytes > 0 and w.data_address for w in topology.workers)


def test_watch_topology_sees_a_worker_join(make_ring):
    ring = make_ring(workers=1)
    watch = ring.cluster.WatchTopology(cluster_pb2.WatchTopologyRequest(), timeout=30)
    first = next(watch).topology
    assert len(first.workers) == 1
    ring.start_worker(1)
    for response in watch:
        topology = response.topology
        members = [worker for worker in topology.workers if worker.HasField("rank")]
        if topology.state == cluster_pb2.RING_STATE_READY and len(members) == 2:
            assert topology.generation > first.generation
            break
    else:
        pytest.fail("the watch ended before the worker was in the ring")
    watch.cancel()


def test_no_worker_means_unavailable(make_ring):
    ring = make_ring(workers=1)
    ring.kill_worker(0)
    wait_until(lambda: ring.topology().state == cluster_pb2.RING_STATE_EMPTY, 10, "an empty ring")
    with pytest.raises(grpc.RpcError) as error:
        run(ring.attention, make_inputs(), timeout=30)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "RetryInfo" in details(error.value)
