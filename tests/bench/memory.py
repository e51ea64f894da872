#!/usr/bin/env python3
"""Memory, read from the processes themselves (peak resident size), medians of several requests to workers that
have served some (worker_memory.py):

  - K/V-related bytes of a worker for rings of 1, 2, 4 and 8 at one total length,
    compared with the plan's prediction: they must fall with 1/W;
  - for every schedule, whole requests of the same rings compared with their prediction, and which part of
    them is of keys (the memory of a request less that of one with half the keys, twice);
  - the same with a bias and a mask, which lie with their rows;
  - the coordinator's peak while requests grow from 4K to 256K tokens: flat, as what it
    holds is windows (coordinator_relay.h), once there is enough to fill them;
  - its peak while a bias passes through, of up to 8 GiB: flat.

  tests/bench/memory.py                            prints tables; exits 1 outside the bounds
  tests/bench/memory.py schedules [TOKENS [W...]]  the second alone; 32,768 tokens unless given
  tests/bench/memory.py terms [TOKENS]             the third; 16,384 tokens unless given
  tests/bench/memory.py bias [GIB]                 the last; 8 GiB unless given, which the workers hold
  tests/bench/memory.py tiny [REQUESTS]            resident memory of both processes while they serve requests
                                                   of 16 tokens; 200,000 unless given
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

import numpy as np  # noqa: E402
import one_worker  # noqa: E402

from attention import T, header_for, requests, run  # noqa: E402
from cluster import BIN, Cluster  # noqa: E402
from small_requests import ended_requests, program  # noqa: E402
from stubs import attention_pb2 as pb  # noqa: E402
from worker_memory import (KEPT_BYTES, idle_bytes, inputs_of, kept_bytes, peak_growth,  # noqa: E402
                           status_bytes, typical_growth, warm_up)

MB = 1e6
TOKENS, HEADS, DIM = 16384, 4, 128
RUNS = 5


def measure_workers():
    """K/V-related bytes: what a request with keys takes beyond one without."""
    good = True
    print(f"worker, {TOKENS} tokens, {HEADS} heads, head_dim {DIM}, fp32, full attention, MB")
    print(f"{'W':>3} {'K/V-related':>12} {'predicted':>10} {'ratio':>6} {'x W / (W=1)':>12}")
    first = None
    for world_size in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as directory:
            ring = Cluster(directory, workers=world_size)
            try:
                plan = dict(world_size=world_size,
                            schedule=pb.SCHEDULE_RING if world_size > 1 else pb.SCHEDULE_SINGLE,
                            layout=pb.LAYOUT_CONTIGUOUS)
                warm_up(ring, inputs_of(TOKENS, TOKENS, HEADS, DIM), **plan)
                runs = []
                for _ in range(RUNS):
                    without = peak_growth(ring, inputs_of(TOKENS, 0, HEADS, DIM), **plan)
                    with_keys = peak_growth(ring, inputs_of(TOKENS, TOKENS, HEADS, DIM), **plan)
                    runs.append([a - b for a, b in zip(with_keys, without)])
            finally:
                ring.close()
        measured, predicted = (statistics.median(column) for column in zip(*runs))
        # A ring holds two blocks, its own and the next; one device holds all of it once.
        share = measured * world_size / (1 if world_size == 1 else 2)
        first = first or share
        ratio = measured / predicted
        good &= 0.9 <= ratio <= 1.1
        spread = " ".join(f"{run[0] / MB:.1f}" for run in sorted(runs))
        print(f"{world_size:>3} {measured / MB:>12.1f} {predicted / MB:>10.1f} {ratio:>6.2f} "
              f"{share / first:>12.2f}   ({spread})")
    return good


SCHEDULES = {
    "ring": dict(schedule=pb.SCHEDULE_RING),
    "all_gather": dict(schedule=pb.SCHEDULE_ALL_GATHER),
    "all_gather, 1 head": dict(schedule=pb.SCHEDULE_ALL_GATHER, heads_per_step=1),
    "pass_q": dict(schedule=pb.SCHEDULE_PASS_Q),
    "replicated_q": dict(schedule=pb.SCHEDULE_REPLICATED_Q),
}


def print_kept(ring, start):
    """Prints the memory that idle workers keep after all requests, beyond their start."""
    kept = kept_bytes(ring, start)
    print(f"{'kept between requests':>20} {len(start):>3} {kept / MB:>9.1f}   (start {max(start) / MB:.1f})", flush=True)
    return kept <= KEPT_BYTES


def measure_schedules(tokens=32768, *world_sizes, heads=8, dim=64):
    """Forward, causal, fp32: (K/V part, Q part) measured and predicted, of the worst worker."""
    good = True
    print(f"worker, {tokens} tokens, {heads} heads, head_dim {dim}, fp32, causal, MB")
    print(f"{'schedule':>20} {'W':>3} {'measured':>9} {'predicted':>9} {'ratio':>6} "
          f"{'K/V part':>9} {'predicted':>9} {'Q part':>8} {'predicted':>9}")
    for world_size in world_sizes or (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as directory:
            ring = Cluster(directory, workers=world_size)
            try:
                start = idle_bytes(ring)
                for name, plan in SCHEDULES.items():
                    if world_size == 1 and name != "replicated_q":
                        continue  # all of them are one device
                    options = dict(plan, world_size=world_size, causal=True)
                    if world_size == 1:
                        options["schedule"] = pb.SCHEDULE_SINGLE
                    inputs = inputs_of(tokens, tokens, heads, dim)
                    warm_up(ring, inputs, **options)
                    whole = typical_growth(ring, inputs, **options)
                    half = typical_growth(ring, inputs_of(tokens, tokens // 2, heads, dim), **options)
                    keys = [2 * (a - b) for a, b in zip(whole, half)]
                    queries = [a - b for a, b in zip(whole, keys)]
                    ratio = whole[0] / whole[1]
                    good &= 0.95 <= ratio <= 1.05
                    print(f"{name:>20} {world_size:>3} {whole[0] / MB:>9.1f} {whole[1] / MB:>9.1f} "
                          f"{ratio:>6.3f} {keys[0] / MB:>9.1f} {keys[1] / MB:>9.1f} "
                          f"{queries[0] / MB:>8.1f} {queries[1] / MB:>9.1f}", flush=True)
                good &= print_kept(ring, start)
            finally:
                ring.close()
    return good


def measure_terms(tokens=16384, heads=2, dim=64):
    """Forward with a bias fp32 and a mask of bytes, each [1, 1, tokens, tokens]: whole requests."""
    good = True
    print(f"worker, {tokens} tokens, {heads} heads, head_dim {dim}, fp32, bias and mask for all heads, MB")
    print(f"{'schedule':>20} {'W':>3} {'terms':>12} {'measured':>9} {'predicted':>9} {'ratio':>6}")
    plain = inputs_of(tokens, tokens, heads, dim)
    pairs = dict(bias=np.full((1, 1, tokens, tokens), 0.5, np.float32),
                 mask=np.ones((1, 1, tokens, tokens), np.uint8))
    for world_size in (1, 2, 4, 8):
        with tempfile.TemporaryDirectory() as directory:
            ring = Cluster(directory, workers=world_size)
            try:
                start = idle_bytes(ring)
                for name in ("ring", "all_gather", "pass_q", "replicated_q"):
                    if world_size == 1 and name != "ring":
                        continue
                    options = dict(SCHEDULES[name], world_size=world_size)
                    if world_size == 1:
                        options["schedule"] = pb.SCHEDULE_SINGLE
                    warm_up(ring, plain, **options)
                    for terms in (["bias"], ["mask"], ["bias", "mask"]):
                        inputs = dict(plain, **{term: pairs[term] for term in terms})
                        measured, predicted = peak_growth(ring, inputs, terms=terms, **options)
                        good &= 0.95 <= measured / predicted <= 1.05
                        print(f"{name:>20} {world_size:>3} {' '.join(terms):>12} "
                              f"{measured / MB:>9.1f} {predicted / MB:>9.1f} "
                              f"{measured / predicted:>6.3f}", flush=True)
                good &= print_kept(ring, start)
            finally:
                ring.close()
    return good


def bias_request(ring, tokens):
    """One whose bias, fp32, is nearly all of it. Chunks are made as they leave; results are dropped."""
    dim, chunk = 8, bytes(1 << 20)
    row = np.zeros((1, tokens, 1, dim), np.float32)
    bias = np.broadcast_to(np.float32(0), (1, 1, tokens, tokens))  # only its shape is read
    header = header_for(dict(q=row, k=row, v=row, bias=bias), terms=["bias"], schedule=pb.SCHEDULE_RING,
                        world_size=2, layout=pb.LAYOUT_CONTIGUOUS)

    def chunks():
        sizes = dict.fromkeys((T.TENSOR_ID_Q, T.TENSOR_ID_K, T.TENSOR_ID_V), row.nbytes)
        sizes[T.TENSOR_ID_BIAS] = 4 * tokens * tokens
        for tensor, size in sizes.items():
            for offset in range(0, size, len(chunk)):
                yield T.TensorChunk(tensor=tensor, offset=offset,
                                    data=chunk[:min(len(chunk), size - offset)])

    results = 0
    for response in ring.attention.Forward(requests(header, chunks()), timeout=600):
        results += len(response.chunk.data)
    # lse of equal scores would say more, yet values are not what is measured here.
    assert results == row.nbytes + 4 * tokens


def measure_bias(gib=8):
    """The coordinator's peak while a bias of up to `gib` GiB passes through."""
    print("coordinator, 1 head of 8, fp32, bias [1, 1, tokens, tokens], ring of 2, peak MB")
    peaks = []
    for share in (64, 8, 1):
        tokens = int((gib * 2**30 / share / 4) ** 0.5) // 64 * 64
        with tempfile.TemporaryDirectory() as directory:
            ring = Cluster(directory, workers=2)
            try:
                idle = status_bytes(ring.server.pid, "VmRSS")
                began = time.monotonic()
                bias_request(ring, tokens)
                seconds = time.monotonic() - began
                peaks.append(status_bytes(ring.server.pid, "VmHWM"))
            finally:
                ring.close()
        print(f"{tokens:>8} tokens {4 * tokens * tokens / 2**30:>6.3f} GiB of bias in {seconds:>6.1f} s "
              f"{idle / MB:>8.1f} idle {peaks[-1] / MB:>8.1f} peak", flush=True)
    return max(peaks) - peaks[0] < 8 * MB


