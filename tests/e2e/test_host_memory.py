"""Host memory: tensors in memory that clients share with workers, with the same results as over the
relay, and the coordinator sees none of their bytes; which calls use it, and the reasons reported otherwise."""

import json
import re
import subprocess
import urllib.request

import grpc
import numpy as np
import pytest

from attention import chunks_of, error_of, make_inputs, reason_of, requests
from cluster import BIN, CLI, resident_bytes
from local_region import HostCall, Region, output_bytes
from local_ring import RING, await_unmapped, field_of, make_local_ring, region, relayed, ring
from stubs import attention_pb2 as pb
from timing import in_time, processor_seconds, run_connected, timed


# ------------------------------------------------------------------------ results


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", [pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG, pb.LAYOUT_STRIPED])
def test_results_equal_the_relays(ring, region, layout, world_size):
    inputs = make_inputs(batch=2, sq=203, sk=211, heads=4, kv_heads=2, dim=24, dim_v=40, seed=3)
    options = dict(causal=True, window=(90, -1), softcap=3.0, layout=layout, schedule=RING,
                   world_size=world_size)
    expected = relayed(ring, inputs, **options)
    call = HostCall(region, inputs, **options)
    result = call.run(ring.attention)
    assert result.accepted.transport == pb.TRANSPORT_HOST_MEMORY
    assert result.accepted.transport_reason
    assert not result.accepted.inputs
    assert result.summary.bytes_up == sum(inputs[n].nbytes for n in "qkv")
    for name, data in expected.items():
        assert call.bytes(name) == data, name
    gradients = relayed(ring, inputs, names=("dq", "dk", "dv"), backward=True, **options)
    backward = HostCall(region, inputs, backward=True, **options)
    backward.run(ring.attention)
    for name, data in gradients.items():
        assert backward.bytes(name) == data, name


@pytest.mark.parametrize("backward", [False, True])
def test_small_calls_need_one_message_each_way(ring, region, backward):
    def inline():
        text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics").read().decode()
        return int(re.search(r"^ringattn_inline_requests_total (\d+)$", text, re.M).group(1))

    names = ("dq", "dk", "dv") if backward else ("out", "lse")
    before = inline()
    for seed in range(3):
        inputs = make_inputs(batch=2, sq=70, sk=90, heads=4, kv_heads=2, dim=24, seed=seed)
        expected = relayed(ring, inputs, names=names, backward=backward, causal=True, world_size=1)
        call = HostCall(region, inputs, backward=backward, causal=True, world_size=1)
        result = call.run(ring.attention)
        for name, data in expected.items():
            assert call.bytes(name) == data, name
        rank, = result.summary.ranks
        copies = [rank.copy_in_time.ToTimedelta(), rank.copy_out_time.ToTimedelta()]
        assert all(time.total_seconds() > 0 for time in copies)
        assert rank.service_time.ToTimedelta() >= sum(copies, rank.compute_time.ToTimedelta())
        stages = {stage.stage: stage.time.ToTimedelta() for stage in result.summary.stages}
        assert [stages[pb.STAGE_UPLOAD], stages[pb.STAGE_DOWNLOAD]] == copies
    assert inline() == before + 3
    # These copies would keep the worker from other messages.
    large = make_inputs(sq=4096, heads=4, dim=64, seed=9)
    HostCall(region, large, causal=True, window=(64, 0), world_size=1).run(ring.attention)


def test_odd_offsets_and_rows_that_see_nothing(ring, region):
    inputs = make_inputs(sq=77, sk=13, heads=3, dim=5, dtype=np.float16, seed=9)
    expected = relayed(ring, inputs, causal=True, schedule=RING, world_size=4)
    region.used += 3
    call = HostCall(region, inputs, causal=True, schedule=RING, world_size=4)
    assert call.outputs["out"][0] % 2 == 1
    call.run(ring.attention)
    assert call.bytes("out") == expected["out"]
    assert call.bytes("lse") == expected["lse"]


