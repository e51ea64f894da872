"""Tools of operators and of other languages: grpcurl, Prometheus, promtool, health, the admin service, Java stubs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request

import grpc
import pytest

from attention import make_inputs, run
from cluster import free_port, wait_until
from stubs import ROOT, admin_pb2, attention_pb2 as pb

GRPCURL = os.environ.get("RINGATTN_GRPCURL", str(ROOT / ".deps/bin/grpcurl"))
TOY = {"header": {"shape": {"batch": 1, "seq_len_q": 1, "seq_len_kv": 1, "num_heads": 1,
                            "head_dim": 1}, "dtype": "DATA_TYPE_FLOAT32"}}
ONE, TWO = "AACAPw==", "AAAAQA=="  # 1.0f, 2.0f
PROTOS = sorted((ROOT / "proto/ringattn/v1").glob("*.proto"))
GOOGLEAPIS = ROOT / ".deps/googleapis"
# The distribution's jars for the dependencies in docs/stubs.md. com.google.rpc is generated here, too.
JARS = [pathlib.Path("/usr/share/java") / f"{name}.jar" for name in (
    "protobuf", "grpc-api", "grpc-stub", "grpc-protobuf", "guava", "geronimo-annotation-1.3-spec")]


def grpcurl(*arguments, stdin=None, fails=False):
    done = subprocess.run([GRPCURL, "-plaintext", *arguments], input=stdin, text=True,
                          capture_output=True, timeout=30)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_list_and_describe(ring):
    services = grpcurl(ring.address, "list").split()
    assert {"ringattn.v1.AttentionService", "ringattn.v1.ClusterService",
            "grpc.health.v1.Health"} <= set(services)
    assert "rpc Forward" in grpcurl(ring.address, "describe", "ringattn.v1.AttentionService")
    worker = ring.worker_ports(0)["data"]
    services = grpcurl(worker, "list").split()
    assert {"ringattn.v1.ShardService", "grpc.health.v1.Health"} <= set(services)
    # Every service that is listed can be described: its descriptors are linked in.
    for address in (ring.address, worker):
        for service in grpcurl(address, "list").split():
            assert "rpc " in grpcurl(address, "describe", service)


@pytest.mark.parametrize("port", ["server", "worker"])
def test_health(ring, port):
    address, named = {
        "server": (ring.address, "ringattn.v1.AttentionService"),
        "worker": (ring.worker_ports(0)["data"], "ringattn.v1.ShardService")}[port]
    for service in ("", named):
        reply = grpcurl("-d", json.dumps({"service": service}), address,
                        "grpc.health.v1.Health/Check")
        assert "SERVING" in reply and "NOT_SERVING" not in reply
    reply = grpcurl("-d", json.dumps({"service": "no.such.Service"}), address,
                    "grpc.health.v1.Health/Check", fails=True)
    assert "NotFound" in reply


def test_a_toy_forward_with_inline_tensors(ring):
    request = json.loads(json.dumps(TOY))
    request["header"]["inline_tensors"] = [
        {"tensor": "TENSOR_ID_Q", "data": ONE}, {"tensor": "TENSOR_ID_K", "data": ONE},
        {"tensor": "TENSOR_ID_V", "data": TWO}]
    reply = grpcurl("-d", json.dumps(request), ring.address, "ringattn.v1.AttentionService/Forward")
    assert TWO in reply  # out = v
    assert ONE in reply  # lse = q k = 1


def test_a_toy_forward_with_pipelined_chunks(ring):
    messages = [TOY] + [{"chunk": {"tensor": f"TENSOR_ID_{name}", "offset": 0, "data": data}}
                        for name, data in (("Q", ONE), ("K", ONE), ("V", TWO))]
    reply = grpcurl("-d", "@", ring.address, "ringattn.v1.AttentionService/Forward",
                    stdin="\n".join(json.dumps(m) for m in messages))
    assert TWO in reply and "summary" in reply


def test_an_error_with_its_details(ring):
    request = json.loads(json.dumps(TOY))
    request["header"]["shape"]["head_dim"] = 577
    reply = grpcurl("-d", json.dumps(request), ring.address,
                    "ringattn.v1.AttentionService/Forward", fails=True)
    assert "InvalidArgument" in reply and "shape.head_dim" in reply
    request = json.loads(json.dumps(TOY))
    request["header"]["options"] = {"dilation_levels": [{"segment_length": 8}]}  # no rate
    reply = grpcurl("-d", json.dumps(request), ring.address,
                    "ringattn.v1.AttentionService/Forward", fails=True)
    assert "InvalidArgument" in reply and "options.dilation_levels[0].dilation_rate" in reply


def fetch(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        return reply.read().decode()


def test_metrics_pass_promtool_and_count(ring):
    run(ring.attention, make_inputs(sq=100), schedule=pb.SCHEDULE_RING, world_size=4)
    server = fetch(ring.ports["metrics"])
    workers = [fetch(ring.worker_ports(i)["metrics"]) for i in range(4)]
    for text in [server, *workers]:
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                              capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert 'ringattn_requests_total{' in server
    for name in ("ringattn_stage_duration_seconds", "ringattn_queue_depth", "ringattn_queue_bytes",
                 "ringattn_bytes_total", "ringattn_ring_generation", "ringattn_worker_up"):
        assert name in server, name
    assert all("ringattn_attention_flops_total" in text for text in workers)
    series = 'ringattn_worker_kernel_calls_total{call="forward",class="plain",family="cpu_fp32"} '
    for text in workers:
        (count,) = [float(line[len(series):]) for line in text.splitlines() if line.startswith(series)]
        assert count > 0


def test_a_real_prometheus_scrapes_and_answers(ring, tmp_path):
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text(f"""
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: ringattn
    static_configs: [{{targets: ["{ring.ports['metrics']}"]}}]
