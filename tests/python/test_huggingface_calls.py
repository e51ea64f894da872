"""Arguments that models hand to the attention function: served, or refused by name."""
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib.small_models import eager_attention, pair, registered, tokens  # noqa: E402, F401


def test_what_is_refused_by_name():
    _, ours = pair("llama")
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(tokens(), output_attentions=True)
    attention, q = ours.model.layers[0].self_attn, torch.randn(1, 4, 8, 16)

    def call(mask=None, batch=1, **keywords):
        return ringattn.huggingface.attention_forward(attention, *[q.expand(batch, -1, -1, -1)] * 3, mask, **keywords)

    for name in ("head_mask", "cache", "block_indices", "a_keyword_of_next_year"):
        with pytest.raises(NotImplementedError, match=name):
            call(**{name: object()})
        call(**{name: None})
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    for mask, keywords, name in [
            (None, {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "batch": 2}, "cu_seq_lens_q"),
            (None, {"cu_seq_lens_q": lengths}, "cu_seq_lens_k: is missing"),
            (None, {"cu_seq_lens_k": lengths}, "cu_seq_lens_q: is missing"),
            (None, {"sliding_window": 4}, "sliding_window"),
            (None, {"sinks": torch.zeros(3)}, "sinks"),
            (None, {"s_aux": torch.zeros(4), "sinks": torch.zeros(4)}, "sinks"),
            (None, {"indices": torch.zeros(1, 4, 7, 2, dtype=torch.long)}, "indices"),
            (torch.ones(1, 1, 8, 8, dtype=torch.long), {}, "attention_mask"),
            (torch.ones(1, 1, 8, 5, dtype=torch.bool), {}, "attention_mask"),
            (ringattn.huggingface.attention_mask(1, 8, 9), {}, "attention_mask")]:
        with pytest.raises(NotImplementedError, match=name):
            call(mask, **keywords)
    call(position_ids=object(), max_length_q=8, use_cache=True, output_attentions=False, seq_idx=object())


def test_selected_keys():
    """`indices` of DeepSeek V3.2's sparse attention."""
    _, ours = pair("llama")
    attention = ours.model.layers[0].self_attn
    q, k, v = (torch.randn(2, 4, 10, 16) for _ in range(3))
    indices = torch.stack([torch.randperm(10)[:4] for _ in range(20)]).reshape(2, 10, 4)
    indices[..., 0] = 0
    seen = torch.zeros(2, 10, 10, dtype=torch.bool).scatter(-1, indices, True)[:, None]
    causal = ringattn.huggingface.attention_mask(2, 10, 10)
    for mask, visible in ((None, seen), (causal, seen & (causal == 0))):
        out, _ = ringattn.huggingface.attention_forward(attention, q, k, v, mask, indices=indices.int())
        reference.close(out, eager_attention(q, k, v, torch.where(visible, 0.0, -torch.inf)), 1e-5)


@pytest.mark.parametrize("keyword", ["s_aux", "sinks"])
@pytest.mark.parametrize("of_queries", [False, True])
def test_sinks_of_either_name_and_form(keyword, of_queries):
    _, ours = pair("llama")
    attention = ours.model.layers[0].self_attn
    q, k, v = (torch.randn(2, 4, 10, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, 4, 10, 1, requires_grad=True) if of_queries else torch.randn(4, requires_grad=True)
    mask = torch.where(torch.ones(10, 10).tril().bool(), 0.0, -torch.inf)
    out, _ = ringattn.huggingface.attention_forward(attention, q, k, v, ringattn.huggingface.attention_mask(2, 10, 10),
                                                    **{keyword: sinks})
    exact = eager_attention(q, k, v, mask, sinks if of_queries else sinks[None, :, None, None])
    weights = torch.randn_like(exact)
    reference.close(out.detach(), exact.detach(), 1e-5)
    for ours_, theirs in zip(torch.autograd.grad((out * weights).sum(), (q, k, v, sinks)),
                             torch.autograd.grad((exact * weights).sum(), (q, k, v, sinks))):
        reference.close(ours_, theirs, 1e-5)


def test_one_set_of_queries_for_a_batch():
    _, ours = pair("llama")
    q, k, v = torch.randn(1, 4, 5, 16), torch.randn(3, 4, 9, 16), torch.randn(3, 4, 9, 16)
    out, _ = ringattn.huggingface.attention_forward(ours.model.layers[0].self_attn, q, k, v, None)
    reference.close(out, eager_attention(q.expand(3, -1, -1, -1), k, v), 1e-5)


def test_dropout_of_a_module_that_does_not_train_is_none():
    """Eager attention asks `module.training`; a module may pass its rate all the same."""
    _, ours = pair("llama")
    q = torch.randn(1, 4, 8, 16)
    attention = ours.model.layers[0].self_attn
    out, _ = ringattn.huggingface.attention_forward(attention, q, q, q, None, dropout=0.5)
    reference.close(out, eager_attention(q, q, q), 1e-5)
