"""Residuals through real processes: what a Forward leaves with the workers for a Backward."""

import hashlib
import json
import pathlib
import queue
import signal
import subprocess
import threading
import time
import urllib.request

import grpc
import pytest

from attention import details, make_inputs
from cluster import CLI, open_descriptors, resident_bytes, wait_until
from residuals import Case, call, draw_case, handle_header, small_case
from stubs import attention_pb2 as pb, attention_pb2_grpc, cluster_pb2, tensor_pb2 as T

RING = dict(plan=dict(schedule=pb.SCHEDULE_RING, world_size=2))

SUPPORT = str(pathlib.Path(__file__).parent / "support")


def metrics(ring):
    text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=10).read()
    values = {}
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values


def fails(code, reason, make_call):
    with pytest.raises(grpc.RpcError) as error:
        make_call()
    assert error.value.code() == code, error.value.details()
    assert details(error.value)["ErrorInfo"].reason == reason
    return error.value


def reserved(ring):
    return [worker.reserved_bytes for worker in ring.topology().workers]


def assert_same_gradients(case, result, expected):
    for name in case.gradients:
        a, b = result.array(name), expected.array(name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"{name} differs"


@pytest.mark.parametrize("seed", range(24))
def test_gradients_are_those_of_the_stateless_backward(ring, seed):
    case = draw_case(seed)
    print(case.what)
    forward = case.forward(ring.attention)
    assert forward.summary.residual_handle and not forward.summary.residual_reason
    result = case.backward(ring.attention, forward.summary.residual_handle)
    # Nothing travels but these, to the byte.
    assert result.summary.bytes_up == case.bytes_beside()
    assert {d.tensor for d in result.accepted.inputs} <= {T.TENSOR_ID_DOUT, T.TENSOR_ID_DLSE}
    plan, own = forward.accepted.plan, result.accepted.plan
    assert (plan.layout, plan.schedule, list(plan.members)) == (own.layout, own.schedule,
                                                                list(own.members))
    # The stateless one over the same shards.
    case.plan["layout"] = plan.layout
    assert_same_gradients(case, result, case.stateless(ring.attention, forward))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plan", [
    dict(schedule=pb.SCHEDULE_ALL_GATHER), dict(schedule=pb.SCHEDULE_ALL_GATHER, heads_per_step=1),
    dict(schedule=pb.SCHEDULE_PASS_Q), dict(schedule=pb.SCHEDULE_REPLICATED_Q)])
def test_every_schedule_leaves_a_residual(ring, plan, seed):
    case = Case(make_inputs(batch=2, sq=90 + 20 * seed, sk=150, heads=4, kv_heads=2, seed=seed),
                plan=dict(world_size=4, layout=pb.LAYOUT_ZIGZAG, schedule=plan["schedule"]),
                causal=seed % 2 == 0)
    case.edit = lambda header: header.plan.MergeFrom(pb.PlanOptions(**plan))
    forward = case.forward(ring.attention)
    assert forward.summary.residual_handle and not forward.summary.residual_reason
    result = case.backward(ring.attention, forward.summary.residual_handle)
    assert result.accepted.plan.schedule == plan["schedule"]
    assert_same_gradients(case, result, case.stateless(ring.attention, forward))


def test_a_forward_computes_the_same_whether_it_keeps_or_not(ring):
    case = Case(draw_case(3).inputs, plan=dict(schedule=pb.SCHEDULE_RING, world_size=4),
                causal=True)
    kept, plain = case.forward(ring.attention), case.forward(ring.attention, ttl=None)
    assert kept.summary.residual_handle and not plain.summary.residual_handle
    assert not plain.summary.residual_reason
    for name in ("out", "lse"):
        assert kept.array(name).tobytes() == plain.array(name).tobytes()


def settled_metrics(ring):
    """Once what earlier tests did is counted."""
    def unchanged():
        first = metrics(ring)
        time.sleep(0.5)
        return first if metrics(ring)["ringattn_residual_reads_total"] == \
            first["ringattn_residual_reads_total"] else None

    return wait_until(unchanged, 20, "counters stand still")


