"""Names, arguments and defaults are those of ring_flash_attn and nnscaler. Unsupported arguments are refused by name."""
import inspect
import os

import pytest

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import ringattn.nnscaler  # noqa: E402
import ringattn.ring_flash_attn  # noqa: E402

NEEDED = inspect.Parameter.empty
OPTIONS = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("alibi_slopes", None),
           ("deterministic", False), ("return_attn_probs", False), ("group", None)]
TENSORS = {"": ["q", "k", "v"], "kvpacked_": ["q", "kv"], "qkvpacked_": ["qkv"]}
DOCUMENTS = {"varlen_": ["cu_seqlens", "max_seqlen"]}
LLAMA3 = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
SIGNATURES = {
    f"{prefix}_flash_attn_{form}{packing}func": [*tensors, *(LLAMA3 if prefix == "llama3" else DOCUMENTS.get(form, []))]
    for prefix, forms in (("ring", ("", "varlen_")), ("zigzag_ring", ("", "varlen_")), ("stripe", ("",)),
                          ("llama3", ("varlen_",)))
    for form in forms for packing, tensors in TENSORS.items()}
OTHERS = {
    "llama3_flash_attn_prepare_cu_seqlens": ["cu_seqlens", "causal", "rank", "world_size"],
    "substitute_hf_flash_attn": ["process_group", "heads_k_stride"],
    "update_ring_flash_attn_params": ["cu_seqlens", "process_group"],
}
OF_WRAPPERS = [("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False), ("process_group", None)]
DENSE = [("q", NEEDED), ("k", NEEDED), ("v", NEEDED), ("softmax_scale", None), ("dropout_p", 0.0), ("causal", True),
         ("window_size", (-1, -1)), *OF_WRAPPERS]
WRAPPERS = {
    "wrap_ring_attn_func": DENSE, "wrap_zigzag_attn_func": DENSE,
    "wrap_ring_attn_varlen_func": [("q", NEEDED), ("k", NEEDED), ("v", NEEDED), ("cu_seqlens_q", NEEDED),
                                   ("cu_seqlens_k", NEEDED), ("dropout_p", 0.0), ("softmax_scale", None),
                                   ("causal", False), ("window_size", (-1, -1)), *OF_WRAPPERS],
}


def positional(function):
    return [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(ringattn.ring_flash_attn, name)
    assert function.__name__ == function.__qualname__ == name and "whole sequence" in function.__doc__
    assert positional(function) == [(needed, NEEDED) for needed in SIGNATURES[name]] + OPTIONS


@pytest.mark.parametrize("name", OTHERS)
def test_signature_of_other_functions(name):
    assert positional(getattr(ringattn.ring_flash_attn, name)) == [(needed, NEEDED) for needed in OTHERS[name]]


@pytest.mark.parametrize("name", WRAPPERS)
def test_signature_of_wrappers(name):
    assert positional(getattr(ringattn.nnscaler, name)) == WRAPPERS[name]


def test_names_of_the_modules():
    assert sorted(ringattn.ring_flash_attn.__all__) == sorted([*SIGNATURES, *OTHERS])
    assert sorted(ringattn.nnscaler.__all__) == sorted(WRAPPERS)
    assert not hasattr(ringattn.ring_flash_attn, "stripe_flash_attn_varlen_func")


@pytest.mark.parametrize("name", WRAPPERS)
def test_unsupported_arguments_of_wrappers(name):
    q = torch.zeros(8, 2, 8) if "varlen" in name else torch.zeros(1, 8, 2, 8)
    documents = [torch.tensor([0, 16])] * 2 if "varlen" in name else []
    function = getattr(ringattn.nnscaler, name)
    with pytest.raises(NotImplementedError, match="^return_attn_probs: "):
        function(q, q, q, *documents, return_attn_probs=True, process_group=[0, 1])


@pytest.mark.parametrize("option, value", [("alibi_slopes", torch.ones(2)), ("softmax_scale", torch.tensor(0.1)),
                                           ("dropout_p", torch.tensor(0.1))])
def test_arguments_without_a_gradient(option, value):
    q = torch.zeros(1, 8, 2, 8)
    with pytest.raises(NotImplementedError, match=f"^{option}: requires a gradient"):
        ringattn.ring_flash_attn.ring_flash_attn_func(q, q, q, **{option: value.requires_grad_()})


def test_without_a_process_group():
    q = torch.zeros(1, 8, 2, 8)
    for call in (lambda: ringattn.ring_flash_attn.ring_flash_attn_func(q, q, q),
                 lambda: ringattn.nnscaler.wrap_ring_attn_func(q, q, q, process_group=[0, 1])):
        with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
            call()