def test_the_command_line_says_which_way(ring, tmp_path):
    files = {name: tmp_path / f"{name}.safetensors" for name in ("in", "relay", "host", "grads",
                                                                 "relay_grads")}
    subprocess.run([CLI, "generate", f"--output={files['in']}", "--seq_len=700", "--heads=4",
                    "--kv_heads=2", "--head_dim=32", "--dtype=bf16", "--seed=1", "--with_dout"],
                   check=True, capture_output=True)

    def call(command, output, *flags):
        done = subprocess.run([CLI, command, f"--server={ring.address}", f"--input={files['in']}",
                               f"--output={files[output]}", "--causal", "--schedule=ring", "--json",
                               *flags], capture_output=True, text=True, timeout=120)
        return json.loads(done.stdout)

    relay = call("forward", "relay")
    assert relay["transport"]["kind"] == "relay"
    assert relay["transport"]["reason"].startswith("the client has no region")
    host = call("forward", "host", "--transport=host_memory")
    assert host["transport"]["kind"] == "host_memory"
    assert host["bytes"]["host_memory"]["up"] > 0
    assert files["relay"].read_bytes() == files["host"].read_bytes()
    call("backward", "relay_grads", "--transport=relay")
    assert call("backward", "grads", "--transport=host_memory")["transport"]["kind"] == "host_memory"
    assert files["grads"].read_bytes() == files["relay_grads"].read_bytes()
    bench = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=512",
                            "--runs=1", "--transport=host_memory", "--json"],
                           capture_output=True, text=True, timeout=120)
    report = json.loads(bench.stdout)
    assert report["last_run"]["transport"]["kind"] == "host_memory", bench.stdout
    bound = report["payload_bound"]
    assert bound["kind"] == "memcpy" and bound["threads"] >= 2
    assert report["payload_bytes_per_second"]["bound"] == bound["bytes_per_second"]
    # The median of one run is that run.
    assert sum(report["stage_seconds"].values()) == pytest.approx(report["seconds"]["median"], abs=1e-6)


