"""Several clients of one request (Writer in attention.proto) over stock stubs: the outcome of every fault reaches all
writers with its reason, within the limits, and the workers' memory is given back."""

import threading
import time


import numpy as np
import pytest

from attention import error_of, header_for, make_inputs, reason_of, run
from cluster import Cluster, wait_until
from direct_call import Stream, token_axis, tokens_of
from direct_ring import CODE, LISTEN, RING, await_free, metrics
from stubs import attention_pb2 as pb, tensor_pb2 as T
from writer_call import TOKENS, Writer, shards

LIMITS = ["--writer_join_timeout=2s", "--upload_idle_timeout=2s", "--download_idle_timeout=2s"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("writers"), workers=2, worker_flags=LISTEN,
                      server_flags=LIMITS)
    cluster.wait_ready(2)
    yield cluster
    print(cluster.tail())
    cluster.close()


def waiting(ring):
    return metrics(ring.ports["metrics"])["ringattn_waiting_writers"]


@pytest.fixture
def writers(ring):
    made = []

    def make(count, name, indices=None, **options):
        inputs = options.pop("inputs", None) or make_inputs(sq=TOKENS, heads=4, dim=32, seed=5)
        group = [Writer(ring, inputs, name, index, count, **options)
                 for index in (range(count) if indices is None else indices)]
        made.extend(group)
        return group

    yield make
    for writer in made:
        writer.close()
    await_free(ring)
    wait_until(lambda: waiting(ring) == 0, 10, "no writer waits")


def errors_of(group):
    return [error_of(writer.stream) for writer in group]


# ----------------------------------------------------------------------- results

@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("backward", [False, True])
def test_results_equal_one_clients(ring, writers, count, backward):
    inputs = make_inputs(batch=2, sq=TOKENS, heads=4, kv_heads=2, dim=24, seed=3)
    expected = run(ring.attention, inputs, backward=backward, causal=True, schedule=RING, world_size=2)
    group = writers(count, f"equal-{count}-{backward}", inputs=inputs, backward=backward)
    for writer in group:
        writer.accept()
        assert writer.accepted.transport == pb.TRANSPORT_DIRECT
        own = sum(span.count for span in writer.own)
        for descriptor in writer.accepted.outputs:
            name = T.TensorId.Name(descriptor.tensor)[len("TENSOR_ID_"):].lower()
            assert descriptor.dimensions[token_axis(name)] == own
    for writer in group:
        writer.transfer()
    for writer in group:
        for name, array in writer.outputs().items():
            whole = np.take(expected.array(name), tokens_of(writer.own), token_axis(name))
            assert array.tobytes() == whole.tobytes(), name


# ------------------------------------------------------------------------ faults

def test_missing_writers_are_named(ring, writers):
    start = time.monotonic()
    group = writers(4, "missing", [0, 2])
    wait_until(lambda: waiting(ring) == 2, 10, "both wait")
    for error in errors_of(group):
        assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "WRITER_MISSING"
        assert "of 4 writers, 1, 3 did not join within 2s" in error.details()
    assert time.monotonic() - start < 10


def test_a_writer_that_is_late_meets_nobody(ring, writers):
    (first,) = writers(2, "late", [0])
    assert reason_of(error_of(first.stream)) == "WRITER_MISSING"
    (second,) = writers(2, "late", [1])
    error = error_of(second.stream)
    assert reason_of(error) == "WRITER_MISSING" and "of 2 writers, 0 did not" in error.details()


@pytest.mark.parametrize("leaver, patient", [(2, 0), (0, 2)])
def test_a_writer_that_leaves_while_others_wait(ring, writers, leaver, patient):
    leaves, waits = writers(3, f"leaves-{leaver}", [leaver, patient])
    wait_until(lambda: waiting(ring) == 2, 10, "both wait")
    start = time.monotonic()
    leaves.stream.cancel()
    error = error_of(waits.stream)
    assert error.code() == CODE.ABORTED and reason_of(error) == "WRITER_LOST", error
    assert f"writer {leaver} left the request" in error.details()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("phase", ["accepted", "half uploaded"])
