"""Attention in JAX, compiled and differentiated: python jax_gradients.py 127.0.0.1:7700"""
import sys

import jax
import jax.numpy as jnp

import ringattn
from ringattn.jax import ring_flash_attention

ringattn.set_default_client(ringattn.connect(sys.argv[1]))
keys = jax.random.split(jax.random.key(0), 3)
query = jax.random.normal(keys[0], (2, 256, 8, 32), jnp.bfloat16)  # [batch, seq_len, heads, head_dim]
key, value = (jax.random.normal(seed, (2, 256, 2, 32), jnp.bfloat16) for seed in keys[1:])
sinks = jnp.zeros((8, 1))  # one for each head


@jax.jit
def loss(query, key, value, sinks):
    out = ring_flash_attention(query, key, value, causal=True, sliding_window=64, softmax_aux=sinks)
    return (out.astype(jnp.float32) ** 2).mean()


mean, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(query, key, value, sinks)
print(f"loss {mean:.4f}, gradients {[gradient.shape for gradient in gradients]}")
