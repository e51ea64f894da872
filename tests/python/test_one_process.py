"""What belongs to one process: start methods, forked children with caches, pickles and copies, handlers of signals."""
import copy
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import is_served

import ringattn
from ringattn import Row

Q = np.ones((1, 64, 2, 16), np.float32)


def make(client, **fields):
    return client.create_cache(**{"layers": 1, "heads": 2, "head_dim": 16, "tokens": 4096, "dtype": "float32",
                                  "block_tokens": 16, **fields})


def attend(cache, sequence=1, value=1.0):
    token = np.full((1, 2, 16), value, np.float32)
    with cache.step([Row(sequence)]) as step:
        return step.attend(0, token, token, token)


# Start methods and forks.

def connect_and_call(address):
    try:
        with ringattn.connect(address) as client:
            return float(client.forward(Q, Q, Q).out.sum())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_start_methods(client, address, method):
    """Children that do not inherit a connection make their own; those of fork() are refused."""
    client.forward(Q, Q, Q)
    with make(client) as cache:
        attend(cache)
        with multiprocessing.get_context(method).Pool(2) as pool:
            answers = pool.map(connect_and_call, [address] * 3)
        for answer in answers:
            assert answer.startswith("RuntimeError: this process was forked") if method == "fork" else answer == 2048.0
        attend(cache)
        assert cache.length(1) == 2
    assert is_served(client)


def in_child(function):
    """Runs `function` in a forked child: its exit status."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_leaves_a_cache_to_its_parent(client):
    """A child shares the parent's sockets. Ending a stream there would end the parent's."""
    def use(cache):
        for call in (lambda: cache.step([Row(1)]), lambda: cache.sequences, cache.delete, cache.commit, lambda: cache.epoch):
            with pytest.raises(RuntimeError, match="this process was forked"):
                call()

    def leave(cache):
        with cache:  # the end of a creator's block deletes the cache, in the parent
            pass
        cache.close()
        cache.delete()

    with make(client, transport="direct") as cache:
        attend(cache)
        for what in (use, ringattn.WorkerCache.close, leave, lambda cache: client.close()):
            assert in_child(functools.partial(what, cache)) == 0
            attend(cache)
        assert cache.length(1) == 5


def test_a_child_that_exits_in_the_block_of_a_cache(address):
    source = f"""
