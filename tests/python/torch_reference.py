"""Attention in fp64 by PyTorch's own operators, with every option; differentiable by PyTorch's own rules."""
import reference
import torch


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=None, alibi_slopes=None, bias=None,
              bias_before_softcap=False, mask=None, q_segment_ids=None, kv_segment_ids=None, sinks=None, dropout_p=0.0,
              dropout_seed=0):
    """out and lse of dense tensors [batch, tokens, heads, dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    queries, keys = q.shape[1], k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if bias is not None and bias_before_softcap:
        s = s + bias.double()
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None and not bias_before_softcap:
        s = s + bias.double()
    if alibi_slopes is not None:
        distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
        slopes = alibi_slopes.double().reshape(-1, q.shape[2], 1, 1)
        s = s - slopes * distance
    seen = torch.from_numpy(reference.visible(queries, keys, causal, window))[None, None]
    if mask is not None:
        seen = seen & mask.bool()
    if q_segment_ids is not None:
        ids_q, ids_k = q_segment_ids[:, None, :, None], kv_segment_ids[:, None, None, :]
        seen = seen & (ids_q == ids_k) & (ids_q >= 0)
    s = s.masked_fill(~seen, -torch.inf)
    logits = s
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(q.shape[0], -1, queries, 1)
        logits = torch.cat([s, column], -1)
    blind = torch.isneginf(logits).all(-1)
    lse = logits.masked_fill(blind[..., None], 0).logsumexp(-1)
    p = (s - lse[..., None]).exp().masked_fill(blind[..., None], 0)
    if dropout_p:
        p = p * torch.from_numpy(reference.kept_pairs(dropout_p, dropout_seed, q.shape[0], q.shape[2], queries, keys))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse.masked_fill(blind, -torch.inf)
