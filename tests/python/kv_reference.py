"""K/V caches in numpy with fp64: what a cache must return."""
import numpy as np


def attend(q, k, v, *, window=None, softcap=None, causal=True, scale=None, sinks=None):
    """Attention of q [m, heads, dim], aligned with the end of k and v [n, kv_heads, dim].

    Returns out [m, heads, dim] and lse [heads, m], natural logarithm.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    m, n = len(q), len(k)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("mhd,nhd->hmn", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    place, entry = np.arange(n - m, n)[:, None], np.arange(n)[None, :]
    seen = (entry <= place) if causal else np.ones((m, n), bool)
    if window is not None:
        seen = seen & (entry >= place - window)
    scores = np.where(seen, scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=2)
    if sinks is not None:
        lse = np.logaddexp(lse, np.asarray(sinks, np.float64)[:, None])
    return np.einsum("hmn,nhd->mhd", np.exp(scores - lse[:, :, None]), v), lse


class Sequences:
    """The contents of one layer's sequences, beside the cache."""

    def __init__(self, kv_heads, dim, dtype=np.float32, seed=0):
        self.shape, self.dtype = (kv_heads, dim), dtype
        self.random = np.random.default_rng(seed)
        self.contents = {}  # number -> (k, v)

    def draw(self, tokens, heads=None):
        return self.random.standard_normal((tokens, heads or self.shape[0], self.shape[1])).astype(self.dtype)

    def write(self, rows, k, v):
        """Applies a step's rows (sequence, keep, append)."""
        at = 0
        for sequence, keep, append in rows:
            old = self.contents.get(sequence, (np.zeros((0, *self.shape), self.dtype),) * 2)
            self.contents[sequence] = tuple(np.concatenate([a[:keep], b[at:at + append]])
                                            for a, b in zip(old, (k, v)))
            at += append

    def length(self, sequence):
        return len(self.contents[sequence][0]) if sequence in self.contents else 0
