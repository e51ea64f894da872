"""Direct streams: tensors pass between client and workers, with the same results as over the relay,
and the coordinator sees none of their bytes; which calls use them, and the reasons reported
otherwise."""

import json
import socket
import subprocess
import time

import pytest

from attention import error_of, make_inputs, reason_of, run
from cluster import BIN, CLI, resident_bytes
from direct_call import DirectCall, cut, tensor_id
from direct_ring import (CODE, LISTEN, RING, await_free, call, generate, make_direct_ring, metrics,
                         ring)
from stubs import attention_pb2 as pb
from timing import in_time, processor_seconds, timed


# ------------------------------------------------------------------------ results


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", [pb.LAYOUT_CONTIGUOUS, pb.LAYOUT_ZIGZAG, pb.LAYOUT_STRIPED])
def test_results_equal_the_relays(ring, layout, world_size):
    inputs = make_inputs(batch=2, sq=203, sk=211, heads=4, kv_heads=2, dim=24, dim_v=40, seed=3)
    options = dict(causal=True, window=(90, -1), softcap=3.0, layout=layout, schedule=RING,
                   world_size=world_size)
    for backward, names in ((False, ("out", "lse")), (True, ("dq", "dk", "dv"))):
        expected = run(ring.attention, inputs, backward=backward, **options)
        for parts in (1, 3):
            direct = DirectCall(ring, inputs, backward=backward, **options)
            arrays = direct.run(parts)
            assert direct.accepted.transport == pb.TRANSPORT_DIRECT
            assert direct.accepted.transport_reason and not direct.accepted.inputs
            assert len({t.token for t in direct.tickets}) == len(direct.tickets) == world_size
            assert direct.result.summary.bytes_up == sum(inputs[n].nbytes for n in direct.names)
            for name in names:
                assert arrays[name].tobytes() == expected.array(name).tobytes(), (name, parts)


def test_checksums_both_ways(ring):
    inputs = make_inputs(sq=900, heads=4, dim=64)
    direct = DirectCall(ring, inputs, crc=True, schedule=RING, world_size=1).accept()
    stream = direct.open(0, with_crc32c=True)
    data = cut(inputs["q"], direct.tickets[0], "q")
    stream.chunk("q", 0, data, crc32c=1)
    assert stream.error().code() in (CODE.INVALID_ARGUMENT, CODE.ABORTED)
    error = error_of(direct.stream)
    assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK"
    assert "crc32c" in error.details()
    direct = DirectCall(ring, inputs, crc=True, schedule=RING, world_size=1).accept()
    stream = direct.open(0, with_crc32c=True)
    direct.send(stream, 0)
    chunks = [r.chunk for r in stream.call if r.WhichOneof("message") == "chunk"]
    assert chunks and all(chunk.HasField("crc32c") for chunk in chunks)
    list(direct.stream)


def test_the_command_line_says_which_way(ring, tmp_path):
    source = tmp_path / "in.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--kv_heads=2", "--head_dim=64", "--dtype=bf16")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("relay", "auto", "direct")}
    for command in ("forward", "backward"):
        relay = call(ring, command, source, files["relay"], "--transport=relay")
        assert relay["transport"] == {"kind": "relay", "staged_bytes": 0,
                                      "reason": "the caller chose the relay"}
        auto = call(ring, command, source, files["auto"])
        assert auto["transport"]["kind"] == "direct"
        assert auto["bytes"]["direct"]["up"] > 0
        direct = call(ring, command, source, files["direct"], "--transport=direct",
                      "--channels_per_worker=4")
        assert direct["transport"] == {
            "kind": "direct", "staged_bytes": 0,
            "reason": "direct stream: all members have a client data address"}
        assert direct["client_seconds"]["first_output"] > 0
        assert files["relay"].read_bytes() == files["direct"].read_bytes()
        assert files["relay"].read_bytes() == files["auto"].read_bytes()
    call(ring, "forward", source, files["auto"])
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={files['auto']}", "--causal"],
                   check=True, capture_output=True)


def test_tiny_tensors_take_the_coordinator_with_the_reason(ring, tmp_path):
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=300", "--heads=4", "--head_dim=32")
    auto = call(ring, "forward", source, output)
    assert auto["transport"]["kind"] == "relay"
    assert "no direct stream: the tensors have less than 1 MiB" in auto["transport"]["reason"]


def test_what_a_forward_left_is_read_by_direct_streams_too(make_direct_ring, tmp_path):
    ring = make_direct_ring(workers=3)
    source, out, grads = (tmp_path / f"{name}.safetensors" for name in ("in", "out", "grads"))
    generate(source, "--seq_len=2900", "--heads=4", "--head_dim=64", "--dtype=bf16")
    kept = call(ring, "forward", source, out, "--retain=1m", "--transport=direct")
    handle = kept["residual"]["handle"]
    read = call(ring, "backward", source, grads, f"--residual={handle}", "--transport=direct")
    assert read["transport"]["kind"] == "direct" and read["residual"]["failure"] == ""
    assert read["bytes"]["direct"]["up"] == 2900 * 4 * 64 * 2  # dout
    subprocess.run([CLI, "verify", f"--input={source}", f"--output={grads}", f"--forward={out}",
                    "--causal"], check=True, capture_output=True)