def test_it_is_read_once_unless_it_is_kept(ring):
    case = small_case()
    handle = case.forward(ring.attention).summary.residual_handle
    before = settled_metrics(ring)
    first = case.backward(ring.attention, handle, keep_residual=True)
    second = case.backward(ring.attention, handle, request_id="second")
    assert_same_gradients(case, first, second)
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_CONSUMED",
          lambda: case.backward(ring.attention, handle, request_id="third"))
    # A client that lost the answer repeats its request, and the service computes it again.
    replay = case.backward(ring.attention, handle, request_id="second")
    assert_same_gradients(case, first, replay)
    ring.attention.DeleteResidual(pb.DeleteResidualRequest(residual_handle=handle), timeout=10)
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_CONSUMED",
          lambda: case.backward(ring.attention, handle, request_id="second"))
    key = "ringattn_residual_reads_total"
    wait_until(lambda: metrics(ring)[key] == before[key] + 3, 10, "three reads counted")


def test_what_a_header_says_must_be_the_forwards(ring):
    case = Case(draw_case(5).inputs, plan=dict(schedule=pb.SCHEDULE_RING, world_size=2,
                                               layout=pb.LAYOUT_CONTIGUOUS), causal=True)
    forward = case.forward(ring.attention)
    handle = forward.summary.residual_handle
    header = case.stateless_header(forward)
    header.has_forward_result = False
    header.residual_handle, header.keep_residual = handle, True
    call(ring.attention, header, case.inputs, ["dout"])  # all of it, and the same

    def changed(edit):
        other = pb.BackwardHeader()
        other.CopyFrom(header)
        edit(other)
        return other

    for field, edit in {
            "shape.head_dim": lambda h: setattr(h.shape, "head_dim", 7),
            "dtype": lambda h: setattr(h, "dtype", T.DATA_TYPE_BFLOAT16),
            "options.causal": lambda h: setattr(h.options, "causal", False),
            "options.softcap": lambda h: setattr(h.options, "softcap", 3.0),
            "plan.layout": lambda h: setattr(h.plan, "layout", pb.LAYOUT_ZIGZAG),
            "plan.world_size": lambda h: setattr(h.plan, "world_size", 3),
            "reply.output_dtype": lambda h: setattr(h.reply, "output_dtype",
                                                    T.DATA_TYPE_BFLOAT16),
            "has_forward_result": lambda h: setattr(h, "has_forward_result", True),
    }.items():
        with pytest.raises(grpc.RpcError) as error:
            call(ring.attention, changed(edit), case.inputs, ["dout"])
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT, field
        violations = details(error.value)["BadRequest"].field_violations
        assert field in {v.field for v in violations}, field
    # Nothing of that has used it up; and only what is listed may be sent.
    fails(grpc.StatusCode.INVALID_ARGUMENT, "BAD_CHUNK",
          lambda: call(ring.attention, header, case.inputs, ["q"]))
    call(ring.attention, handle_header(handle), case.inputs, ["dout"])


def test_one_that_nobody_knows(ring):
    case = small_case()
    for handle in ("0" * 32, "nonsense", "\U0001f600" * 20):
        error = fails(grpc.StatusCode.NOT_FOUND, "RESIDUAL_NOT_FOUND",
                      lambda: case.backward(ring.attention, handle))
        assert handle not in error.details()
        fails(grpc.StatusCode.NOT_FOUND, "RESIDUAL_NOT_FOUND",
              lambda: ring.attention.DeleteResidual(
                  pb.DeleteResidualRequest(residual_handle=handle), timeout=10))


def test_time_to_live(ring):
    case = small_case()
    short = case.forward(ring.attention, ttl=0.3).summary.residual_handle
    renewed = case.forward(ring.attention, ttl=3).summary.residual_handle
    request = pb.RenewResidualsRequest(residual_handles=[renewed, "0" * 32])
    request.ttl.FromSeconds(60)
    answer = ring.attention.RenewResiduals(request, timeout=10)
    assert [status.reason for status in answer.residuals] == ["", "RESIDUAL_NOT_FOUND"]
    time.sleep(3.5)
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_EXPIRED",
          lambda: case.backward(ring.attention, short))
    case.backward(ring.attention, renewed)
    for ttl in (-1, 0, 1e9):
        with pytest.raises(grpc.RpcError) as error:
            case.forward(ring.attention, ttl=ttl)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        violations = details(error.value)["BadRequest"].field_violations
        assert [v.field for v in violations] == ["retain.ttl"]


