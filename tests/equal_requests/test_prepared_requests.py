"""Prepared requests over stock stubs: what workers keep before the first run (PrepareOptions, docs/operations.md)."""

import json
import threading
import time

import grpc
import pytest

from attention import assert_close, details, header_for, make_inputs, reference, requests, run
from certificates import digest, token_channel, write_clients
from cluster import wait_until
from stubs import attention_pb2 as pb, attention_pb2_grpc

SHAPE = dict(sq=300, heads=2, dim=32)


def prepare(stub, inputs, ttl=None, backward=False, timeout=30, **options):
    """Returns the Summary's PreparedReport and Accepted."""
    header = header_for(inputs, backward=backward, **options)
    header.prepare.SetInParent()
    if ttl is not None:
        header.prepare.ttl.FromMilliseconds(int(1000 * ttl))
    method = stub.Backward if backward else stub.Forward
    kinds, summary, accepted = [], None, None
    for response in method(requests(header, ()), timeout=timeout):
        kinds.append(response.WhichOneof("message"))
        accepted = response.accepted if kinds[-1] == "accepted" else accepted
        summary = response.summary if kinds[-1] == "summary" else summary
    assert kinds == ["accepted", "summary"]
    assert not accepted.inputs and not accepted.outputs and summary.bytes_up == summary.bytes_down == 0
    return summary.prepared, accepted


def renew(stub, inputs, stop, **options):
    """Renews once a second until `stop` is set."""
    while not stop.wait(1):
        prepare(stub, inputs, ttl=3, **options)


def lookups(ring, index, result):
    return ring.worker_metric(index, f'ringattn_worker_kept_operation_lookups_total{{result="{result}"}}')


def drops(ring, index, reason):
    return ring.worker_metric(index, f'ringattn_worker_kept_operation_drops_total{{reason="{reason}"}}')


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_run_finds_the_part(make_ring, workers, backward):
    ring = make_ring(workers=workers)
    inputs = make_inputs(**SHAPE)
    options = dict(backward=backward, causal=True, world_size=workers)
    report, accepted = prepare(ring.attention, inputs, **options)
    assert report.found == 0 and report.bytes > 0 and report.ttl.ToSeconds() == 30
    assert len(accepted.plan.members) == workers and accepted.transport == pb.TRANSPORT_UNSPECIFIED
    again, _ = prepare(ring.attention, inputs, ttl=60, **options)
    assert again.found == workers and again.bytes == report.bytes
    result = run(ring.attention, inputs, **options)
    exact = reference(inputs, causal=True)
    for name in ("dq", "dk", "dv") if backward else ("out", "lse"):
        assert_close(result.array(name), exact[name], 1e-4)
    for index in range(workers):
        wait_until(lambda: lookups(ring, index, "hit") == 1, 10, "a hit")
        assert lookups(ring, index, "miss") == 0
        preparations = 'ringattn_worker_preparations_total{result="%s"}'
        assert ring.worker_metric(index, preparations % "made") == ring.worker_metric(index, preparations % "found") == 1
        assert ring.worker_metric(index, "ringattn_worker_prepared_recipes") == 1
        assert ring.worker_metric(index, "ringattn_worker_reserved_bytes") == 0


def test_runs_go_where_they_are_prepared(make_ring):
    ring = make_ring(workers=3)
    inputs = make_inputs(**SHAPE)
    _, accepted = prepare(ring.attention, inputs)
    for seed in range(20):
        result = run(ring.attention, make_inputs(seed=seed, **SHAPE))
        assert result.accepted.plan.members == accepted.plan.members
    total = lambda result: sum(lookups(ring, index, result) for index in range(3))
    wait_until(lambda: total("hit") == 20, 10, "hits")
    assert total("miss") == 0


def test_the_part_lives_as_long_as_it_is_renewed(make_ring):
    ring = make_ring(workers=1, worker_flags=["--prepared_lease=1s"])
    inputs = make_inputs(**SHAPE)
    stop = threading.Event()
    prepare(ring.attention, inputs, ttl=3)
    renewing = threading.Thread(target=renew, args=(ring.attention, inputs, stop))
    renewing.start()
    run(ring.attention, make_inputs(sq=50))  # not prepared
    wait_until(lambda: drops(ring, 0, "expired") == 1, 10, "the end of the other one's lease")
    time.sleep(5)
    run(ring.attention, make_inputs(seed=7, **SHAPE))
    stop.set()
    renewing.join()
    wait_until(lambda: lookups(ring, 0, "hit") == 1, 10, "a hit")
    assert lookups(ring, 0, "miss") == 1 and drops(ring, 0, "expired") == 1
    wait_until(lambda: ring.worker_metric(0, "ringattn_worker_kept_operation_bytes") == 0, 15, "the lease's end")
    assert drops(ring, 0, "expired") == 2 and ring.worker_metric(0, "ringattn_worker_prepared_recipes") == 0


