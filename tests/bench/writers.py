#!/usr/bin/env python3
"""Time of a forward and a backward whose tensors several processes hold, next to one client with the same bytes.

    python tests/bench/writers.py --address=HOST:PORT [--writers=2,4] [--tokens=8192] [--heads=8] [--head_dim=128]
                                  [--rounds=9] [--transport=host_memory]

Needs the ringattn package and a service with CPU or GPU workers on this machine. Writers and the one client take turns
in every round, so that a busy machine slows both. All processes check that their rows are the bits of the one client's
result before they are timed. Prints a line of CSV for each number of writers: medians in milliseconds and the median of
the rounds' ratios.
"""
import argparse
import multiprocessing
import statistics
import time
import uuid

import numpy as np

import ringattn


def zigzag(tokens, count, index):
    ends = [tokens * i // (2 * count) for i in range(2 * count + 1)]
    last = 2 * count - 1 - index
    return [(ends[i], ends[i + 1] - ends[i]) for i in (index, last)]


def arrays(options, seed=0):
    rng = np.random.default_rng(seed)
    shape = (1, options.tokens, options.heads, options.head_dim)
    return {name: rng.standard_normal(shape, np.float32).astype(np.float16) for name in ("q", "k", "v", "dout")}


class Caller:
    """One process: the whole tensors, or a writer's rows of them, in the memory that the transport needs."""

    def __init__(self, options, index=0, count=1, prefix=None):
        self.client = ringattn.connect(options.address)
        self.common = {"causal": True, "transport": options.transport, "layout": "zigzag", "schedule": "ring"}
        self.prefix, self.calls = prefix, 0
        spans = zigzag(options.tokens, count, index)
        self.tokens = np.concatenate([np.arange(begin, begin + length) for begin, length in spans])
        if prefix is not None:
            self.common["writer"] = ringattn.Writer(index, count, spans, spans, options.tokens, options.tokens)
        self.tensors = {}
        for name, tensor in arrays(options).items():
            own = tensor if prefix is None else tensor[:, self.tokens]
            self.tensors[name] = self.client.empty(own.shape, own.dtype) if "memory" in options.transport else own
            self.tensors[name][...] = own

    def options(self):
        self.calls += 1
        return self.common if self.prefix is None else self.common | {"request_id": f"{self.prefix}-{self.calls}"}

    def step(self):
        q, k, v, dout = (self.tensors[name] for name in ("q", "k", "v", "dout"))
        out, lse, _ = self.client.forward(q, k, v, **self.options())
        gradients = self.client.backward(dout, q, k, v, out=out, lse=lse, **self.options())
        return {"out": out, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}


def serve(options, index, count, prefix, pipe):
    caller = Caller(options, index, count, prefix)
    pipe.send("ready")
    while (word := pipe.recv()) != "end":
        results = caller.step()
        pipe.send(None if word == "time" else (caller.tokens, results))


def measure(options, count, one):
    context, prefix = multiprocessing.get_context("spawn"), str(uuid.uuid4())
    pipes, processes = [], []
    for index in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(options, index, count, prefix, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)

    def all_of(word):
        for pipe in pipes:
            pipe.send(word)
        return [pipe.recv() for pipe in pipes]

    assert [pipe.recv() for pipe in pipes] == ["ready"] * count
    whole = one.step()
    for tokens, rows in all_of("check"):
        for name, array in rows.items():
            assert np.array_equal(array, whole[name][:, tokens]), name
    times = {"one": [], "writers": []}
    for _ in range(options.rounds):
        for name, step in (("one", one.step), ("writers", lambda: all_of("time"))):
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    ratio = statistics.median(w / o for w, o in zip(times["writers"], times["one"]))
    print(f"{options.transport},{count},{options.tokens},{options.heads},{options.head_dim},"
          f"{statistics.median(times['one']):.1f},{statistics.median(times['writers']):.1f},{ratio:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True)
    parser.add_argument("--writers", default="2,4", type=lambda text: [int(number) for number in text.split(",")])
    parser.add_argument("--transport", default="host_memory", choices=("host_memory", "direct"))
    for name, default in (("tokens", 8192), ("heads", 8), ("head_dim", 128), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("transport,writers,tokens,heads,head_dim,one_client_ms,writers_ms,ratio")
    one = Caller(options)
    for count in options.writers:
        measure(options, count, one)


if __name__ == "__main__":
    main()
