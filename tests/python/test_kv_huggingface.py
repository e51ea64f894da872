"""Generation with a K/V cache on workers: the tokens equal those of eager attention with transformers' own cache."""
import os
import warnings

import pytest

reason = os.environ.get("RINGATTN_NO_TORCH") or None
torch = pytest.importorskip("torch", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

import torch.autograd.forward_ad as forward_ad  # noqa: E402

import ringattn  # noqa: E402
import ringattn.huggingface  # noqa: E402
from lib import small_models  # noqa: E402
from lib.small_models import MODELS, SIZE, registered  # noqa: E402, F401

ALL = pytest.mark.parametrize("name", MODELS)


def pair(name, **more):
    return small_models.pair(name, **{"bos_token_id": 1, "eos_token_id": None, **more})


def padded(batch=3, tokens=20):
    ids, mask = torch.randint(3, SIZE["vocab_size"], (batch, tokens)), torch.ones(batch, tokens, dtype=torch.long)
    for row in range(batch - 1):
        mask[row, :5 - 3 * row] = 0
    return ids, mask


def same(client, models, ids, cache_options=None, **options):
    """Generates with both. Returns ours, with its cache's number of steps."""
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    want = models[0].generate(ids, **options)
    with ringattn.KvCache(client, models[1].config, **(cache_options or {})) as cache, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no decoding without the cache
        got = models[1].generate(ids, past_key_values=cache, **options)
        steps = cache.worker_cache._writer().step
    assert torch.equal(want, got), (want, got)
    return got, steps


@ALL
@pytest.mark.parametrize("transport", ["direct", "relay"])
def test_greedy_with_left_padding(client, name, transport):
    ids, mask = padded()
    _, steps = same(client, pair(name), ids, {"transport": transport}, attention_mask=mask)
    assert steps == 12  # one for each token


@ALL
def test_beams_and_several_returns(client, name):
    models, (ids, mask) = pair(name), padded()
    same(client, models, ids, attention_mask=mask, num_beams=3)
    same(client, models, ids, attention_mask=mask, num_beams=4, num_return_sequences=2, world_size=None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_workers(client, world_size):
    ids, mask = padded()
    same(client, pair("llama"), ids, {"world_size": world_size, "block_tokens": 16}, attention_mask=mask, num_beams=2)


@ALL
def test_position_parts_of_one_kv_head(client, name):
    ids, mask = padded()
    with_parts = {"world_size": 2, "block_tokens": 32, "divide_blocks": True}
    same(client, pair(name, num_key_value_heads=1), ids, with_parts, attention_mask=mask, num_beams=2)


def test_sampling(client):
    models, (ids, mask) = pair("llama"), padded()
    options = {"attention_mask": mask, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8}
    torch.manual_seed(3)
    want = models[0].generate(ids, **options)
    torch.manual_seed(3)
    with ringattn.KvCache(client, models[1].config) as cache:
        assert torch.equal(want, models[1].generate(ids, past_key_values=cache, **options))


@ALL
def test_prompt_lookup_drafts(client, name):
    ids = torch.tensor([[5, 6, 7, 8] * 6])
    _, steps = same(client, pair(name), ids, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert 1 < steps <= 21  # the prompt, and at most one for each token


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_assisted_drafts(client, name):
    models = pair(name)
    assistant = pair(name, num_hidden_layers=1)[0]
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    _, steps = same(client, models, torch.randint(3, 101, (1, 20)), max_new_tokens=20, assistant_model=assistant)
    assert 5 <= steps <= 21  # at most four tokens each


def test_chunked_prefill(client):
    ids, mask = padded(tokens=50)
    _, steps = same(client, pair("llama"), ids, attention_mask=mask, prefill_chunk_size=16)
    assert steps == 4 + 11


def test_a_conversation_goes_on_with_its_cache(client):
    eager, ours = pair("gemma2")
    first, more = torch.randint(3, 101, (1, 20)), torch.randint(3, 101, (1, 6))
    own = transformers.DynamicCache(config=eager.config)
    with ringattn.KvCache(client, ours.config) as cache:
        ids = first
        for _ in range(3):
            want = eager.generate(ids, past_key_values=own, max_new_tokens=5, do_sample=False)
            got = ours.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
            assert torch.equal(want, got)
            ids = torch.cat([got, more], 1)
        cache.reset()
        got = ours.generate(first, past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert torch.equal(got, eager.generate(first, max_new_tokens=5, do_sample=False))


def test_logits_and_batch_operations(client):
    eager, ours = pair("llama")
    ids = torch.randint(3, 101, (2, 10))
    own = transformers.DynamicCache(config=eager.config)
    with torch.no_grad(), ringattn.KvCache(client, ours.config) as cache:
        def both(tokens):
            want = eager(tokens, past_key_values=own, use_cache=True).logits
            got = ours(tokens, past_key_values=cache, use_cache=True).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

        both(ids)
        for operation, argument, rows in (("batch_repeat_interleave", 2, 4),
                                          ("batch_select_indices", torch.tensor([3, 0, 2]), 3),
                                          ("reorder_cache", torch.tensor([1, 1, 0]), 3)):
            for either in (own, cache):
                getattr(either, operation)(argument)
            both(torch.randint(3, 101, (rows, 3)))
        for either in (own, cache):
            either.crop(-4)
        both(torch.randint(3, 101, (3, 2)))
        assert len(cache.worker_cache.sequences) == 3
        assert set(cache.worker_cache.sequences.values()) == {cache.get_seq_length()}


def test_bfloat16(client):
    models = [model.to(torch.bfloat16) for model in pair("llama")]
    ids = torch.randint(3, 101, (1, 20))
    with torch.no_grad(), ringattn.KvCache(client, models[1].config) as cache:
        want = models[0](ids).logits.float()
        got = models[1](ids, past_key_values=cache).logits.float()
    assert (want - got).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_autocast(client, dtype, bound):
    """Rotary embeddings leave q and k in float32 next to a v of the lower type."""
    eager, ours = pair("llama")
    ids = torch.randint(3, 101, (2, 12))
    exact = eager(ids).logits.detach()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype), ringattn.KvCache(client, ours.config) as cache:
        pieces = [ours(ids[:, begin:end], past_key_values=cache).logits.float() for begin, end in ((0, 9), (9, 12))]
        assert cache.worker_cache._spec["dtype"] == str(dtype).removeprefix("torch.")
    got = torch.cat(pieces, 1)
    assert (got - exact).norm() < bound * exact.norm()


# ------------------------------------------------------------------ what is refused


def test_a_full_cache_is_a_typed_error(client):
    ours = pair("llama")[1]
    with ringattn.KvCache(client, ours.config, tokens=16, block_tokens=16) as cache:
        with pytest.raises(ringattn.StepRefusedError, match="KV_FULL"):
            ours.generate(torch.randint(3, 101, (1, 20)), past_key_values=cache, max_new_tokens=60, do_sample=False)


def test_what_is_not_served_is_refused_by_name(client):
    eager, ours = pair("llama")
    ids = torch.randint(3, 101, (2, 6))
    with pytest.raises(ValueError, match="attn_implementation"):
        ringattn.KvCache(client, eager.config)
    right = torch.ones(2, 6, dtype=torch.long)
    right[0, 4:] = 0
    full = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    for options, name in (({"attention_mask": right}, "attention_mask"), ({"attention_mask": full}, "attention_mask"),
                          ({"output_attentions": True}, "output_attentions")):
        with torch.no_grad(), ringattn.KvCache(client, ours.config) as cache:
            with pytest.raises(NotImplementedError, match=name):
                ours(ids, past_key_values=cache, **options)
    with ringattn.KvCache(client, ours.config) as cache:
        with pytest.raises(NotImplementedError, match="requires_grad"):
            ours(ids, past_key_values=cache)
    # Gradients of one tensor alone: adapters of a frozen model.
    for name, tensor in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        adapted = pair("llama")[1].requires_grad_(False)
        getattr(adapted.model.layers[0].self_attn, name).requires_grad_(True)
        with ringattn.KvCache(client, adapted.config) as cache:
            with pytest.raises(NotImplementedError, match=f"requires_grad: {tensor} "):
                adapted(ids, past_key_values=cache)
    with torch.no_grad(), ringattn.KvCache(client, ours.config) as cache, forward_ad.dual_level():
        embedded = ours.get_input_embeddings()(ids)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ours(inputs_embeds=forward_ad.make_dual(embedded, torch.ones_like(embedded)), past_key_values=cache)
    with torch.no_grad(), ringattn.KvCache(client, ours.config) as cache:
        ours(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="rows"):
            ours(ids[:1], past_key_values=cache)
        cache.close()
        with pytest.raises(RuntimeError, match="closed"):
            ours(ids, past_key_values=cache)


def test_attention_that_bypasses_the_cache_is_an_error(client):
    ours = pair("llama")[1]
    ids = torch.randint(3, 101, (1, 6))
    with torch.no_grad(), ringattn.KvCache(client, ours.config) as cache:
        ours.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="attn_implementation"):
            ours(ids, past_key_values=cache)


def test_decoding_without_a_cache_warns_once(client, monkeypatch):
    monkeypatch.setattr(ringattn.huggingface, "_warned_of_decoding", False)
    ours = pair("llama")[1]
    ids = torch.randint(3, 101, (1, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.generate(ids, max_new_tokens=4, do_sample=False)
        ours.generate(ids, max_new_tokens=4, do_sample=False)
    found = [str(warning.message) for warning in caught if "KvCache" in str(warning.message)]
    assert len(found) == 1 and "past_key_values=ringattn.KvCache(client, model.config)" in found[0]
