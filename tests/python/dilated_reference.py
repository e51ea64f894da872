"""torchscale's dilated attention in fp64: its steps and its gradient, with one loop per head and segment.

Written from the definition of torchscale.component.dilated_attention: pad the sequence to whole segments, take every
r-th token of a segment from the head's offset on, attend within them, put the outputs back, and take the mean of the
levels' outputs, weighted by exp(lse).
"""
import reference
import torch


def first_token(head, heads, rate, head_offsets):
    """The first token that a head sees in a segment."""
    return head // -(-heads // rate) if head_offsets == "blocks" else head % rate


def _level(q, k, v, length, rate, *, is_causal, softmax_scale, factors, hidden, head_offsets, padding_is_visible):
    """out [batch, tokens, heads, dim] and lse [batch, heads, tokens] of one level; lse is -inf where it selects none."""
    batch, tokens, heads, dim = q.shape
    length = min(length, tokens)
    padded = -(-tokens // length) * length
    q, k, v = (torch.cat([x, x.new_zeros(batch, padded - tokens, heads, x.shape[-1])], 1) for x in (q, k, v))
    hidden = torch.cat([hidden, hidden.new_full((batch, padded - tokens), not padding_is_visible)], 1)
    columns = []
    for head in range(heads):
        rows, places = [], []
        for begin in range(0, padded, length):
            chosen = range(begin + first_token(head, heads, rate, head_offsets), begin + length, rate)
            if not chosen:
                continue
            at = torch.tensor(chosen)
            s = softmax_scale * q[:, at, head] @ k[:, at, head].mT
            if is_causal:
                s = s.masked_fill(at[:, None] < at, -torch.inf)
            s = s.masked_fill(hidden[:, None, at], -torch.inf)
            blind = torch.isneginf(s).all(-1, keepdim=True)
            lse = s.masked_fill(blind, 0).logsumexp(-1, keepdim=True)
            p = (s - lse).exp().masked_fill(blind, 0)
            if factors is not None:
                p = p * factors[:, head][:, at][:, :, at]
            rows.append(torch.cat([p @ v[:, at, head], lse.masked_fill(blind, -torch.inf)], -1))
            places.append(at)
        column = q.new_zeros(batch, padded, v.shape[-1] + 1)
        column[..., -1] = -torch.inf
        if rows:
            column = column.index_copy(1, torch.cat(places), torch.cat(rows, 1))
        columns.append(column)
    dense = torch.stack(columns, 2)[:, :tokens]
    return dense[..., :-1], dense[..., -1].transpose(1, 2)


def attention(q, k, v, segment_lengths, dilation_rates, *, is_causal=False, softmax_scale=None, key_padding_mask=None,
              dropout=0.0, dropout_seed=0, head_offsets="blocks", differentiate_weights=False,
              padding_is_visible=False):
    """out of dense tensors [batch, tokens, heads, dim]. padding_is_visible: zero keys after the end join the softmax."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    batch, tokens, heads, dim = q.shape
    hidden = torch.zeros(batch, tokens, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    factors = None
    if dropout:
        longest = tokens + max(segment_lengths)
        factors = torch.from_numpy(reference.kept_pairs(dropout, dropout_seed, batch, heads, longest, longest))
    outs, lses = zip(*(_level(q, k, v, length, rate, is_causal=is_causal, hidden=hidden, factors=factors,
                              softmax_scale=dim ** -0.5 if softmax_scale is None else softmax_scale,
                              head_offsets=head_offsets, padding_is_visible=padding_is_visible)
                       for length, rate in zip(segment_lengths, dilation_rates)))
    lses = torch.stack(lses)
    if not differentiate_weights:
        lses = lses.detach()
    blind = torch.isneginf(lses).all(0)
    weights = lses.masked_fill(blind, 0).softmax(0)  # a row that no level selects: outputs are 0
    return sum(out * weight.transpose(1, 2)[..., None] for out, weight in zip(outs, weights))