def test_other_requests_take_the_memory(make_ring):
    ring = make_ring(workers=1, worker_flags=["--memory_limit=4MiB"])
    small = dict(sq=500, heads=2, dim=64)
    prepare(ring.attention, make_inputs(**small), ttl=600)
    run(ring.attention, make_inputs(sq=1700, heads=2, dim=64))
    wait_until(lambda: drops(ring, 0, "evicted") == 1, 10, "the eviction")
    inputs = make_inputs(seed=1, **small)
    result = run(ring.attention, inputs)
    assert_close(result.array("out"), reference(inputs)["out"], 1e-4)
    wait_until(lambda: lookups(ring, 0, "miss") == 2, 10, "a run that prepares anew")
    assert prepare(ring.attention, inputs, ttl=600)[0].found == 1
    with pytest.raises(grpc.RpcError) as error:  # a quarter of the memory
        prepare(ring.attention, make_inputs(sq=1700, heads=2, dim=64))
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error.value)["ErrorInfo"].reason == "NOT_KEPT"
    (violation,) = details(error.value)["BadRequest"].field_violations
    assert violation.field == "prepare"
    assert "the worker keeps at most 1048576" in error.value.details()


def test_a_lost_worker_takes_the_part_with_it(make_ring):
    ring = make_ring(workers=2)
    inputs = make_inputs(**SHAPE)
    prepare(ring.attention, inputs, ttl=600, world_size=2)
    generation = ring.topology().generation
    ring.kill_worker(1)
    ring.start_worker(1)
    ring.wait_ready(2, after_generation=generation)
    assert prepare(ring.attention, inputs, ttl=600, world_size=2)[0].found == 0
    assert_close(run(ring.attention, inputs, world_size=2).array("out"), reference(inputs)["out"], 1e-4)
    wait_until(lambda: lookups(ring, 0, "hit") == lookups(ring, 1, "hit") == 1, 10, "hits on the new ring")


def test_what_cannot_be_prepared_is_refused_by_field(make_ring):
    ring = make_ring(workers=1)
    inputs = make_inputs(**SHAPE)

    def refusal(field, change, backward=False):
        header = header_for(inputs, backward=backward)
        header.prepare.SetInParent()
        change(header)
        method = ring.attention.Backward if backward else ring.attention.Forward
        with pytest.raises(grpc.RpcError) as error:
            list(method(requests(header, ()), timeout=10))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert [v.field for v in details(error.value)["BadRequest"].field_violations] == [field]

    refusal("retain", lambda header: header.retain.SetInParent())
    refusal("transport", lambda header: header.transport.SetInParent())
    refusal("inline_tensors", lambda header: header.inline_tensors.add(tensor=1, data=bytes(inputs["q"].nbytes)))
    refusal("prepare.ttl", lambda header: header.prepare.ttl.FromSeconds(601))
    refusal("shape.head_dim", lambda header: setattr(header.shape, "head_dim", 600))


def test_principals_share_no_part(make_ring, tmp_path):
    clients = tmp_path / "clients.json"
    write_clients(clients, [{"name": name, "token_sha256": [digest(name * 16)]} for name in ("alice", "bob")])
    audit = tmp_path / "audit.jsonl"
    ring = make_ring(workers=1, server_flags=[f"--clients_file={clients}", f"--audit_log={audit}"],
                     dial=lambda address: token_channel(address, "alice" * 16))
    stubs = {name: attention_pb2_grpc.AttentionServiceStub(token_channel(ring.address, name * 16))
             for name in ("alice", "bob")}
    inputs = make_inputs(**SHAPE)
    assert prepare(stubs["alice"], inputs, request_id="mine")[0].found == 0
    assert prepare(stubs["bob"], inputs)[0].found == 0
    assert prepare(stubs["alice"], inputs)[0].found == 1
    status = stubs["alice"].GetStatus(pb.GetStatusRequest(request_id="mine"))
    assert status.state == pb.REQUEST_STATE_SUCCEEDED and len(status.plan.members) == 1
    lines = lambda: [json.loads(line) for line in audit.read_text().splitlines()]
    wait_until(lambda: len([line for line in lines() if line["prepare"]]) == 3, 10, "the audit log")
    run(stubs["bob"], inputs)
    wait_until(lambda: [line["prepare"] for line in lines() if line["method"] == "Forward"][-1] is False, 10, "the run")


def test_cancelled_while_it_waits(make_ring):
    """An upload that does not come holds the memory."""
    ring = make_ring(workers=1, worker_flags=["--memory_limit=4MiB"])
    large = make_inputs(sq=1700, heads=2, dim=64)
    gate = threading.Event()

    def held():
        yield pb.ForwardRequest(header=header_for(large))
        gate.wait(60)

    idle = ring.attention.Forward(held(), timeout=60)
    assert next(idle).WhichOneof("message") == "accepted"
    with pytest.raises(grpc.RpcError) as error:
        prepare(ring.attention, make_inputs(sq=500, heads=2, dim=64), timeout=1)
    assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    idle.cancel()
    gate.set()
    assert prepare(ring.attention, make_inputs(sq=500, heads=2, dim=64))[0].found == 0
    wait_until(lambda: ring.worker_metric(0, "ringattn_worker_kept_operations") == 1, 10, "one part")