def test_limits_are_told(ring):
    limits = ring.cluster.GetServerInfo(cluster_pb2.GetServerInfoRequest(), timeout=10).limits
    assert limits.max_residual_bytes == 256 << 30
    assert limits.default_residual_ttl.seconds == 600
    assert limits.max_residual_ttl.seconds == 6 * 3600


def test_a_lost_worker_takes_it_along_and_other_rings_leave_it(make_ring):
    ring = make_ring(workers=2)
    case = Case(small_case(sq=96).inputs, causal=True, **RING)
    # For longer than rings take to form.
    forward = case.forward(ring.attention, ttl=300)
    kept = case.forward(ring.attention, ttl=300).summary.residual_handle
    # A third worker makes the ring form again: the members that hold the residual are still
    # there.
    generation = ring.topology().generation
    ring.start_worker(2)
    ring.wait_ready(3, after_generation=generation)
    result = case.backward(ring.attention, kept)
    assert_same_gradients(case, result, case.stateless(ring.attention, forward))
    handle = forward.summary.residual_handle
    generation = ring.topology().generation
    ring.kill_worker(0)
    ring.wait_ready(2, after_generation=generation)
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_LOST",
          lambda: case.backward(ring.attention, handle))
    # The same request with its tensors succeeds on the remaining members and leaves nothing.
    assert_same_gradients(case, case.stateless(ring.attention, forward), result)
    wait_until(lambda: not any(reserved(ring)), 10, "no memory held")


def test_a_full_quota_costs_the_handle_and_not_the_forward(make_ring):
    case = Case(small_case(sq=256).inputs, causal=True, **RING)
    # q, k, v, out, lse of one, and a little.
    one = 4 * case.inputs["q"].nbytes + 4 * 2 * 256
    ring = make_ring(workers=2, server_flags=[f"--max_residual_bytes={one * 3 // 2}"])
    first = case.forward(ring.attention)
    wait_until(lambda: sum(reserved(ring)) == one, 10, "only the residual is held")
    second = case.forward(ring.attention)
    assert not second.summary.residual_handle
    assert f"residuals take {one} of max_residual_bytes" in second.summary.residual_reason
    assert second.array("out").tobytes() == first.array("out").tobytes()
    # A used residual is kept for a replay only until another one needs its memory.
    case.backward(ring.attention, first.summary.residual_handle)
    wait_until(lambda: sum(reserved(ring)) == one, 10, "only the residual is held")
    third = case.forward(ring.attention)
    assert third.summary.residual_handle
    ring.attention.DeleteResidual(
        pb.DeleteResidualRequest(residual_handle=third.summary.residual_handle), timeout=10)
    wait_until(lambda: not any(reserved(ring)), 10, "no memory held")
    wait_until(lambda: metrics(ring)["ringattn_residuals_kept_total"] == 2, 10, "two kept")
    assert metrics(ring)["ringattn_residuals_refused_total"] == 1


def test_who_needs_the_memory_gets_it(make_ring):
    case = Case(small_case(sq=512, heads=4, dim=64).inputs, causal=True, **RING)
    ring = make_ring(workers=2, worker_flags=["--memory_limit=8388608"])
    handles = [case.forward(ring.attention).summary.residual_handle for _ in range(12)]
    assert all(handles)
    # The newest are there, the oldest made room.
    case.backward(ring.attention, handles[-1])
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_LOST",
          lambda: case.backward(ring.attention, handles[0]))
    key = 'ringattn_residuals_ended_total{reason="evicted"}'
    wait_until(lambda: metrics(ring)[key] > 0, 10, "evictions counted")


