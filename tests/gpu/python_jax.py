#!/usr/bin/env python3
"""`ringattn.jax` with arrays on a GPU: output and gradients against a plain JAX reference in fp32, under jit and under
shard_map with one writer per GPU. Prints JSON. Needs JAX with CUDA and the package (an unpacked wheel in PYTHONPATH
will do).

  python_jax.py --server=HOST:PORT [--tokens=N]
"""
import argparse
import json
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the workers use the same GPUs
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import ringattn  # noqa: E402
from ringattn.jax import ring_flash_attention  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 128
WORST = 2e-3  # of the largest value, for fp32


def reference(q, k, v):
    tokens = q.shape[1]
    k, v = (jnp.repeat(one, HEADS // KV_HEADS, axis=2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / jnp.sqrt(DIM)
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, precision="highest")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    devices = jax.devices("gpu")
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, (1, args.tokens, heads, DIM)) for key, heads in
                     zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS)))

    def results(attend):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    wanted = results(reference)
    found = {}
    with ringattn.connect(args.server) as client:
        ringattn.set_default_client(client)
        ways = {"jit": jax.jit(lambda *qkv: ring_flash_attention(*qkv, causal=True))}
        rows = PartitionSpec(None, "ranks")
        ways[f"shard_map over {len(devices)}"] = jax.jit(jax.shard_map(
            lambda *qkv: ring_flash_attention(*qkv, causal=True, axis_name="ranks"), mesh=Mesh(devices, ("ranks",)),
            in_specs=(rows, rows, rows), out_specs=rows, check_vma=False))
        for name, attend in ways.items():
            errors = [float(jnp.abs(got - want).max() / jnp.abs(want).max())
                      for got, want in zip(results(attend), wanted)]
            assert all(error < WORST for error in errors), (name, errors)
            found[name] = errors
    print(json.dumps({"devices": [str(device) for device in devices], "errors": found}))


if __name__ == "__main__":
    main()