def test_a_writer_that_leaves_after_accepted(ring, writers, leaver, phase):
    group = writers(2, f"leaves-{leaver}-{phase}".replace(" ", "-"))
    for writer in group:
        writer.accept()
    if phase == "half uploaded":
        group[leaver].send(group[leaver].open(0).opened(), 0)
        group[1 - leaver].transfer()
    group[leaver].stream.cancel()
    error = error_of(group[1 - leaver].stream)
    assert error.code() == CODE.ABORTED and reason_of(error) == "WRITER_LOST", error
    assert f"writer {leaver} left the request" in error.details()


def test_a_second_writer_with_one_index(ring, writers):
    first, third = writers(3, "twice", [1, 2])
    wait_until(lambda: waiting(ring) == 2, 10, "both wait")
    (again,) = writers(3, "twice", [1])
    error = error_of(first.stream)
    assert error.code() == CODE.ABORTED and reason_of(error) == "WRITER_REPLACED"
    assert "as writer 1" in error.details()
    (zero,) = writers(3, "twice", [0])
    for writer in (zero, again, third):
        writer.accept().transfer()
    for writer in (zero, again, third):
        assert not np.isnan(writer.outputs()["out"]).any()


def test_a_writer_that_joins_again_while_the_request_runs(ring, writers):
    group = writers(2, "again")
    for writer in group:
        writer.accept()
    (again,) = writers(2, "again", [1])
    error = error_of(group[1].stream)
    assert error.code() == CODE.ABORTED and reason_of(error) == "WRITER_REPLACED"
    assert reason_of(error_of(group[0].stream)) == "WRITER_LOST"
    # Its client retries: both meet in a new group.
    (zero,) = writers(2, "again", [0])
    for writer in (zero, again):
        writer.accept().transfer()
    for writer in (zero, again):
        assert not np.isnan(writer.outputs()["out"]).any()


def test_headers_that_differ(ring, writers):
    inputs = make_inputs(sq=TOKENS, heads=4, dim=32, seed=5)
    (first,) = writers(2, "differ", [0], inputs=inputs)
    other = header_for(inputs, request_id="differ", causal=False, schedule=RING, world_size=2)
    (second,) = writers(2, "differ", [1], inputs=inputs, header=other)
    for error in errors_of([first, second]):
        assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "WRITERS_DIFFER"
    # Another number of writers is another header.
    group = writers(2, "counts", [0]) + writers(3, "counts", [1])
    for error in errors_of(group):
        assert reason_of(error) == "WRITERS_DIFFER"


def test_tokens_that_two_writers_have(ring, writers):
    spans = [[pb.TokenSpan(begin=0, count=101)], [pb.TokenSpan(begin=100, count=100)]]
    for error in errors_of(writers(2, "overlap", spans=spans)):
        assert error.code() == CODE.INVALID_ARGUMENT
        assert "transport.writer.q: writer 1 has token 100, which another span has too" in error.details()


@pytest.mark.parametrize("change, text", [
    (lambda h: h.transport.accept.append(pb.TRANSPORT_RELAY), "names RELAY, which writers cannot use"),
    (lambda h: h.transport.ClearField("accept"), "is empty; a writer needs DIRECT"),
    (lambda h: setattr(h.transport.writer, "count", 0), "transport.writer.count: is 0; must be in 1..64"),
    (lambda h: setattr(h.transport.writer, "index", 2), "transport.writer.index: is 2; must be below count"),
    (lambda h: h.transport.writer.q.add(begin=TOKENS, count=1), "transport.writer.q[1]: has tokens beyond the axis"),
    (lambda h: h.transport.writer.q.add(begin=0, count=2, stride=2**63), "transport.writer.q[1]: has tokens beyond"),
    (lambda h: h.transport.writer.kv.add(begin=0), "transport.writer.kv[1].count: is 0; omit empty spans"),
    (lambda h: h.transport.writer.q.extend([pb.TokenSpan(begin=0, count=1)] * 4096), "has 4098 spans; at most 4096"),
    (lambda h: h.inline_tensors.add(tensor=T.TENSOR_ID_Q, data=b"\0" * TOKENS * 4 * 32 * 4),
     "transport.writer: is not available: the request has inline tensors"),
    (lambda h: h.reply.probability_rows.add(), "the request has reply.probability_rows"),
    (lambda h: h.ClearField("request_id"), "request_id: is empty; all writers of a request name the same"),
])
def test_a_header_that_no_writer_may_send(ring, change, text):
    inputs = make_inputs(sq=TOKENS, heads=4, dim=32)
    header = header_for(inputs, request_id="wrong", causal=True)
    header.transport.accept.append(pb.TRANSPORT_DIRECT)
    own = shards(2)[0]
    header.transport.writer.count = 2
    header.transport.writer.q.extend(own)
    header.transport.writer.kv.extend(own)
    change(header)
    error = error_of(ring.attention.Forward(iter([pb.ForwardRequest(header=header)]), timeout=10))
    assert error.code() == CODE.INVALID_ARGUMENT and text in error.details(), error.details()