def test_forwards_without_backwards_leave_nothing(make_ring):
    ring = make_ring(workers=2)
    case = Case(small_case(sq=32).inputs, causal=True, **RING)

    def many(count):
        headers = [case.forward(ring.attention, ttl=1.0) for _ in range(count)]
        return [h.summary.residual_handle for h in headers]

    many(50)
    wait_until(lambda: not any(reserved(ring)), 15, "the first are gone")
    pids = [ring.server.pid, *(worker.pid for worker in ring.workers.values())]
    before = [(resident_bytes(pid), open_descriptors(pid)) for pid in pids]
    threads = [threading.Thread(target=many, args=(125,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: not any(reserved(ring)), 15, "residual bytes back to 0")
    wait_until(lambda: metrics(ring)["ringattn_residuals"] == 0, 10, "none left")
    values = metrics(ring)
    assert values["ringattn_residual_bytes"] == 0
    assert values["ringattn_residuals_kept_total"] == 550
    assert values['ringattn_residuals_ended_total{reason="expired"}'] == 550
    for pid, (memory, descriptors) in zip(pids, before):
        assert resident_bytes(pid) - memory < 48 << 20
        assert open_descriptors(pid) - descriptors < 16


def cli(*arguments, expect=0):
    ran = subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == expect, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_the_command_line_and_its_fallback(make_ring, tmp_path):
    ring = make_ring(workers=2)
    server = f"--server={ring.address}"
    given, out, grad = (tmp_path / name for name in ("in.st", "out.st", "grad.st"))
    cli("generate", f"--output={given}", "--batch=2", "--seq_len=300", "--heads=4",
        "--kv_heads=2", "--head_dim=32", "--dtype=bf16", "--seed=7", "--with_dout")
    ring_flags = ["--causal", "--schedule=ring", "--world_size=2"]

    def forward(*flags):
        return json.loads(cli("forward", server, f"--input={given}", f"--output={out}",
                              *ring_flags, "--json", *flags))

    def backward(*flags):
        return json.loads(cli("backward", server, f"--input={given}", f"--output={grad}",
                              "--causal", "--json", *flags))

    assert forward()["residual"] == {"handle": "", "reason": "", "failure": ""}
    handle = forward("--retain=1m")["residual"]["handle"]
    assert len(handle) == 32
    report = backward(f"--residual={handle}", "--keep_residual")
    assert report["residual"]["failure"] == "" and report["attempts"] == 1
    assert report["bytes"]["relay"]["up"] == 2 * 300 * 4 * 32 * 2  # dout
    cli("verify", f"--input={given}", f"--output={grad}", f"--forward={out}", "--causal")
    text = cli("forward", server, f"--input={given}", f"--output={out}", *ring_flags,
               "--retain=1m")
    assert "kept   --residual=" in text

    # Used up, then lost with its worker: the file's tensors do it, and the report says so.
    assert backward(f"--residual={handle}")["residual"]["failure"] == ""
    report = backward(f"--residual={handle}")
    assert report["residual"]["failure"] == "RESIDUAL_CONSUMED" and report["attempts"] == 2
    handle = forward("--retain=1m")["residual"]["handle"]
    generation = ring.topology().generation
    ring.kill_worker(1)
    ring.start_worker(1)
    ring.wait_ready(2, after_generation=generation)
    report = backward(f"--residual={handle}")
    assert report["residual"]["failure"] == "RESIDUAL_LOST"
    assert report["bytes"]["relay"]["up"] == 2 * 300 * 32 * 2 * (4 + 2 + 2 + 4)
    cli("verify", f"--input={given}", f"--output={grad}", f"--forward={out}", "--causal")

    # Refused before anything is sent.
    for flags, expected in [(["--retain=never"], "--retain=never"),
                            (["--retain=30h"], "retain.ttl")]:
        code = 2 if "never" in flags[0] else 3
        assert expected in cli("forward", server, f"--input={given}", f"--output={out}",
                               *ring_flags, *flags, expect=code)
    assert "--residual" in cli("backward", server, f"--input={given}", f"--output={grad}",
                               "--keep_residual", expect=2)


def test_clients_have_their_own(make_ring, tmp_path):
    """Known clients: a handle is its owner's alone, and each has a quota."""
    tokens = {"alice": "a" * 40, "bob": "b" * 40}
    quota = {"alice": {"max_residual_bytes": 40_000}, "bob": {}}
    clients = tmp_path / "clients.json"
    clients.write_text(json.dumps({"clients": [
        {"name": name, "token_sha256": [hashlib.sha256(token.encode()).hexdigest()],
         **quota[name]} for name, token in tokens.items()]}))
    clients.chmod(0o600)

    def dial(address, token=tokens["alice"]):
        call = grpc.access_token_call_credentials(token)
        return grpc.secure_channel(address, grpc.composite_channel_credentials(
            grpc.local_channel_credentials(), call))

    ring = make_ring(workers=2, dial=dial, server_flags=[f"--clients_file={clients}"])
    alice = ring.attention
    bob = attention_pb2_grpc.AttentionServiceStub(dial(ring.address, tokens["bob"]))
    case = small_case(sq=64)  # 33 KiB of q, k, v, out and lse
    handle = case.forward(alice).summary.residual_handle
    assert handle
    second = case.forward(alice)
    assert "this client's residuals take" in second.summary.residual_reason
    fails(grpc.StatusCode.NOT_FOUND, "RESIDUAL_NOT_FOUND", lambda: case.backward(bob, handle))
    fails(grpc.StatusCode.NOT_FOUND, "RESIDUAL_NOT_FOUND",
          lambda: bob.DeleteResidual(pb.DeleteResidualRequest(residual_handle=handle), timeout=10))
    renewed = bob.RenewResiduals(pb.RenewResidualsRequest(residual_handles=[handle]), timeout=10)
    assert renewed.residuals[0].reason == "RESIDUAL_NOT_FOUND"
    assert case.forward(bob).summary.residual_handle  # his own quota
    case.backward(alice, handle)
    # Another principal cannot see it after it is gone either.
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_CONSUMED",
          lambda: case.backward(alice, handle))
    fails(grpc.StatusCode.NOT_FOUND, "RESIDUAL_NOT_FOUND", lambda: case.backward(bob, handle))


# ------------------------------------------------------------------- HoldResiduals


class Hold:
    """A HoldResiduals stream by hand."""

    def __init__(self, stub, **metadata):
        self.requests = queue.SimpleQueue()
        self.call = stub.HoldResiduals(iter(self.requests.get, None), timeout=60, **metadata)

    def name(self, *handles, released=()):
        """The reasons of those that are gone."""
        self.requests.put(pb.HoldResidualsRequest(residual_handles=handles,
                                                  released_handles=released))
        return [status.reason for status in next(self.call).residuals]

    def close(self):
        self.requests.put(None)
        with pytest.raises(StopIteration):
            next(self.call)


@pytest.fixture(scope="module")
def holding_ring(tmp_path_factory):
    """Holds last for 1.5 s, and outlive their stream by 1 s."""
    from cluster import Cluster
    cluster = Cluster(tmp_path_factory.mktemp("holding"), workers=2, server_flags=[
        "--residual_hold_ttl=1500ms", "--residual_hold_grace=1s"])
    yield cluster
    print(cluster.tail())
    cluster.close()


def kept(ring):
    return metrics(ring)["ringattn_residuals"]


def test_what_is_held_outlives_its_time_and_its_stream_by_a_moment(holding_ring):
    ring, case = holding_ring, small_case()
    info = ring.cluster.GetServerInfo(cluster_pb2.GetServerInfoRequest()).limits
    assert (info.residual_hold_ttl.ToMilliseconds(), info.residual_hold_grace.seconds) == (1500, 1)
    held, short = (case.forward(ring.attention, ttl=3) for _ in range(2))
    released = case.forward(ring.attention, ttl=3)
    hold = Hold(ring.attention)
    names = [r.summary.residual_handle for r in (held, short, released)]
    assert hold.name(names[0], names[2], "0" * 32) == ["", "", "RESIDUAL_NOT_FOUND"]
    wait_until(lambda: metrics(ring)["ringattn_residual_holds"] == 1, 5, "the stream is counted")
    assert hold.name(released=[names[2]]) == []
    time.sleep(5)  # longer than its ttl and than one renewal
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_EXPIRED",
          lambda: case.backward(ring.attention, names[1]))
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_EXPIRED",
          lambda: case.backward(ring.attention, names[2]))
    assert kept(ring) == 1
    result = case.backward(ring.attention, names[0], keep_residual=True)
    assert_same_gradients(case, result, case.stateless(ring.attention, held))
    hold.close()
    assert kept(ring) == 1  # the grace
    wait_until(lambda: kept(ring) == 0, 5, "it goes with its stream")
    wait_until(lambda: metrics(ring)["ringattn_residual_holds"] == 0, 5, "no stream")
    fails(grpc.StatusCode.FAILED_PRECONDITION, "RESIDUAL_EXPIRED",
          lambda: case.backward(ring.attention, names[0]))