import os, numpy as np, ringattn, sys
client, token = ringattn.connect({address!r}), np.ones((1, 2, 16), np.float32)
with client.create_cache(layers=1, heads=2, head_dim=16, tokens=100, dtype="float32") as cache:
    for _ in range(2):
        with cache.step([ringattn.Row(1)]) as step:
            step.attend(0, token, token, token)
        child = os.fork()
        if child == 0:
            sys.exit(7)
        # Text in the buffer of stdout would be printed by the next child too.
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cache.length(1), flush=True)
"""
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0 and child.stdout.split() == ["7", "1", "7", "2"], child.stdout + child.stderr


# Pickles and copies.

COPIES = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("way", COPIES)
def test_connections_are_not_copied(client, way):
    with make(client) as cache, client.region(1 << 20) as region:
        step = cache.step([Row(1, append=0, queries=0)])
        holders = {"Client": client, "Region": region, "WorkerCache": cache, "Step": step, "LayerCache": cache.layer(0)}
        for name, value in holders.items():
            with pytest.raises(TypeError, match=f"ringattn.{name}: cannot be pickled or copied"):
                COPIES[way](value)
            if way != "copy":  # a shallow copy of a holder shares what it holds
                with pytest.raises(TypeError, match=f"ringattn.{name}: cannot be pickled or copied"):
                    COPIES[way]({"model": [functools.partial(print, value)]})
    assert is_served(client)


@pytest.mark.parametrize("way", COPIES)
def test_values_are_copied(client, rng, way):
    q, k, v, dout = (rng.standard_normal((1, 24, 2, 16), np.float32) for _ in range(4))
    result = client.forward(q, k, v, retain=30, probability_rows=[(0, 3)])
    made = COPIES[way](result)
    assert type(made) is ringattn.ForwardResult and np.array_equal(made.out, result.out)
    assert np.array_equal(made.probabilities, result.probabilities)
    assert made.report.plan == result.report.plan and made.report.request_id == result.report.request_id
    gradients = client.backward(dout, residual=made.report.residual)
    whole = client.backward(dout, q, k, v)
    assert np.array_equal(COPIES[way](gradients).dq, whole.dq)
    in_region = client.empty((4,), "float32")
    in_region[:] = 3
    assert COPIES[way](in_region).tolist() == [3] * 4
    with pytest.raises(ringattn.InvalidArgumentError) as caught:
        client.forward(q, k, v, softcap=-1.0)
    error = COPIES[way](caught.value)
    assert type(error) is ringattn.InvalidArgumentError and error.violations == caught.value.violations
    for value in (Row(1, 2), ringattn.LayerGroup([0], 1, 1, 8), ringattn.Document(True), ringattn.DilationLevel(4, 2)):
        assert COPIES[way](value) == value


# Threads and handlers.

def test_threads_share_one_cache(client):
    """Each thread appends to another sequence. A lock orders the steps of the cache."""
    lock, wrong = threading.Lock(), []

    def run(cache, sequence):
        for _ in range(25):
            with lock:
                out = attend(cache, sequence, sequence)
            if np.abs(out - sequence).max() > 1e-5:
                wrong.append((sequence, out))

    with make(client) as cache:
        threads = [threading.Thread(target=run, args=(cache, sequence)) for sequence in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and cache.sequences == {sequence: 25 for sequence in range(1, 5)}


def test_threads_share_one_step(client):
    wrong = []

    def run(step, layer):
        token = np.full((1, 2, 16), layer, np.float32)
        if np.abs(step.attend(layer, token, token, token) - layer).max() > 1e-5:
            wrong.append(layer)

    with make(client, layers=6) as cache:
        for _ in range(10):
            step = cache.step([Row(1)])
            threads = [threading.Thread(target=run, args=(step, layer)) for layer in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong and cache.length(1) == 10 and len(step.reports) == 6


LONG = np.ones((4000, 8, 128), np.float32)


def long_attend(step, handler):
    """Runs `handler` as a signal's, in the middle of a call of the cache."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return step.attend(0, LONG, LONG, LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_cannot_use_a_cache_in_a_call_of_its_thread(client):
    """Such a use would wait for the call that waits for the handler."""
    seen, calls = [], [lambda: cache.epoch, lambda: cache.blocks_free, lambda: cache.step([Row(2)]), lambda: cache.delete(),
                       lambda: cache.close(), lambda: cache.drop(1), lambda: cache.sequences]

    def handler(*_):
        for call in calls:
            try:
                seen.append(call())
            except RuntimeError as error:
                seen.append(str(error))
        seen.append(float(client.forward(Q, Q, Q).out.sum()))

    with make(client, heads=8, head_dim=128, tokens=8192) as cache:
        out = long_attend(cache.step([Row(1, append=4000)]), handler)
        assert np.abs(out - 1).max() < 1e-5
        assert len(seen) == 8 and seen.pop() == 2048.0
        assert all("the cache is in a call of this thread" in text for text in seen), seen
        assert cache.length(1) == 4000 and cache.blocks_free > 0


def test_a_handler_that_raises_ends_the_call(client):
    """The step's outcome is unknown, so the same call is repeated."""
    class Alarm(Exception):
        pass

    def handler(*_):
        raise Alarm

    with make(client, heads=8, head_dim=128, tokens=8192) as cache:
        step = cache.step([Row(1, append=4000)])
        with pytest.raises(Alarm):
            long_attend(step, handler)
        with pytest.raises(ringattn.FailedPreconditionError, match="outcome is unknown; repeat it") as caught:
            cache.step([Row(2)])
        assert caught.value.reason == "STEP_CONFLICT"
        assert np.abs(step.attend(0, LONG, LONG, LONG) - 1).max() < 1e-5
        with cache.step([Row(2)]) as step:
            assert np.abs(step.attend(0, *[LONG[:1]] * 3) - 1).max() < 1e-5
        assert cache.sequences == {1: 4000, 2: 1}


def test_a_handler_may_close_what_a_call_uses(address):
    """A client's calls go on. A call that reads a region ends with its result, or is cancelled."""
    with ringattn.connect(address) as client:
        region = client.region(32 << 20)
        q = region.empty((1, 6000, 4, 64))
        q[...] = 1

        def handler(*_):
            region.close()
            client.close()

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                assert np.abs(client.forward(q, q, q, transport="host_memory").out - 1).max() < 1e-5
            except ringattn.CancelledError:
                pass  # the region was closed before the workers had read it
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
