#!/usr/bin/python3
"""Measures the first call of a recipe with and without `Client.prepare`, and an equal call after it, on one CPU worker with
one thread. The recipes differ in softmax_scale, so their work is equal and nothing is kept for the next one. Rounds
alternate, and every output is verified against fp64 on sampled rows. Needs the installed wheel and these Bazel targets:
//server:ringattn-server //worker:ringattn-worker.

  tests/bench/first_call.py [--tokens=1024,8192] [--transports=relay,host_memory] [--rounds=20] [--heads=8]
                            [--documents=1] [--csv]
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/e2e/support"))
import cluster  # noqa: E402
import ringattn  # noqa: E402, after the stubs of cluster, whose folder it takes in

DIM = 64
COLUMNS = ("first_ms", "prepared_first_ms", "saved_ms", "equal_ms", "prepare_ms")


def verify(q, k, v, out, scale, document, rng):
    for row in rng.integers(0, len(q), 4):
        keys = slice(row - row % document, row + 1)
        for head in range(q.shape[1]):
            scores = scale * k[keys, head].astype(np.float64) @ q[row, head].astype(np.float64)
            weights = np.exp(scores - scores.max())
            exact = weights @ v[keys, head].astype(np.float64) / weights.sum()
            assert np.abs(out[row, head] - exact).max() < 1e-4, (row, head)


def timed(call):
    begin = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - begin), result


def measure(client, tokens, transport, options, scales):
    """Returns the medians in ms."""
    rng = np.random.default_rng(tokens)
    shape = (tokens, options.heads, DIM)
    document = tokens // options.documents
    documents = {name: np.arange(0, tokens + 1, document) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    q, k, v = (client.empty(shape) if transport == "host_memory" else np.empty(shape, np.float32) for _ in range(3))
    for tensor in (q, k, v):
        tensor[:] = rng.standard_normal(shape, np.float32)
    rows = []
    for round_ in range(options.rounds + 1):
        row = {}

        def call(name, scale):
            row[name], result = timed(lambda: client.forward(q, k, v, causal=True, softmax_scale=scale,
                                                             transport=transport, **documents))
            assert result.report.transport == transport
            verify(q, k, v, result.out, scale, document, rng)

        scale = next(scales)
        call("first_ms", scale)
        call("equal_ms", scale)
        scale = next(scales)
        row["prepare_ms"], prepared = timed(lambda: client.prepare(q, k, v, causal=True, softmax_scale=scale, ttl=1,
                                                                    **documents))
        with prepared:
            assert prepared.found == 0
            call("prepared_first_ms", scale)
        row["saved_ms"] = row["first_ms"] - row["prepared_first_ms"]
        if round_ > 0:  # the first one warms memory and connections up
            rows.append(row)
    return {name: statistics.median(row[name] for row in rows) for name in COLUMNS}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1024,8192")
    parser.add_argument("--transports", default="relay,host_memory")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    scales = iter(np.linspace(0.05, 0.2, 10000))
    with tempfile.TemporaryDirectory() as directory:
        ring = cluster.Cluster(directory, workers=1,
                               worker_flags=["--local_memory=host_memory", f"--local_socket_dir={directory}"])
        try:
            if options.csv:
                print("tokens,transport", *COLUMNS, sep=",")
            with ringattn.connect(ring.address) as client:
                for tokens in map(int, options.tokens.split(",")):
                    for transport in options.transports.split(","):
                        row = measure(client, tokens, transport, options, scales)
                        if options.csv:
                            print(tokens, transport, *(f"{row[name]:.3f}" for name in COLUMNS), sep=",")
                        else:
                            print(f"{tokens:6} {transport:12}", *(f"{name} {row[name]:.2f}" for name in COLUMNS))
        finally:
            ring.close()


if __name__ == "__main__":
    main()