def test_a_stream_that_follows_in_time_holds_on(holding_ring):
    """A broken connection costs nothing, no matter which end the server sees first."""
    ring, case = holding_ring, small_case()
    handle = case.forward(ring.attention).summary.residual_handle
    first = Hold(ring.attention)
    assert first.name(handle) == [""]
    first.call.cancel()
    second = Hold(ring.attention)
    assert second.name(handle) == [""]
    third = Hold(ring.attention)
    assert third.name(handle) == [""]
    second.close()  # the server sees this after the third has begun
    time.sleep(3)
    case.backward(ring.attention, handle, keep_residual=True)
    # One that was deleted is gone at once, where one that was read stays for a replay.
    ring.attention.DeleteResidual(pb.DeleteResidualRequest(residual_handle=handle))
    assert third.name(handle) == ["RESIDUAL_CONSUMED"]
    wait_until(lambda: kept(ring) == 0, 5, "it is deleted")
    third.close()


def test_a_killed_client_leaves_nothing(holding_ring, tmp_path):
    """Without a holder its residuals would last for half a minute."""
    ring, case = holding_ring, small_case()
    handle = case.forward(ring.attention, ttl=30).summary.residual_handle
    program = tmp_path / "holder.py"
    program.write_text(
        "import sys, time, grpc\n"
        f"sys.path.insert(0, {SUPPORT!r})\n"
        "from stubs import attention_pb2 as pb, attention_pb2_grpc\n"
        f"stub = attention_pb2_grpc.AttentionServiceStub(grpc.insecure_channel({ring.address!r}))\n"
        "def requests():\n"
        f"    yield pb.HoldResidualsRequest(residual_handles=[{handle!r}])\n"
        "    time.sleep(60)\n"
        "call = stub.HoldResiduals(requests())\n"  # which ends with its last reference
        "print(next(call).residuals[0].reason or 'held', flush=True)\n"
        "time.sleep(60)\n")
    holder = subprocess.Popen(["/usr/bin/python3", str(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        time.sleep(2)
        assert kept(ring) == 1
        before = metrics(ring)['ringattn_residuals_ended_total{reason="expired"}']
        holder.kill()
        holder.wait()
        wait_until(lambda: kept(ring) == 0, 5, "it goes with its client")
        assert metrics(ring)['ringattn_residuals_ended_total{reason="expired"}'] == before + 1
    finally:
        holder.kill()
        holder.stdout.close()


def test_holds_that_make_no_sense(holding_ring):
    ring = holding_ring
    hold = Hold(ring.attention)
    with pytest.raises(grpc.RpcError) as error:
        hold.name(*["x"] * 1000, released=["y"] * 25)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 1024" in error.value.details()
    assert details(error.value)["BadRequest"].field_violations[0].field == "residual_handles"
    streams = [Hold(ring.attention) for _ in range(16)]
    for one in streams:
        assert one.name() == []  # a sign of life
    with pytest.raises(grpc.RpcError) as error:
        Hold(ring.attention).name()
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error.value)["ErrorInfo"].reason == "TOO_MANY_HOLDS"
    for one in streams:
        one.close()
    wait_until(lambda: metrics(ring)["ringattn_residual_holds"] == 0, 5, "no stream")


def test_holds_end_with_the_server(make_ring):
    ring = make_ring(workers=1)
    hold = Hold(ring.attention)
    assert hold.name() == []
    ring.server.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as error:
        next(hold.call)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "is shutting down" in error.value.details()
    assert ring.server.wait(timeout=10) == 0