def test_files_are_staged_for_host_memory_alone(ring, tmp_path):
    """--transport=auto of one call: making memory for it takes longer than the relay."""
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=4096", "--heads=4",
                    "--head_dim=64", "--dtype=bf16", "--seed=3"], check=True, capture_output=True)

    def call(*flags, server=ring.address):
        out.unlink(missing_ok=True)
        done = subprocess.run([CLI, "forward", f"--server={server}", f"--input={source}",
                               f"--output={out}", "--window=64,0", "--json", *flags],
                              capture_output=True, text=True, timeout=120)
        reply = json.loads(done.stdout)
        return reply, out.read_bytes() if done.returncode == 0 else None

    staged, results = call("--transport=host_memory")
    assert staged["transport"]["kind"] == "host_memory"
    assert "; staged: " in staged["transport"]["reason"]
    moved = 4 * 4096 * 4 * 64 * 2 + 4096 * 4 * 4
    assert staged["transport"]["staged_bytes"] == moved
    seconds = staged["client_seconds"]
    assert 0 < seconds["accepted"] < seconds["finished"]
    relayed, expected = call("--transport=relay")
    assert relayed["transport"]["kind"] == "relay"
    assert relayed["transport"]["staged_bytes"] == 0
    assert results == expected
    reasons = {"": "not staged: no staging memory is ready yet",
               "--staging_limit=0": "not staged: staging is turned off",
               "--staging_limit=4MiB": "are more than the limit of staging memory (4194304)"}
    for flag, reason in reasons.items():
        relayed, results = call(*flag.split())
        assert relayed["transport"]["kind"] == "relay" and results == expected
        assert reason in relayed["transport"]["reason"]
    refused, _ = call("--staging_limit=4MiB", "--transport=host_memory")
    assert refused["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    assert "the limit of staging" in refused["error"]["message"]
    await_unmapped(ring)


def transport_after_some_calls(ring, tokens=4096):
    """Returns the transport of the last call of a client. The client allocates its region during the
    first calls, so this makes more calls if no region was ready for the last."""
    for runs in (8, 50, 300):
        done = subprocess.run([CLI, "bench", f"--server={ring.address}", f"--seq_len={tokens}",
                               "--heads=4", "--head_dim=64", "--window=16,0", f"--runs={runs}",
                               "--json"], capture_output=True, text=True, timeout=300)
        transport = json.loads(done.stdout)["last_run"]["transport"]
        if "no staging memory is ready yet" not in transport["reason"]:
            break
    return transport


@pytest.mark.parametrize("tokens", [4096, 64])
def test_the_load_generator_finds_memory_ready(ring, tokens):
    """Many calls of one client: from the third or so on, auto goes by host memory."""
    transport = transport_after_some_calls(ring, tokens)
    assert transport["kind"] == "host_memory" and transport["staged_bytes"] > 0, transport


def test_tensors_that_fit_the_header_are_not_staged(ring):
    transport = transport_after_some_calls(ring, tokens=32)
    assert transport["kind"] == "relay" and transport["staged_bytes"] == 0, transport


def test_where_no_worker_takes_memory_nothing_is_staged(make_ring):
    transport = transport_after_some_calls(make_ring(workers=1))
    assert transport["kind"] == "relay" and transport["staged_bytes"] == 0
    assert "not staged: no worker of this machine attached memory" in transport["reason"]


def test_what_a_forward_left_is_read_by_host_memory_too(make_local_ring, tmp_path):
    """q, k, v, out and lse stay with the workers; dout alone is copied out of the client's memory."""
    # A ring for this test alone: a residual that was read stays a minute, in case the answer is
    # lost.
    ring = make_local_ring(workers=3)
    source, out, grads = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "grads"))
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=900", "--heads=4",
                    "--head_dim=32", "--dtype=bf16", "--seed=2", "--with_dout"],
                   check=True, capture_output=True)

    def call(command, output, *flags):
        done = subprocess.run([CLI, command, f"--server={ring.address}", f"--input={source}",
                               f"--output={output}", "--causal", "--schedule=ring", "--json",
                               *flags], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    kept = call("forward", out, "--retain=1m", "--transport=host_memory")
    assert kept["transport"]["kind"] == "host_memory"
    handle = kept["residual"]["handle"]
    read = call("backward", grads, f"--residual={handle}", "--transport=host_memory")
    assert read["transport"]["kind"] == "host_memory" and read["residual"]["failure"] == ""
    assert read["bytes"]["host_memory"]["up"] == 900 * 4 * 32 * 2  # dout
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={grads}", f"--forward={out}",
                    "--causal"], check=True, capture_output=True)


def test_the_load_generator_by_host_memory(ring):
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=256", "--heads=2",
                           "--head_dim=32", "--transport=host_memory", "--concurrency_range=1:3:2",
                           "--measurement_interval=100", "--max_trials=3", "--backward", "--json"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in json.loads(done.stdout)["load"]["levels"]:
        assert level["succeeded"] > 0 and not level["failed"]
        assert level["transport"]["kind"] == "host_memory"
        assert level["transport"]["payload_bound"]["kind"] == "memcpy"