""")
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    process = subprocess.Popen(
        ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        def answer():
            url = f"http://127.0.0.1:{port}/api/v1/query?query=sum(ringattn_worker_up)"
            try:
                with urllib.request.urlopen(url, timeout=2) as reply:
                    result = json.load(reply)["data"]["result"]
            except OSError:
                return None
            return result and result[0]["value"][1]
        assert wait_until(answer, 30, "an answer") == "4"
    finally:
        process.kill()
        process.wait()


def test_admin_needs_the_secret_and_stays_off_the_public_listener(ring):
    admin = ring.admin()
    with pytest.raises(grpc.RpcError) as error:
        admin.Drain(admin_pb2.DrainRequest(), timeout=5)
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert "AdminService" not in grpcurl(ring.address, "list")


def test_drain_and_reform(make_ring):
    ring = make_ring(workers=2)
    admin, secret = ring.admin(), ring.credentials
    generation = ring.topology().generation
    reply = admin.ReformRing(admin_pb2.ReformRingRequest(), metadata=secret, timeout=15)
    assert reply.generation > generation
    admin.Drain(admin_pb2.DrainRequest(), metadata=secret, timeout=15)
    health = grpcurl("-d", "{}", ring.address, "grpc.health.v1.Health/Check")
    assert "NOT_SERVING" in health
    with pytest.raises(grpc.RpcError) as error:
        run(ring.attention, make_inputs())
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    admin.Drain(admin_pb2.DrainRequest(undo=True), metadata=secret, timeout=15)
    run(ring.attention, make_inputs())


# Java stubs by the recipe of docs/stubs.md.

@pytest.fixture(scope="module")
def java_stubs(tmp_path_factory):
    """The folder of the generated sources."""
    plugin = shutil.which("grpc_java_plugin")
    if plugin is None:
        pytest.skip("the package protobuf-compiler-grpc-java-plugin is not installed")
    out = tmp_path_factory.mktemp("java")
    subprocess.run(["protoc", f"-I{ROOT / 'proto'}", f"-I{GOOGLEAPIS}", "-I/usr/include",
                    f"--plugin=protoc-gen-grpc-java={plugin}", f"--java_out={out}", f"--grpc-java_out={out}",
                    *PROTOS, GOOGLEAPIS / "google/rpc/status.proto"], check=True)
    return out


def test_java_stubs_have_a_class_for_every_message_and_service(java_stubs):
    package = java_stubs / "ringattn/v1"
    assert [path.name for path in java_stubs.iterdir() if path.name != "com"] == ["ringattn"]
    for proto in PROTOS:
        text = proto.read_text()
        kinds = re.findall(r"^(message|enum|service) (\w+)", text, re.MULTILINE)
        assert kinds, proto
        for kind, name in kinds:
            source = package / (f"{name}Grpc.java" if kind == "service" else f"{name}.java")
            assert re.search(rf"^public (final )?(class|enum) {source.stem}\b", source.read_text(), re.MULTILINE), source
        outer = "".join(word.capitalize() for word in proto.stem.split("_")) + "Proto"
        assert (package / f"{outer}.java").exists(), outer


def test_a_client_with_java_stubs_compiles(java_stubs, tmp_path):
    if shutil.which("javac") is None:
        pytest.skip("no JDK is installed")
    if missing := [jar.name for jar in JARS if not jar.exists()]:
        pytest.skip(f"not in /usr/share/java: {', '.join(missing)}")
    done = subprocess.run(["javac", "-nowarn", "-proc:none", "-implicit:none", "-d", tmp_path / "classes",
                           "-cp", ":".join(map(str, JARS)), "-sourcepath", java_stubs,
                           ROOT / "tests/e2e/support/StubsClient.java"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "classes/StubsClient.class").exists()
