"""Calls in an event loop."""
import asyncio
import os
import time

import numpy as np
import pytest
from conftest import is_served, state_of, wait_until

import ringattn


def test_many_at_once(client, rng):
    q, k, v = (rng.standard_normal((1, 64, 2, 8), np.float32) for _ in range(3))

    async def main():
        calls = [client.forward_async(q, k, v, causal=True) for _ in range(12)]
        results = await asyncio.gather(*calls)
        out, lse, _ = results[0]
        gradients = await client.backward_async(out, q, k, v, out=out, lse=lse, causal=True)
        return results, gradients

    results, gradients = asyncio.run(main())
    expected = client.forward(q, k, v, causal=True)
    assert all((result.out == expected.out).all() for result in results)
    blocking = client.backward(expected.out, q, k, v, out=expected.out, lse=expected.lse, causal=True)
    assert (gradients.dk == blocking.dk).all()


def test_errors(client):
    q = np.ones((1, 8, 1, 8), np.float32)

    async def main():
        with pytest.raises(ringattn.InvalidArgumentError):
            await client.forward_async(q, q, q, softcap=-1.0)
        with pytest.raises(TypeError, match="forward_async"):
            await client.forward_async(q, q, q, casual=True)

    asyncio.run(main())


def test_the_loop_goes_on_during_a_call(client, rng):
    q = rng.standard_normal((1, 2048, 8, 32), np.float32)

    async def main():
        call = asyncio.create_task(client.forward_async(q, q, q))
        ticks = 0
        while not call.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await call
        return ticks

    assert asyncio.run(main()) > 3


def test_cancelling_a_task_frees_the_workers(client, long_call):
    descriptors = len(os.listdir("/proc/self/fd"))

    async def main():
        call = asyncio.create_task(client.forward_async(*long_call, request_id="py-cancelled"))
        end = time.monotonic() + 60
        while state_of(client, "py-cancelled") != "computing":
            assert not call.done() and time.monotonic() < end
            await asyncio.sleep(0.02)
        call.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await call
        return time.monotonic() - began

    seconds = asyncio.run(main())
    assert seconds < 10
    # The coordinator receives the cancellation a moment later.
    wait_until(lambda: state_of(client, "py-cancelled") == "failed", 10, "the operation's end")
    assert is_served(client)
    # The client's connections, to the coordinator and 16 to the workers; no eventfd.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 24


def test_a_timeout_cancels(client, long_call):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await client.forward_async(*long_call)

    asyncio.run(main())
    assert is_served(client)