def test_no_tensor_byte_passes_the_coordinator(ring, region):
    import urllib.request

    def counted():
        text = urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics").read().decode()
        lines = [l for l in text.splitlines() if l.startswith("ringattn_tensor_bytes_total{")
                 or l.startswith("ringattn_bytes_total{")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = counted()
    call = HostCall(region, make_inputs(sq=300), schedule=RING, world_size=2)
    call.run(ring.attention)
    after = counted()
    grown = {name for name in after if after[name] > before[name]}
    assert grown and all("host_memory" in name for name in grown), grown


@timed
def test_the_coordinators_memory_and_processor_do_not_grow_with_the_tensors(ring, tmp_path):
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    # Causal against one key: next to nothing is computed.
    subprocess.run([CLI, "generate", f"--output={source}", "--seq_len=40000", "--seq_len_kv=1",
                    "--heads=8", "--head_dim=64", "--seed=1"], check=True, capture_output=True)

    def moved_by_calls(transport, times):
        """Bytes, and seconds of the coordinator's processor per GB."""
        used, moved = processor_seconds(ring.server.pid), 0
        for _ in range(times):
            done = run_connected([CLI, "forward", f"--server={ring.address}", f"--input={source}",
                                  f"--output={output}", "--causal", "--schedule=ring", "--json",
                                  f"--transport={transport}"], timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
            moved += sum(json.loads(done.stdout)["bytes"][transport].values())
        return moved, (processor_seconds(ring.server.pid) - used) / moved * 1e9

    moved_by_calls("host_memory", 1)
    memory = resident_bytes(ring.server.pid)
    moved, seconds = moved_by_calls("host_memory", 10)
    assert moved > 0.6e9
    assert resident_bytes(ring.server.pid) - memory < 8 << 20
    _, by_relay = moved_by_calls("relay", 5)
    print(f"{seconds:.3f} s of the coordinator's processor per GB, {by_relay:.3f} s by the relay")
    # The time of calls and heartbeats on any machine; half of the tensors would take more.
    in_time(seconds < 0.4 * by_relay, (seconds, by_relay))


@pytest.mark.parametrize("flags", [[], ["--options", "--seed=79"]])
def test_cases_of_the_sweep_match_the_oracle(ring, flags):
    done = subprocess.run([BIN / "tests/e2e/service_sweep", f"--server={ring.address}",
                           "--cases=80", "--max_world_size=4", "--transport=host_memory", *flags],
                          capture_output=True, text=True, timeout=600)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr
    assert "80 cases, 0 failed" in done.stdout


# ---------------------------------------------------------------- choice and refusal


def test_without_an_attached_region_the_relay_serves_with_the_reason(make_local_ring):
    ring = make_local_ring(workers=2)
    inputs = make_inputs()
    some = Region(ring, 1 << 20, attach=False)
    some.attach(only=["worker-0"])
    call = HostCall(some, inputs, required=False, schedule=RING, world_size=2)
    responses = ring.attention.Forward(requests(call.header, chunks_of(inputs, "qkv")), timeout=60)
    accepted = next(responses).accepted
    assert accepted.transport == pb.TRANSPORT_RELAY
    assert accepted.transport_reason == ("no host memory: worker-1 has not attached the region of q")
    assert len(accepted.inputs) == 3
    assert sum(len(r.chunk.data) for r in responses) == sum(
        output_bytes(inputs, n) for n in ("out", "lse"))
    call.header.transport.required = True
    error = error_of(call.start(ring.attention))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error) == "TRANSPORT_UNAVAILABLE"
    some.close()


def test_workers_without_local_memory_are_named(make_ring):
    ring = make_ring(workers=1)
    with pytest.raises(grpc.RpcError) as error:
        Region(ring, 4096)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(error.value) == "TRANSPORT_UNAVAILABLE"


def test_bad_places_are_refused_by_field(ring, region):
    inputs = make_inputs()

    def refused(change):
        call = HostCall(region, inputs, schedule=RING)
        change(call.header.transport)
        error = error_of(call.start(ring.attention))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert region.id not in error.details().encode()
        return field_of(error), reason_of(error)

    def set_place(index, **fields):
        def change(transport):
            for name, value in fields.items():
                setattr(transport.places[index], name, value)
        return change

    assert refused(set_place(0, region_id=b"x" * 16)) == (
        "transport.places[0].region_id", "REGION_UNKNOWN")
    assert refused(set_place(1, region_id=b"x"))[0] == "transport.places[1].region_id"
    assert refused(set_place(2, offset=region.size - 8))[0] == "transport.places[2].offset"
    assert refused(set_place(2, offset=2**64 - 1))[0] == "transport.places[2].offset"
    overlap = lambda t: setattr(t.places[3], "offset", t.places[0].offset + 4)
    assert refused(overlap)[0] == "transport.places[3].offset"


def test_chunks_beside_host_memory_are_refused(ring, region):
    # Long to compute: the chunks have come before the result could go.
    inputs = make_inputs(sq=24000, heads=1, dim=64)
    call = HostCall(region, inputs, schedule=RING, causal=True)
    stream = ring.attention.Forward(requests(call.header, chunks_of(inputs, "q")), timeout=60)
    error = error_of(stream)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(error) == "BAD_CHUNK"