def measure_coordinator():
    print("coordinator, 4 heads, head_dim 64, fp32, window (64, 0), ring of 2, peak MB")
    peaks = {}
    for tokens in (4 << 10, 16 << 10, 64 << 10, 256 << 10):
        inputs = inputs_of(tokens, tokens, 4, 64)
        runs = []
        for _ in range(RUNS):
            # A new process each time, because malloc keeps the memory of earlier requests.
            with tempfile.TemporaryDirectory() as directory:
                ring = Cluster(directory, workers=2)
                try:
                    idle = status_bytes(ring.server.pid, "VmRSS")
                    run(ring.attention, inputs, timeout=600, causal=True, window=(64, 0),
                        schedule=pb.SCHEDULE_RING)
                    runs.append(status_bytes(ring.server.pid, "VmHWM"))
                finally:
                    ring.close()
        peaks[tokens] = statistics.median(runs)
        spread = " ".join(f"{peak / MB:.1f}" for peak in sorted(runs))
        print(f"{tokens:>8} tokens {4 * inputs['q'].nbytes / MB:>8.1f} moved "
              f"{idle / MB:>8.1f} idle {peaks[tokens] / MB:>8.1f} peak   ({spread})")
    return peaks[256 << 10] - peaks[16 << 10] < 8 * MB


