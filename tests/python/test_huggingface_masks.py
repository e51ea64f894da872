"""Masks of Hugging Face models: their meaning decides, and models may compute with them."""
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib.small_models import eager_attention, padding, pair, pair_of, registered, tokens  # noqa: E402, F401
from transformers import masking_utils as masking  # noqa: E402


def test_packed_by_positions_and_by_lengths():
    eager, ours = pair("llama")
    ids = tokens()[:1]
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    exact = eager(ids, position_ids=positions).logits
    reference.close(ours(ids, position_ids=positions).logits.detach(), exact.detach(), 1e-5)
    lengths = torch.tensor([0, 15, 40], dtype=torch.int32)
    # As DataCollatorWithFlattening says it; positions that do not restart keep transformers from making a mask of it.
    def causal(model, **more):
        return model(ids, position_ids=torch.arange(40)[None], **more).logits.detach()

    packed = causal(ours, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=25, max_length_k=25)
    reference.close(packed[:, :15], causal(eager)[:, :15], 1e-5)
    alone = eager(ids[:, 15:], position_ids=torch.arange(15, 40)[None]).logits.detach()
    reference.close(packed[:, 15:], alone, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_callers(dtype):
    eager, ours = pair("llama")
    ids = tokens()
    seen = torch.rand(3, 1, 40, 40) < 0.6
    seen |= torch.eye(40, dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    exact = eager(ids, attention_mask=additive).logits
    given = seen if dtype == torch.bool else additive
    reference.close(ours(ids, attention_mask=given).logits.detach(), exact.detach(), 1e-5)


class Module(torch.nn.Module):
    """An attention module that may say of itself what is not so."""

    def __init__(self, is_causal):
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_masks_meaning_decides_and_not_the_module(is_causal, compiled):
    """Without a mask everything is visible, and a causal mask is causal; `module.is_causal` is not read."""
    config = transformers.LlamaConfig(attention_chunk_size=None)
    q, k, v = (torch.randn(2, 4, 12, 16) for _ in range(3))
    q_last = q[:, :, -5:]
    mask = ringattn.huggingface.attention_mask
    cases = {
        "no mask": (q, lambda: None),
        "causal": (q, lambda: mask(2, 12, 12, config=config)),
        "last queries": (q_last, lambda: mask(2, 5, 12, q_offset=7, config=config)),
        "everything": (q, lambda: mask(2, 12, 12, mask_function=masking.bidirectional_mask_function, config=config,
                                       allow_is_causal_skip=False, allow_is_bidirectional_skip=True)),
        "window": (q, lambda: mask(2, 12, 12, mask_function=masking.sliding_window_causal_mask_function(4),
                                   local_size=4, config=config)),
        "window to both sides": (q, lambda: mask(
            2, 12, 12, mask_function=masking.sliding_window_bidirectional_mask_function(3), local_size=3,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=True, config=config)),
        "of no known form": (q, lambda: mask(2, 12, 12, mask_function=lambda b, h, i, j: (i + j) % 3 != 1,
                                             allow_is_causal_skip=False, config=config)),
        "another mask function": (q, lambda: mask(2, 12, 12, mask_function=lambda b, h, i, j: j <= i // 2,
                                              config=config)),
    }
    if compiled:
        del cases["another mask function"]
    distance = torch.arange(12)[None] - torch.arange(12)[:, None]
    seen = {"no mask": distance < 99, "causal": distance <= 0, "last queries": (distance <= 0)[-5:],
            "everything": distance < 99, "window": (distance <= 0) & (distance > -4),
            "window to both sides": distance.abs() <= 3,
            "of no known form": (torch.arange(12)[None] + torch.arange(12)[:, None]) % 3 != 1,
            "another mask function": torch.arange(12)[None] <= torch.arange(12)[:, None] // 2}
    for name, (queries, make) in cases.items():
        def run(queries, make=make):
            return ringattn.huggingface.attention_forward(Module(is_causal), queries, k, v, make())[0]

        if compiled:
            torch._dynamo.reset()
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        exact = eager_attention(queries, k, v, torch.where(seen[name], 0.0, -torch.inf))
        assert (run(queries) - exact).abs().max() < 1e-5, name


@pytest.mark.parametrize("use", [
    lambda mask: mask + 1.0, lambda mask: mask[:, :, 2:, :-1], lambda mask: torch.cat([mask, mask], -1),
    lambda mask: torch.where(mask < 0, 5.0, 1.0), lambda mask: mask.to(torch.float64), lambda mask: mask.clone(),
    lambda mask: mask.reshape(2, -1), lambda mask: torch.stack([mask.squeeze(1)]), lambda mask: mask.expand(2, 3, 12, 12),
    lambda mask: (mask == 0).sum(),
])
def test_models_that_compute_with_a_mask_get_eagers(use):
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, :5] = False
    for local_size in (None, 4):
        functions = (masking.causal_mask_function if local_size is None
                     else masking.sliding_window_causal_mask_function(local_size))
        arguments = dict(batch_size=2, q_length=12, kv_length=12, mask_function=functions, attention_mask=padding,
                         local_size=local_size)
        ours, eager = ringattn.huggingface.attention_mask(**arguments), masking.eager_mask(**arguments)
        assert ours.shape == eager.shape and ours.dtype == eager.dtype and ours.dim() == 4
        assert torch.equal(use(ours), use(eager))
        torch._dynamo.reset()
        compiled = torch.compile(lambda: use(ringattn.huggingface.attention_mask(**arguments)), fullgraph=True,
                                 backend="aot_eager")
        assert torch.equal(compiled(), use(eager))


@pytest.mark.parametrize("change", [
    lambda mask: mask.masked_fill_(mask == 0, -1.0), lambda mask: mask.__setitem__((..., 0), -1.0),
    lambda mask: mask.add_(1.0), lambda mask: mask.copy_(torch.ones(2, 1, 12, 12)), lambda mask: mask.__iadd__(1.0),
    lambda mask: torch.add(torch.ones(2, 1, 12, 12), 1.0, out=mask), lambda mask: setattr(mask, "data", torch.ones(1)),
])
def test_a_change_in_place_is_refused(change):
    """A mask has no matrix that could change; the change would be lost."""
    mask = ringattn.huggingface.attention_mask(2, 12, 12)
    with pytest.raises(NotImplementedError, match="attention_mask: is changed in place"):
        change(mask)
    copy = mask.clone()
    copy.masked_fill_(copy == 0, -1.0)  # a copy is the matrix
    assert torch.equal(copy, torch.where(masking.eager_mask(2, 12, 12) == 0, -1.0, torch.finfo(torch.float32).min))


def test_a_model_without_the_attention_interface_gets_eagers_mask():
    """Bloom adds the mask to scores itself. Booleans there would be ones and zeros."""
    eager, ours = pair_of(transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=101))
    ids = tokens()
    for mask in (None, padding("left"), padding("right")):
        exact, actual = (model(ids, attention_mask=mask).logits.detach() for model in (eager, ours))
        assert torch.equal(actual, exact)


@pytest.mark.parametrize("form", ["padding", "matrix", "bias"])
def test_documents_and_a_mask(form):
    """`cu_seq_lens` next to a mask: a query sees a key if both allow it."""
    _, ours = pair("llama")
    attention, tokens_ = ours.model.layers[0].self_attn, 20
    q, k, v = (torch.randn(1, 4, tokens_, 16) for _ in range(3))
    lengths = torch.tensor([0, 7, 15, 18], dtype=torch.int32)  # the last two tokens are of no document
    document = torch.tensor([0] * 7 + [1] * 8 + [2] * 3 + [-1] * 2)
    seen = (document[:, None] == document) & (document >= 0) & torch.ones(tokens_, tokens_).tril().bool()
    visible = torch.ones(1, tokens_, dtype=torch.bool)
    visible[0, [2, 9]] = False
    if form == "padding":
        mask = ringattn.huggingface.attention_mask(1, tokens_, tokens_, attention_mask=visible)
    else:
        causal = torch.ones(tokens_, tokens_).tril().bool() & visible
        mask = causal[None, None] if form == "matrix" else torch.where(causal, 0.0, -1e30)[None, None]
    out, _ = ringattn.huggingface.attention_forward(attention, q, k, v, mask, cu_seq_lens_q=lengths,
                                                    cu_seq_lens_k=lengths.clone())
    exact = eager_attention(q, k, v, torch.where(seen & visible, 0.0, -torch.inf)).nan_to_num()
    reference.close(out, exact, 1e-5)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        ringattn.huggingface.attention_forward(attention, q, k, v, mask, cu_seq_lens_q=lengths,
                                               cu_seq_lens_k=torch.tensor([0, 9, 15, 18]))


def test_documents_and_a_mask_in_a_model():
    eager, ours = pair("llama")
    ids = tokens()[:1]
    lengths, positions = torch.tensor([0, 15, 40]), torch.cat([torch.arange(15), torch.arange(25)])[None]
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 35:] = 0
    packed = ours(ids, attention_mask=mask, position_ids=positions, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths,
                  max_length_q=25, max_length_k=25).logits.detach()
    reference.close(packed[:, :15], eager(ids[:, :15]).logits.detach(), 1e-5)
    reference.close(packed[:, 15:35], eager(ids[:, 15:35]).logits.detach(), 1e-5)


def test_a_mask_that_all_queries_share():
    _, ours = pair("llama")
    attention, padding_ = ours.model.layers[0].self_attn, torch.ones(2, 9, dtype=torch.bool)
    padding_[1, :4] = False
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    exact = eager_attention(q, k, v, torch.where(padding_, 0.0, -torch.inf)[:, None, None])
    masks = [ringattn.huggingface.attention_mask(2, 1, 9, mask_function=masking.bidirectional_mask_function,
                                                 attention_mask=padding_, allow_is_causal_skip=False,
                                                 allow_is_bidirectional_skip=True)]
    for mask in masks + [padding_[:, None, None], masks[0] + 0.0]:
        out, _ = ringattn.huggingface.attention_forward(attention, q, k, v, mask)
        reference.close(out, exact, 1e-5)
