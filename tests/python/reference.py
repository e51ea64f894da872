"""Attention in fp64 by its definition (docs/semantics.md), sharing nothing with the package."""
import numpy as np


def philox_words(seed, x0, x1, x2, x3):
    """Philox4x32-10 of arrays of counters: four words each."""
    mask = np.uint64(0xFFFFFFFF)
    key0, key1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    c = [np.asarray(word, np.uint64) for word in (x0, x1, x2, x3)]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ key0, p1 & mask, (p0 >> np.uint64(32)) ^ c[3] ^ key1, p0 & mask]
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & mask, (key1 + np.uint64(0xBB67AE85)) & mask
    return c


def kept_pairs(rate, seed, batch, heads, queries, keys):
    """Dropout's factor keep / (1 - rate), [batch, heads, queries, keys]."""
    threshold = round(rate * 65536)
    b, h, i, j = np.meshgrid(*(np.arange(n) for n in (batch, heads, queries, keys)), indexing="ij")
    words = np.stack(philox_words(seed, 4 * (j // 32) + (j // 2) % 4, i, h, b))
    lane = 2 * ((j // 8) % 4) + j % 2
    word = np.take_along_axis(words, (lane // 2)[None], 0)[0]
    number = (word >> (np.uint64(16) * (lane % 2).astype(np.uint64))) & np.uint64(0xFFFF)
    return (number >= threshold) / (1 - threshold / 65536)


def visible(queries, keys, causal=False, window=None):
    """[queries, keys], aligned to the bottom right corner."""
    distance = np.arange(keys)[None] - np.arange(queries)[:, None] - (keys - queries)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal and right < 0 else min(right, 0) if causal else right
    seen = np.ones((queries, keys), bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def forward(q, k, v, softmax_scale=None, softcap=None, **band):
    """out and lse of dense tensors, in fp64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s = np.where(visible(q.shape[1], k.shape[1], **band), s, -np.inf)
    top = np.maximum(s.max(-1, initial=-np.inf, keepdims=True), -1e300)
    weights = np.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", weights / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + top)[..., 0]


def close(actual, expected, relative):
    """Returns the error of the whole tensor relative to the tensor's norm; a NaN fails."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    where = np.isfinite(expected)
    assert (np.isneginf(actual) == np.isneginf(expected)).all()
    error = np.linalg.norm(actual[where] - expected[where])
    assert error <= relative * np.linalg.norm(expected[where]) + 1e-6, error / np.linalg.norm(expected[where])
