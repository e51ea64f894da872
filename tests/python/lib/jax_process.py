"""One process of jax.distributed: `jax_process.py RANK PORT DEVICES`, with RINGATTN_ADDRESS.

Prints a line of JSON: the largest difference of this process's rows of each result from those of the whole sequence,
the error of a call whose options differ between the shards, and the difference of the call after it.
"""
import functools
import json
import os
import sys

RANK, PORT, DEVICES = (int(number) for number in sys.argv[1:])
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, RANK)

import ringattn  # noqa: E402
from ringattn.jax import ring_flash_attention  # noqa: E402

TOKENS = jax.sharding.PartitionSpec(None, "sp")


def attention(q, k, v):
    """The definition, causal, over the whole sequence."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def main():
    ringattn.set_default_client(ringattn.connect(os.environ["RINGATTN_ADDRESS"]), deadline=60.0)
    mesh = jax.make_mesh((jax.device_count(),), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal((2, 16 * jax.device_count(), 4, 16)).astype(np.float32) for _ in range(3)]
    sharding = jax.sharding.NamedSharding(mesh, TOKENS)
    arrays = [jax.make_array_from_callback(array.shape, sharding, functools.partial(np.ndarray.__getitem__, array))
              for array in whole]

    def sharded(options):
        def attend(q, k, v):
            return ring_flash_attention(q, k, v, causal=True, axis_name="sp", **options())

        return jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS))

    def differences(ours, exact):
        return [max(float(np.abs(np.asarray(shard.data) - np.asarray(array)[shard.index]).max())
                    for shard in result.addressable_shards) for result, array in zip(ours, exact)]

    call = sharded(dict)
    out, pull = jax.vjp(call, *arrays)
    exact, pull_exact = jax.vjp(attention, *(jnp.asarray(array) for array in whole))
    found = {"processes": jax.process_count(), "devices": jax.device_count(),
             "differences": differences((out, *pull(out)), (exact, *pull_exact(exact)))}
    try:
        sharded(lambda: {"dropout_prob": 0.5, "dropout_seed": jax.lax.axis_index("sp")})(*arrays).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        found["error"] = str(error)
    found["after"] = differences([call(*arrays)], [exact])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
