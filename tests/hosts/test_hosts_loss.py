"""A lost worker ends only the requests that it serves, on its host and on others."""

import concurrent.futures
import signal
import urllib.request

import grpc
import pytest

from attention import assert_close, details, make_inputs, reason_of, reference, run
from cluster import Cluster, await_state, wait_until
from stubs import attention_pb2 as pb, tensor_pb2

# Requests run on after the loss, and others wait for them, for as long as they take on a busy machine.
FLAGS = ["--heartbeat_timeout=2s", "--loss_drain_timeout=120s", "--ring_wait_max=150s"]
RING = pb.SCHEDULE_RING
HOSTS = ["host-a", "host-a", "host-b", "host-b"]  # of worker-0 to worker-3


@pytest.fixture
def make_ring(tmp_path):
    """make_ring(workers, server_flags, transport)"""
    made = []

    def make(workers, server_flags, transport="wire"):
        directory = tmp_path / f"ring-{len(made)}"
        directory.mkdir()
        made.append(Cluster(directory, workers=0, server_flags=server_flags,
                            worker_flags=[f"--ring_transport={transport}"]))
        for index in range(workers):
            start(made[-1], index)
        made[-1].wait_ready(workers)
        return made[-1]

    yield make
    for ring in made:
        print(ring.tail())
        ring.close()


def start(ring, index):
    ring.start_worker(index, [f"--host_id={HOSTS[index]}"])


HEADS, DIM = 4, 64


def tokens_for(ring, seconds, workers=1):
    """The length of a causal request that takes so long on as many idle workers, by the rates that they measured.

    Machines differ by a factor of ten. On busy ones the request takes longer.
    """
    rate = max(rate.flops_per_second for worker in ring.topology().workers for rate in worker.kernel_rates
               if not rate.backward and tensor_pb2.DATA_TYPE_FLOAT32 in rate.dtypes)
    return int((seconds * workers * rate / (HEADS * 4 * DIM) * 2) ** 0.5)  # half of the pairs are visible


class Calls:
    """Requests in the background, each on chosen workers."""

    def __init__(self, ring):
        self.ring = ring
        self.pool = concurrent.futures.ThreadPoolExecutor()

    def start(self, request_id, workers, **shape):
        inputs = make_inputs(heads=HEADS, dim=DIM, **shape)
        call = self.pool.submit(run, self.ring.attention, inputs, timeout=180, causal=True,
                                request_id=request_id, schedule=RING if len(workers) > 1 else 0,
                                world_size=len(workers), members=[f"worker-{i}" for i in workers])
        return call, inputs

    def compute(self, *ids):
        for request_id in ids:
            await_state(self.ring, request_id, {pb.REQUEST_STATE_COMPUTING})


def metric(ring, name):
    with urllib.request.urlopen(f"http://{ring.ports['metrics']}/metrics", timeout=5) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    return None


def assert_right(call, inputs):
    result = call.result(timeout=180)
    few = {name: tensor[:, :200] for name, tensor in inputs.items()}  # the mask is causal
    assert_close(result.array("out")[:, :200], reference(few, causal=True)["out"], 1e-4)
    return result


# The survivor of the pair must end its exchange, because a third request waits for it. A stopped
# worker keeps its connections open.
@pytest.mark.parametrize("transport", ["wire", "gloo"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_loss_ends_only_what_the_worker_serves(make_ring, transport, how):
    ring = make_ring(4, FLAGS, transport)
    generation = ring.topology().generation
    calls = Calls(ring)
    # A stopped worker is lost after 2 s of silence, and the survivors' requests must run for longer.
    longer = 0 if how == "kill" else 3
    pair, pair_inputs = calls.start("pair", [0, 1], sq=tokens_for(ring, 3 + longer, workers=2), seed=1)
    lost, lost_inputs = calls.start("lost", [2, 3], sq=tokens_for(ring, 3, workers=2), seed=2)
    calls.compute("pair", "lost")
    single, single_inputs = calls.start("single", [2], sq=tokens_for(ring, 1 + longer), seed=3)
    await_state(ring, "single", {pb.REQUEST_STATE_UPLOADING, pb.REQUEST_STATE_COMPUTING})
    if how == "kill":
        ring.kill_worker(3)
    else:
        ring.stop_worker(3)
    with pytest.raises(grpc.RpcError) as error:
        lost.result(timeout=10)
    assert error.value.code() == grpc.StatusCode.ABORTED
    assert reason_of(error.value) == "WORKER_LOST" and "RetryInfo" in details(error.value)
    assert "worker-3" in error.value.details()
    # A request that arrives now, as the replay does, waits for the next ring.
    again = calls.pool.submit(run, ring.attention, lost_inputs, timeout=180, causal=True,
                              request_id="lost", schedule=RING, world_size=2)
    for call, inputs, workers in ((single, single_inputs, ["worker-2"]),
                                  (pair, pair_inputs, ["worker-0", "worker-1"])):
        result = assert_right(call, inputs)
        assert result.accepted.generation == generation
        assert [rank.worker for rank in result.summary.ranks] == workers
    assert assert_right(again, lost_inputs).accepted.generation > generation
    ring.wait_ready(3, after_generation=generation)
    name = "ringattn_requests_outlived_loss_total"
    wait_until(lambda: metric(ring, name) == 2, 10, f"{name} 2")
    log = (ring.directory / "server.log").read_text()
    assert log.count("requests outlived a loss") == 1
    # The replacement joins.
    ring.workers[3].send_signal(signal.SIGKILL)
    ring.workers[3].wait()
    start(ring, 3)
    ring.wait_ready(4, seconds=30)
    inputs = make_inputs(sq=333, dim=32)
    result = run(ring.attention, inputs, causal=True, schedule=RING, world_size=4)
    assert_close(result.array("out"), reference(inputs, causal=True)["out"], 1e-4)


def test_the_time_is_limited_and_may_be_zero(make_ring):
    for limit, outlives in (("500ms", True), ("0", False)):
        ring = make_ring(3, [f"--loss_drain_timeout={limit}"])
        generation = ring.topology().generation
        calls = Calls(ring)
        call, _ = calls.start("long", [0], sq=tokens_for(ring, 4), seed=0)
        calls.compute("long")
        ring.kill_worker(2)
        with pytest.raises(grpc.RpcError) as error:
            call.result(timeout=10)
        assert reason_of(error.value) == "WORKER_LOST"
        assert "worker-2" in error.value.details()
        ring.wait_ready(2, after_generation=generation)
        log = (ring.directory / "server.log").read_text()
        assert ("requests outlived a loss" in log) == outlives
