"""Tiny models with random weights, with our attention and with eager's."""
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 101, "intermediate_size": 64, "max_position_embeddings": 256, "pad_token_id": 0,
        "initializer_range": 0.3}  # large, for attention that is not nearly uniform
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 3.0,
                                           "query_pre_attn_scalar": 9}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "gpt_oss": (transformers.GptOssConfig, {"head_dim": 16, "sliding_window": 9, "num_local_experts": 2,
                                            "num_experts_per_tok": 1}),
}


@pytest.fixture(autouse=True)
def default_client(client):
    torch.manual_seed(0)
    ringattn.huggingface.register()
    ringattn.set_default_client(client)
    yield client
    ringattn.set_default_client(None)


def pair(name, **more):
    """(eager's, ours): the same weights."""
    kind, options = MODELS[name]
    models = [transformers.AutoModelForCausalLM.from_config(
        kind(**SIZE, **options, **more), attn_implementation=implementation).train(False)
        for implementation in ("eager", "ringattn")]
    models[1].load_state_dict(models[0].state_dict())
    return models


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
    for name in ("head_mask", "cache"):
        with pytest.raises(NotImplementedError, match=name):
            ringattn.huggingface.attention_forward(attention, q, q, q, None, **{name: object()})
    lengths = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        ringattn.huggingface.attention_forward(attention, *[q.expand(2, -1, -1, -1)] * 3, None, cu_seq_lens_q=lengths,
                                               cu_seq_lens_k=lengths)


def test_a_model_that_hides_its_window_is_refused():
    _, ours = pair("gemma2")
    attention, q = ours.model.layers[0].self_attn, torch.randn(1, 4, 8, 16)
    assert ours.config.layer_types[0] == "sliding_attention"
    with pytest.raises(NotImplementedError, match="sliding_window"):
        ringattn.huggingface.attention_forward(attention, q, q, q, None, sliding_window=None)