def measure_tiny(requests=200_000):
    """The allocators of both processes settle within the first tenth of the requests."""
    print("16 tokens, 8 in flight, one CPU worker with one thread, resident MB: requests coordinator worker")
    with tempfile.TemporaryDirectory() as directory:
        ring = one_worker.start(BIN, directory)
        load = [program(BIN, "ringattn"), "bench", f"--server={ring.address}", "--seq_len=16",
                "--transport=relay", "--concurrency_range=8:8", "--measurement_interval=10000", "--max_trials=1"]
        rows = []
        try:
            while not rows or rows[-1][0] < requests:
                subprocess.run(load, check=True, capture_output=True)
                resident = [status_bytes(process.pid, "VmRSS") / MB for process in (ring.server, ring.workers[0])]
                rows.append((ended_requests(ring.ports["metrics"]), *resident))
                print("{:>9.0f} {:>8.1f} {:>8.1f}".format(*rows[-1]), flush=True)
        finally:
            ring.close()
    settled = next(row for row in rows if row[0] >= requests / 10)
    return all(last - first < 4 for first, last in zip(settled[1:], rows[-1][1:]))


if __name__ == "__main__":
    alone = dict(schedules=measure_schedules, terms=measure_terms, bias=measure_bias, tiny=measure_tiny)
    if sys.argv[1:2] and sys.argv[1] in alone:
        results = [alone[sys.argv[1]](*map(int, sys.argv[2:]))]
    else:
        results = [measure_workers(), measure_schedules(), measure_terms(), measure_coordinator(),
                   measure_bias()]
    sys.exit(0 if all(results) else 1)