def test_a_measurement_is_beside_as_many_connections(ring):
    def bench(*flags):
        done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=256", "--heads=2",
                               "--head_dim=32", "--schedule=ring", "--world_size=2", "--runs=1", *flags],
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    report = json.loads(bench("--transport=direct", "--channels_per_worker=3", "--json"))
    assert report["last_run"]["transport"]["kind"] == "direct"
    assert report["payload_bound"]["kind"] == "tcp" and report["payload_bound"]["connections"] == 6
    assert report["upload_bytes_per_second"]["bound"] == report["payload_bound"]["bytes_per_second"]
    relay = json.loads(bench("--transport=relay", "--json"))
    assert relay["payload_bound"] == {"kind": "tcp", "connections": 1,
                                      "bytes_per_second": relay["loopback_bytes_per_second"]}
    text = bench("--transport=direct", "--channels_per_worker=3")
    assert "by direct: " in text and "connections: 6" in text


def test_the_load_generator_by_direct_streams(ring):
    done = subprocess.run([CLI, "bench", f"--server={ring.address}", "--seq_len=256", "--heads=2",
                           "--head_dim=32", "--transport=direct", "--concurrency_range=1:3:2",
                           "--measurement_interval=100", "--max_trials=3", "--backward", "--json"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in json.loads(done.stdout)["load"]["levels"]:
        assert level["succeeded"] > 0 and not level["failed"]


@pytest.mark.parametrize("flags", [[], ["--options", "--seed=79"]])
def test_cases_of_the_sweep_match_the_oracle(ring, flags):
    done = subprocess.run([BIN / "tests/e2e/service_sweep", f"--server={ring.address}",
                           "--cases=80", "--max_world_size=4", "--transport=direct", *flags],
                          capture_output=True, text=True, timeout=600)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stderr
    assert "80 cases, 0 failed" in done.stdout


@timed
def test_no_tensor_byte_passes_the_coordinator(ring, tmp_path):
    """Its memory is flat and its processor all but idle; workers count the bytes."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    # Causal against one key: next to nothing is computed.
    generate(source, "--seq_len=40000", "--seq_len_kv=1", "--heads=8", "--head_dim=64")
    call(ring, "forward", source, output, "--transport=direct")
    counted = lambda: {n: v for n, v in metrics(ring.ports["metrics"]).items()
                       if n.startswith("ringattn_bytes_total{")}

    def moved_by_calls(transport, kind, times):
        """Bytes, and seconds of the coordinator's processor per GB."""
        used, moved = processor_seconds(ring.server.pid), 0
        for _ in range(times):
            report = call(ring, "forward", source, output, f"--transport={transport}")
            moved += sum(report["bytes"][kind].values())
        return moved, (processor_seconds(ring.server.pid) - used) / moved * 1e9

    before, memory = counted(), resident_bytes(ring.server.pid)
    moved, seconds = moved_by_calls("direct", "direct", 10)
    after = counted()
    grown = {name for name in after if after[name] > before.get(name, 0)}
    assert grown and all("direct" in name for name in grown), grown
    assert sum(after[n] - before[n] for n in grown) == moved > 0.6e9
    assert resident_bytes(ring.server.pid) - memory < 8 << 20
    sums = [metrics(ring.worker_ports(i)["metrics"]) for i in range(4)]
    for direction in ("up", "down"):
        name = f'ringattn_bytes_total{{direction="{direction}",transport="direct"}}'
        assert sum(s[name] for s in sums) > 0.3e9
    _, by_relay = moved_by_calls("relay", "relay", 5)
    print(f"{seconds:.3f} s of the coordinator's processor per GB, {by_relay:.3f} s by the relay")
    # The time of calls and heartbeats on any machine; half of the tensors would take more.
    in_time(seconds < 0.4 * by_relay, (seconds, by_relay))


# ---------------------------------------------------------------- choice and refusal


def listener_without_an_answer():
    """Takes connections, as a firewall that lets SYNs through does, and says nothing."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen(16)
    return held


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_worker_out_of_reach_is_relayed_with_the_reason(make_ring, tmp_path, kind):
    held = listener_without_an_answer()
    address = "127.0.0.1:%d" % held.getsockname()[1]
    if kind == "closed":
        held.close()
    ring = make_ring(workers=0)
    ring.start_worker(0, LISTEN)
    ring.start_worker(1, LISTEN + [f"--client_data_address={address}"])
    ring.wait_ready(2)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    begin = time.monotonic()
    report = call(ring, "forward", source, output)
    assert time.monotonic() - begin < 10
    assert report["transport"]["kind"] == "relay"
    reason = report["transport"]["reason"]
    assert "no direct stream: " in reason and f"worker-1 at {address}" in reason
    relay = tmp_path / "relay.safetensors"
    call(ring, "forward", source, relay, "--transport=relay")
    assert output.read_bytes() == relay.read_bytes()
    failed = call(ring, "forward", source, output, "--transport=direct", check=False)
    assert failed["error"]["code"] == "FAILED_PRECONDITION"
    assert failed["error"]["reason"] == "TRANSPORT_UNAVAILABLE"
    assert address in failed["error"]["message"]
    await_free(ring)
    held.close()


def test_workers_without_the_port_are_named(make_ring, tmp_path):
    ring = make_ring(workers=0)
    ring.start_worker(0, LISTEN)
    ring.start_worker(1)
    ring.wait_ready(2)
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    report = call(ring, "forward", source, output)
    assert report["transport"]["reason"].startswith(
        "no direct stream: worker-1 has no client data address")
    failed = call(ring, "forward", source, output, "--transport=direct", check=False)
    assert failed["error"]["reason"] == "TRANSPORT_UNAVAILABLE"


def test_inline_tensors_take_the_coordinator(ring):
    inputs = make_inputs(sq=8)
    direct = DirectCall(ring, inputs, required=False, schedule=RING)
    direct.stream.cancel()
    for name in direct.names:
        direct.header.inline_tensors.add(tensor=tensor_id(name), data=inputs[name].tobytes())
    accepted = next(ring.attention.Forward(iter([pb.ForwardRequest(header=direct.header)]),
                                           timeout=30)).accepted
    assert accepted.transport == pb.TRANSPORT_RELAY
    assert accepted.transport_reason == "no direct stream: some of its tensors are inline"


def test_chunks_on_the_coordinators_stream_are_refused(ring):
    inputs = make_inputs(sq=3000, heads=4, dim=64)
    direct = DirectCall(ring, inputs, schedule=RING)
    direct.stream.cancel()
    from attention import chunks_of, requests
    error = error_of(ring.attention.Forward(requests(direct.header, chunks_of(inputs, "q")),
                                            timeout=60))
    assert error.code() == CODE.INVALID_ARGUMENT and reason_of(error) == "BAD_CHUNK"


@pytest.mark.parametrize("flags, words", [
    (["--client_data_listen=0.0.0.0:0"], "set --client_data_address too"),
    (["--client_data_address=a:1"], "has no effect without --client_data_listen"),
    (LISTEN + ["--client_tls_cert=x"], "must be given together"),
    (["--client_data_listen=10.1.2.3:0"], "--client_tls_cert and --client_tls_key"),
])
def test_flags_that_do_not_fit_are_refused(tmp_path, flags, words):
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    done = subprocess.run([BIN / "worker/ringattn-worker", f"--secret_file={secret}",
                           "--check_flags", *flags], capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr + done.stdout


def test_over_tls_with_and_without_proofs(make_ring, tmp_path):
    """As at the public port: by the client's authorities; who shows no certificate where one is asked
    for is relayed, and so is who meets plain text."""
    from certificates import Authority, client_tls, server_tls, tls_channel
    authority = Authority(tmp_path, "ours")
    served, trainer = authority.issue("server"), authority.issue("trainer")
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    tls = [f"--client_tls_cert={served[0]}", f"--client_tls_key={served[1]}"]
    for flags, mine, kind in (
            (tls, None, "direct"),
            (tls + [f"--client_tls_ca={authority.certificate}"], trainer, "direct"),
            (tls + [f"--client_tls_ca={authority.certificate}"], None, "relay"),
            ([], None, "relay")):
        ring = make_ring(workers=2, worker_flags=LISTEN + flags, server_flags=server_tls(*served),
                         dial=lambda address: tls_channel(address, authority.certificate))
        report = call(ring, "forward", source, output, *client_tls(authority.certificate, mine))
        assert report["transport"]["kind"] == kind, report["transport"]
        if kind == "relay":
            assert "no direct stream: worker-" in report["transport"]["reason"]
        ring.close()


def test_the_launcher_opens_the_port_for_this_machine(tmp_path):
    state = tmp_path / "state"
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    generate(source, "--seq_len=3000", "--heads=4", "--head_dim=64")
    for flags, kind in (([], "direct"), (["--direct=off"], "relay")):
        subprocess.run([CLI, "up", "--workers=2", "--device=cpu", "--port=0", "--detach",
                        f"--state_dir={state}", *flags], check=True, capture_output=True,
                       timeout=120)
        try:
            ports = json.loads((state / "server.json").read_text())
            done = subprocess.run([CLI, "forward", f"--server={ports['listen']}",
                                   f"--input={source}", f"--output={output}", "--json"],
                                  check=True, capture_output=True, text=True, timeout=120)
            assert json.loads(done.stdout)["transport"]["kind"] == kind
        finally:
            subprocess.run([CLI, "down", f"--state_dir={state}"], check=True, capture_output=True)
