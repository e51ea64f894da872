"""Faults of processes and of the network between them. Each takes the Chaos, draws from its `rng`,
and leaves everything running again."""

import time

import grpc

from cluster import CHANNEL_OPTIONS
from stubs import admin_pb2, admin_pb2_grpc

# A coordinator without descriptors (client_faults.no_descriptors) refuses operators, too, so
# their calls wait until it takes connections again.


def worker_killed(chaos, rng):
    chaos.restart_worker(rng.choice(chaos.worker_indices), pause=rng.random())


def two_workers_killed(chaos, rng):
    for index in rng.sample(chaos.worker_indices, 2):
        chaos.cluster.kill_worker(index)
        chaos.replace_worker(index)


def worker_paused(chaos, rng):
    with chaos.stopped(chaos.cluster.workers[rng.choice(chaos.worker_indices)]):
        time.sleep(0.2 + rng.random())


def worker_frozen(chaos, rng):
    """Longer than its heartbeats may fail to come."""
    with chaos.stopped(chaos.cluster.workers[rng.choice(chaos.worker_indices)]):
        time.sleep(chaos.HEARTBEAT_TIMEOUT + 1)


def worker_terminated(chaos, rng):
    index = rng.choice(chaos.worker_indices)
    worker = chaos.cluster.workers[index]
    worker.terminate()
    worker.wait(timeout=60)
    chaos.replace_worker(index)


def coordinator_killed(chaos, rng):
    chaos.restart_coordinator(gently=False)


def coordinator_terminated(chaos, rng):
    chaos.restart_coordinator(gently=True)


def coordinator_paused(chaos, rng):
    with chaos.stopped(chaos.cluster.server):
        time.sleep(0.2 + 2 * rng.random())


def control_cut(chaos, rng):
    chaos.control.cut()


def control_silent(chaos, rng):
    chaos.control.stall()
    time.sleep(chaos.HEARTBEAT_TIMEOUT + 1)
    chaos.control.resume()


def public_cut(chaos, rng):
    chaos.public.cut()


def public_stalled(chaos, rng):
    chaos.public.stall()
    time.sleep(0.5 + rng.random())
    chaos.public.resume()


def ring_reformed(chaos, rng):
    with grpc.insecure_channel(chaos.cluster.ports["control"], CHANNEL_OPTIONS) as channel:
        try:
            admin_pb2_grpc.AdminServiceStub(channel).ReformRing(
                admin_pb2.ReformRingRequest(), timeout=30, metadata=chaos.cluster.credentials,
                wait_for_ready=True)
        except grpc.RpcError as error:
            if "no worker is connected" not in error.details():  # they are on their way back
                raise


def drained_and_back(chaos, rng):
    with grpc.insecure_channel(chaos.cluster.ports["control"], CHANNEL_OPTIONS) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        admin.Drain(admin_pb2.DrainRequest(undo=True), timeout=60,  # connects
                    metadata=chaos.cluster.credentials, wait_for_ready=True)
        drain = admin.Drain.future(admin_pb2.DrainRequest(), timeout=60,
                                   metadata=chaos.cluster.credentials)
        time.sleep(rng.random())
        drain.cancel()
        for _ in range(2):  # the first may overtake it
            admin.Drain(admin_pb2.DrainRequest(undo=True), timeout=60,
                        metadata=chaos.cluster.credentials, wait_for_ready=True)
            time.sleep(0.1)


def faulty_worker(name, most):
    """A worker whose device, transport or shard stream does this (worker/faults), for a while."""
    def fault(chaos, rng):
        index = rng.choice(chaos.worker_indices)
        chaos.cluster.kill_worker(index)
        chaos.replace_worker(index, [f"--fault_injection={name}:{rng.randrange(most + 1)}"])
        time.sleep(3 + 2 * rng.random())
        chaos.cluster.kill_worker(index)
        chaos.replace_worker(index)

    fault.__name__ = f"faulty_{name}"
    return fault


QUICK = [worker_killed, worker_paused, coordinator_killed, control_cut, public_cut,
         public_stalled, ring_reformed, drained_and_back]
SLOW = [two_workers_killed, worker_frozen, worker_terminated, coordinator_terminated,
        coordinator_paused, control_silent,
        *(faulty_worker(*kind) for kind in (("stall_step", 20), ("skip_send", 20),
                                            ("fail_send", 20), ("slow_step_ms", 100),
                                            ("stop_reading", 20), ("stop_sending", 20)))]
