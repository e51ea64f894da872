"""Tiny models with random weights, with our attention and with eager's."""
import copy
import os

import pytest
import reference

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

from lib.small_models import MODELS, SIZE, padding, pair, pair_of, registered, tokens  # noqa: E402, F401


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


def chunked_pair():
    """Llama 4 with chunks of eight tokens."""
    config = transformers.Llama4TextConfig(
        **SIZE, head_dim=16, intermediate_size_mlp=64, num_local_experts=2, num_experts_per_tok=1,
        attention_chunk_size=8, no_rope_layers=[1, 0], interleave_moe_layer_step=2)
    return pair_of(config, transformers.Llama4ForCausalLM)


def windowed_pair():
    """Mistral with a window of nine tokens."""
    return pair("mistral")


@pytest.mark.parametrize("make", [chunked_pair, windowed_pair])
@pytest.mark.parametrize("pieces", [[21], [5, 7, 4, 5], [9, 1, 1, 1, 9], [8, 8, 5], [1, 16, 4]])
def test_a_prompt_in_pieces_with_a_cache_that_rolls(make, pieces):
    eager, ours = make()
    ids = torch.randint(1, SIZE["vocab_size"], (2, sum(pieces)))
    with torch.no_grad():
        whole = eager(ids).logits
        for implementation in (None, "static"):
            caches = [transformers.DynamicCache(config=model.config) if implementation is None else
                      transformers.StaticCache(config=model.config, max_cache_len=40) for model in (eager, ours)]
            begin = 0
            for piece in pieces:
                exact, actual = (model(ids[:, begin:begin + piece], past_key_values=cache).logits
                                 for model, cache in zip((eager, ours), caches))
                reference.close(actual, exact, 1e-5)
                reference.close(actual, whole[:, begin:begin + piece], 1e-4)
                begin += piece


@pytest.mark.parametrize("make", [chunked_pair, windowed_pair])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generation_past_a_chunk_and_a_window(make, options):
    ids, mask = torch.randint(1, SIZE["vocab_size"], (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    eager, ours = (model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, **options)
                   for model in make())
    assert torch.equal(eager, ours)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_chunks_of_a_cache_that_rolls(side):
    """Llama 4, token by token past the chunk's end: keys of the chunk before are not seen."""
    eager, ours = chunked_pair()
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