def test_a_writer_that_sends_nothing(ring, writers):
    group = writers(2, "idle")
    for writer in group:
        writer.accept()
    group[0].transfer()
    for error in errors_of(group):
        assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "UPLOAD_IDLE"


def test_a_writer_that_takes_nothing(ring, writers):
    """Its outputs exceed the flow-control window, and it does not read them."""
    inputs = make_inputs(sq=TOKENS, batch=64, heads=8, dim=64, seed=5)
    group = writers(2, "not-read", inputs=inputs, timeout=60)
    for writer in group:
        writer.accept().transfer()
    reader = threading.Thread(target=lambda: [stream.error() for stream in group[0].streams])
    reader.start()
    for error in errors_of(group):
        assert error.code() == CODE.DEADLINE_EXCEEDED and reason_of(error) == "DOWNLOAD_IDLE", error
    reader.join()


def test_wrong_streams_are_refused(ring, writers):
    group = writers(2, "streams")
    for writer in group:
        writer.accept()
    ticket = group[0].accepted.tickets[0]
    error = Stream(ticket.endpoints[0]).open(ticket.token, writer=2).error()
    assert error.code() == CODE.INVALID_ARGUMENT and "writer is 2; the request has 2" in error.details()
    first = group[0].open(0).opened()
    error = Stream(ticket.endpoints[0]).open(ticket.token, writer=0).error()
    assert error.code() == CODE.UNAUTHENTICATED
    # A chunk that another writer has sent already.
    second = group[1].open(0).opened()
    group[0].send(first, 0)
    group[0].send(second, 0)
    for error in errors_of(group):
        assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK", error


def test_a_worker_that_dies_ends_the_call_of_all(tmp_path):
    ring = Cluster(tmp_path, workers=2, worker_flags=LISTEN)
    ring.wait_ready(2)
    inputs = make_inputs(sq=TOKENS, heads=4, dim=32)
    group = [Writer(ring, inputs, "worker-dies", index, 2) for index in range(2)]
    for writer in group:
        writer.accept()
    ring.kill_worker(1)
    for error in errors_of(group):
        assert error.code() == CODE.ABORTED and reason_of(error) == "WORKER_LOST", error
    for writer in group:
        writer.close()
    ring.close()


def test_waiting_writers_learn_of_the_end_of_the_service(tmp_path):
    ring = Cluster(tmp_path, workers=1, worker_flags=LISTEN)
    ring.wait_ready(1)
    waits = Writer(ring, make_inputs(sq=TOKENS, heads=4, dim=32), "service-ends", 0, 2)
    wait_until(lambda: waiting(ring) == 1, 10, "it waits")
    ring.server.terminate()
    error = error_of(waits.stream)
    assert error.code() == CODE.UNAVAILABLE, error
    waits.close()
    ring.close()


def test_no_transport_in_common(ring, writers):
    inputs = make_inputs(sq=TOKENS, heads=4, dim=32)
    (direct,) = writers(2, "no-common", [0], inputs=inputs)
    header = header_for(inputs, request_id="no-common", causal=True, schedule=RING, world_size=2)
    own = shards(2)[1]
    header.transport.accept.append(pb.TRANSPORT_HOST_MEMORY)
    header.transport.writer.index, header.transport.writer.count = 1, 2
    header.transport.writer.q.extend(own)
    header.transport.writer.kv.extend(own)
    other = ring.attention.Forward(iter([pb.ForwardRequest(header=header)]), timeout=10)
    for error in (error_of(direct.stream), error_of(other)):
        assert error.code() == CODE.FAILED_PRECONDITION and reason_of(error) == "TRANSPORT_UNAVAILABLE"
        assert "the writers accept no transport in common" in error.details()
