"""Tiny models with random weights, with our attention and with eager's."""
import copy
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib.small_models import MODELS, SIZE, pair, registered  # noqa: E402, F401
from transformers import masking_utils as masking  # noqa: E402


def tokens():
    return torch.randint(1, SIZE["vocab_size"], (3, 40))


def padding(side):
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :11], mask[1, :3] = 0, 0
    return mask if side == "left" else mask.flip(1)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_eagers(name, side):
    models = pair(name)
    ids = tokens()
    mask = None if side is None else padding(side)
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    logits, gradients = [], []
    for model in models:
        logits.append(model(ids, attention_mask=mask).logits[real])
        logits[-1].square().mean().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    reference.close(logits[1].detach(), logits[0].detach(), 1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        reference.close(gradients[1][key], gradient, 1e-4)


def test_bfloat16():
    eager, ours = pair("gemma2")
    ids = tokens()
    exact = eager(ids).logits
    errors = [((model.bfloat16()(ids).logits.float() - exact).norm() / exact.norm()).item() for model in (eager, ours)]
    assert errors[1] <= 1.5 * errors[0] + 1e-3, errors


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_with_left_padding(name, cache):
    ids, mask = tokens(), padding("left")
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    if cache:
        options["cache_implementation"] = cache
    with torch.no_grad():
        eager, ours = (model.generate(ids, **options) for model in pair(name))
    assert (eager == ours).all()


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


def test_an_encoder():
    options = {**SIZE, "type_vocab_size": 2}
    del options["num_key_value_heads"]
    config = transformers.BertConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    models = [transformers.AutoModel.from_config(config, attn_implementation=implementation).train(False)
              for implementation in ("eager", "ringattn")]
    models[1].load_state_dict(models[0].state_dict())
    ids, mask = tokens(), padding("right")
    results = [model(ids, attention_mask=mask).last_hidden_state[mask.bool()].detach() for model in models]
    reference.close(results[1], results[0], 1e-5)


def test_gradient_checkpointing():
    plain, ours = pair("gemma2")
    ids = tokens()
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for model in (plain, ours):
        model(ids, use_cache=False).logits.square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    reference.close(gradients[1], gradients[0], 1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_whole(padded):
    eager, ours = pair("gemma2")
    ids, mask = tokens(), padding("left") if padded else None
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    reference.close(compiled(ids, attention_mask=mask).logits[real].detach(),
                    eager(ids, attention_mask=mask).logits[real].detach(), 1e-5)


def test_dropout_is_ours_and_repeatable():
    _, ours = pair("llama", attention_dropout=0.3)
    ids = tokens()
    still = ours(ids).logits
    ours.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(ours(ids).logits)
    assert (runs[0] == runs[1]).all() and not (runs[0] == runs[2]).all() and not (runs[0] == still).all()


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


def eager_attention(q, k, v, mask=None, sinks=None):
    """transformers' eager attention, in fp64; q, k, v: [batch, heads, tokens, head_dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :k.shape[2]]
    return (weights @ v).transpose(1, 2)


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


@pytest.mark.parametrize("config, kind", [
    (transformers.FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=101), None),
    (transformers.GPTJConfig(n_embd=64, n_layer=1, n_head=4, vocab_size=101, rotary_dim=8), None),
    (transformers.GPTNeoConfig(hidden_size=64, num_layers=1, num_heads=4, vocab_size=101,
                               attention_types=[[["global"], 1]]), None),
    (transformers.BarkSemanticConfig(hidden_size=64, num_layers=1, num_heads=4), transformers.BarkSemanticModel),
], ids=["falcon", "gptj", "gpt_neo", "bark"])
def test_families_with_classes_for_attention_are_refused(config, kind):
    make = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=f"attn_implementation: 'ringattn' .*{config.model_type}.*eager"):
            make(copy.deepcopy(config), attn_implementation="ringattn")
    make(copy.deepcopy(config), attn_implementation="eager")(tokens())


def test_a_model_without_the_attention_interface_gets_eagers_mask():
    """Bloom adds the mask to scores itself. Booleans there would be ones and zeros."""
    eager, ours = pair_of(transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=101))
    ids = tokens()
    for mask in (None, padding("left"), padding("right")):
        exact, actual = (model(ids, attention_mask=mask).logits.detach() for model in (eager, ours))
        assert torch.equal(actual, exact)


def pair_of(config, kind=None):
    """(eager's, ours) of a configuration."""
    kind = kind or transformers.AutoModelForCausalLM
    models = [(kind.from_config if hasattr(kind, "from_config") else kind._from_config)(
        copy.deepcopy(config), attn_implementation=implementation).train(False)
        for implementation in ("eager", "ringattn")]
    models[1].load_state_dict(models[0].state_dict())
    return models


def both(models, *inputs, rows=None, **keywords):
    """Logits of the rows that count, of both models, must be equal; and gradients."""
    results = []
    for model in models:
        logits = model(*inputs, **keywords).logits
        logits = logits if rows is None else logits[rows]
        logits.square().mean().backward()
        results.append((logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    reference.close(results[1][0], results[0][0], 1e-5)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        reference.close(results[1][1][name], gradient, 2e-4)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_chunks_of_a_cache_that_rolls(side):
    """Llama 4, token by token past the chunk's end: keys of the chunk before are not seen."""
    config = transformers.Llama4TextConfig(
        **SIZE, head_dim=16, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=8, no_rope_layers=[1, 0], interleave_moe_layer_step=2)
    eager, ours = pair_of(config, transformers.Llama4ForCausalLM)
    ids = torch.randint(1, SIZE["vocab_size"], (2, 21))
    mask = None
    if side is not None:
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        mask = mask if side == "left" else mask.flip(1)
    both((eager, ours), ids, attention_mask=mask, rows=None if mask is None else mask.bool())
    if side == "right":
        return
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config) for model in (eager, ours)]
        for step in range(21):
            seen = None if mask is None else mask[:, :step + 1]
            exact, actual = (model(ids[:, step:step + 1], attention_mask=seen, past_key_values=cache).logits
                             for model, cache in zip((eager, ours), caches))
            rows = slice(None) if mask is None else mask[:, step].bool()
            reference.close(actual[rows], exact[rows], 1e-5)
        prompt = {"max_new_tokens": 20, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
        assert torch.equal(eager.generate(ids[:, :9], **{**prompt, "attention_mask": None if mask is None else
                                                         mask[:, :9]}),
                           ours.generate(ids[:, :9], **{**prompt, "attention_mask": None if mask is None else
                                                        mask[:, :9]}))


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


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(1, SIZE["vocab_size"], (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


TRAINED = {**MODELS, "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
           "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16})}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_step_of_the_trainer_in_bfloat16(name, tmp_path, monkeypatch):
    """Under `bf16=True` norms and rotary embeddings leave q and k in float32, next to a v in bfloat16."""
    pytest.importorskip("accelerate")
    monkeypatch.setitem(MODELS, name, TRAINED[name])
    seen, losses = set(), []
    forward = ringattn.huggingface.attention

    def spy(q, k, v, **options):
        seen.update((q.dtype, v.dtype))
        return forward(q, k, v, **options)

    monkeypatch.setattr(ringattn.huggingface, "attention", spy)
    for model in pair(name):
        arguments = transformers.TrainingArguments(
            output_dir=tmp_path, per_device_train_batch_size=4, max_steps=2, bf16=True, use_cpu=True, report_to=[],
            logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1, learning_rate=1e-2)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Data())
        trainer.train()
        losses.append(torch.tensor([[entry["loss"], entry["grad_norm"]]
                                    for entry in trainer.state.log_history if "grad_norm" in entry]))
    assert torch.bfloat16 in seen
    exact, actual = losses
    assert exact.shape == (2, 2)
    # bfloat16's own error, of the loss and of the gradients' norm.
    assert ((actual - exact).abs() < torch.tensor([0.01, 0.1]) * exact).all(), losses


def test_a_step_in_float16_with_scaled_gradients():
    eager, ours = pair("gemma2")
    ids, gradients = tokens(), []
    for model in (eager, ours):
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
        scaler.step(optimizer)
    reference.close(gradients[1], gradients[0], 2e-2)
