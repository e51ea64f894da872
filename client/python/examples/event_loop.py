"""Calls side by side in an event loop, and one that is given up: python event_loop.py 127.0.0.1:7700"""
import asyncio
import sys

import numpy as np

import ringattn


async def main(address: str) -> None:
    rng = np.random.default_rng(0)
    with ringattn.connect(address) as client:
        rows = [rng.standard_normal((1, 256 * (i + 1), 4, 32), np.float32) for i in range(4)]
        results = await asyncio.gather(*(client.forward_async(x, x, x, causal=True) for x in rows))
        print("tokens:", *(result.out.shape[1] for result in results))
        long = np.ones((1, 65536, 4, 16), np.float32)
        try:
            async with asyncio.timeout(0.5):  # cancels the operation; the workers are free within a step
                await client.forward_async(long, long, long)
        except TimeoutError:
            print("given up after half a second")


asyncio.run(main(sys.argv[1]))
