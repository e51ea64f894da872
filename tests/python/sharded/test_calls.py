"""Calls as one collective: request ids, groups, seeds, repeated and recomputed graphs, residuals, wrong arguments."""
import os
import threading

import pytest
import reference

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

import torch.distributed as dist  # noqa: E402
from sharded_cases import Case, call_on_rank, check, expected, tokens_of_rank  # noqa: E402

from ringattn._groups import Group, group_of  # noqa: E402

ZIGZAG = Case("zigzag_ring_flash_attn", lengths=(48,), options={"causal": True})


def request_ids(rank, world_size):
    group = group_of(None)
    numbers = [group.begin_forward() for _ in range(3)]
    first, second, _ = numbers
    backwards = [group.begin_backward(first, is_last=False), group.begin_backward(first, is_last=False),
                 group.begin_backward(second, is_last=True), group.begin_backward(first, is_last=True),
                 group.begin_backward(first, is_last=True)]
    assert group_of(dist.group.WORLD) is group
    other = group_of(dist.new_group(list(range(world_size))))
    return numbers, backwards, [group.id_of("forward", first), group.id_of("backward", first, 0),
                                group.id_of("backward", first, 1), other.id_of("forward", first)]


def test_request_ids_are_equal_on_all_ranks_and_used_once(ranks):
    results = ranks(4).run(request_ids)
    assert all(result == results[0] for result in results)
    numbers, backwards, ids = results[0]
    assert numbers == list(range(numbers[0], numbers[0] + 3)) and backwards == [0, 1, 0, 2, 0]
    assert len(set(ids)) == 4 and all(len(name) == 32 for name in ids)


def test_retained_graphs_are_counted_within_a_limit(monkeypatch):
    monkeypatch.setattr("ringattn._groups._MAX_RETAINED", 2)
    group = object.__new__(Group)
    group._lock, group._backwards = threading.Lock(), {}
    for call in range(4):
        assert group.begin_backward(call, is_last=False) == 0
    assert list(group._backwards) == [2, 3] and group.begin_backward(3, is_last=False) == 1


def in_subgroup(rank, world_size, members, case):
    group = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match="no member"):
            group_of(group)
        return None
    return call_on_rank(members.index(rank), len(members), case, group=group)


@pytest.mark.parametrize("members", [[1, 3], [2], [0, 1, 3]])
def test_a_group_of_some_ranks(ranks, members):
    case = Case("ring_flash_attn", lengths=(48,), options={"causal": True}, with_dlse=True)
    results = ranks(4).run(in_subgroup, members, case)
    wanted = expected(case)
    for index, member in enumerate(members):
        rows = tokens_of_rank(case, index, len(members)).numpy()
        for name, ours, whole in zip(("out", "lse", "dq", "dk", "dv"), results[member], wanted):
            reference.close(ours, whole.take(rows, -1 if name == "lse" else 1), 2e-5)


def with_drawn_dropout(rank, world_size, case, seed):
    torch.manual_seed(seed if rank == 0 else 100 + rank)
    first = call_on_rank(rank, world_size, case, dropout_p=0.5)
    torch.manual_seed(seed if rank == 0 else 200 + rank)
    return first, call_on_rank(rank, world_size, case, dropout_p=0.5)


def test_the_first_rank_draws_the_seed_of_dropout(ranks):
    """The same generator state of the first rank gives the same dropped pairs, and is one pattern of the whole."""
    for first, second in ranks(2).run(with_drawn_dropout, ZIGZAG, 7):
        assert all((ours == theirs).all() for ours, theirs in zip(first, second))
    torch.manual_seed(7)
    seed = int(torch.randint(0, 2**63 - 1, (1,)))
    case = Case(ZIGZAG.name, lengths=ZIGZAG.lengths, options={"causal": True, "dropout_p": 0.5, "dropout_seed": seed})
    whole = expected(case)
    for rank, (results, _) in enumerate(ranks(2).run(with_drawn_dropout, ZIGZAG, 7)):
        rows = tokens_of_rank(case, rank, 2).numpy()
        reference.close(results[0], whole[0].take(rows, 1), 2e-5)


def checkpointed(rank, world_size):
    from torch.utils.checkpoint import checkpoint

    from ringattn.ring_flash_attn import ring_flash_attn_qkvpacked_func

    torch.manual_seed(rank)
    qkv = torch.randn(1, 12, 3, 2, 8)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5 + rank)
        leaf = qkv.clone().requires_grad_()

        def layers(x):
            return ring_flash_attn_qkvpacked_func(x, dropout_p=0.4, causal=True).square()

        out = checkpoint(layers, leaf, use_reentrant=False) if recompute else layers(leaf)
        gradients.append(torch.autograd.grad(out.sum(), leaf)[0])
    return torch.equal(*gradients)


def test_activation_checkpointing_recomputes_the_same_dropout(ranks):
    assert ranks(2).run(checkpointed) == [True, True]


def backward_twice(rank, world_size):
    from ringattn.ring_flash_attn import stripe_flash_attn_func

    torch.manual_seed(rank)
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    out, lse, _ = stripe_flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    of_lse = torch.autograd.grad(lse.sum(), q, retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), q)[0]
    assert torch.equal(first, second) and not torch.equal(first, of_lse)
    out = stripe_flash_attn_func(q, q, q, causal=True)
    gradient, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()
    assert not stripe_flash_attn_func(q.detach(), q.detach(), q.detach(), causal=True).requires_grad
    return True


def test_retained_graphs_and_double_backward(ranks):
    assert ranks(2).run(backward_twice) == [True, True]


def with_residual(rank, world_size, mode, change):
    import contextlib

    import ringattn
    from ringattn import _default
    from ringattn._graph_calls import keeper
    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_func

    client = ringattn.default_client()
    sent = []
    backward = client.backward

    def counted(*tensors, **options):
        result = backward(*tensors, **options)
        sent.append(("q" in options, options.get("residual") is not None, result.report.residual_failure))
        return result

    client.backward = counted
    ringattn.set_default_client(client, residual=mode, deadline=60.0)
    try:
        tensors = [tensor.chunk(world_size, 1)[rank].clone().requires_grad_() for tensor in ZIGZAG.tensors()[:3]]
        copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
        others = set(keeper._kept)  # of earlier tests' graphs
        with copies if change == "hooks" else contextlib.nullcontext():
            out = zigzag_ring_flash_attn_func(*tensors, causal=True)

        def kept_now():
            return sum(keeper.find(handle) is not None for handle in set(keeper._kept) - others)

        kept = kept_now()
        if change == "deleted":
            dist.barrier()
            if rank == 0:
                client.delete_residual(*(set(keeper._kept) - others))
            dist.barrier()
        gradients = [torch.autograd.grad(out.square().sum(), tensors, retain_graph=change == "twice")]
        if change == "twice":
            gradients.append(torch.autograd.grad(out.square().sum(), tensors))
            assert all(torch.equal(first, second) for first, second in zip(*gradients))
        return kept, kept_now(), sent, [gradient.numpy() for gradient in gradients[0]]
    finally:
        del client.backward
        ringattn.set_default_client(client, deadline=60.0)
        assert _default.residual_mode == "auto"


@pytest.mark.parametrize("mode, change, kept, backwards", [
    ("off", "", 0, [(True, False)]), ("auto", "", 1, [(True, True)]), ("remote", "", 1, [(False, True)]),
    ("auto", "twice", 1, [(True, True)] * 2), ("remote", "twice", 1, [(False, True)] * 2),
    ("auto", "deleted", 1, [(True, True)]), ("auto", "hooks", 0, [(True, False)]),
])
def test_residuals(ranks, mode, change, kept, backwards):
    results = ranks(2).run(with_residual, mode, change)
    expected = ranks(2).run(with_residual, "off", "")
    for (before, after, sent, gradients), (*_, wanted) in zip(results, expected):
        assert (before, after) == (kept, 0) and [each[:2] for each in sent] == backwards
        assert bool(sent[0][2]) == (change == "deleted"), sent
        for ours, theirs in zip(gradients, wanted):
            assert (ours == theirs).all()


@pytest.mark.parametrize("change, match", [("deleted", "RESIDUAL_"), ("hooks", "RESIDUAL_DROPPED")])
def test_residuals_that_are_gone(ranks, change, match):
    for _, kind, text in ranks(2).outcomes(with_residual, "remote", change):
        assert kind in ("FailedPreconditionError", "NotFoundError") and match in text, (kind, text)
    check(ZIGZAG, ranks(2))


def compiled(rank, world_size):
    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_qkvpacked_func as plain

    torch.manual_seed(rank)
    qkv = torch.randn(1, 8, 3, 2, 8, requires_grad=True)

    @torch.compile(backend="eager")
    def layer(x):
        out, lse, _ = plain(x * 2, causal=True, return_attn_probs=True)
        return out.sin(), lse

    def eager(x):
        out, lse, _ = plain(x * 2, causal=True, return_attn_probs=True)
        return out.sin(), lse

    results = []
    for function in (layer, eager):
        out, lse = function(qkv)
        results.append([out, lse, torch.autograd.grad(out.sum() + lse.sum(), qkv)[0]])
    return all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_compile(ranks):
    assert ranks(2).run(compiled) == [True, True]


def under_autocast(rank, world_size):
    from ringattn.ring_flash_attn import ring_flash_attn_func

    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_flash_attn_func(q, q.bfloat16(), q)
    out.float().sum().backward()
    return out.dtype, q.grad.dtype


def test_autocast(ranks):
    assert ranks(2).run(under_autocast) == [(torch.bfloat16, torch.float32)] * 2


def of_other_lengths(rank, world_size):
    from ringattn.ring_flash_attn import ring_flash_attn_kvpacked_func

    generator = torch.Generator().manual_seed(3)
    q, kv = torch.randn(2, 12, 4, 8, generator=generator), torch.randn(2, 20, 2, 2, 8, generator=generator)
    return ring_flash_attn_kvpacked_func(q.chunk(world_size, 1)[rank], kv.chunk(world_size, 1)[rank], causal=True)


def test_other_numbers_of_keys(ranks):
    """Causal masks are aligned to the end of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    q, kv = torch.randn(2, 12, 4, 8, generator=generator), torch.randn(2, 20, 2, 2, 8, generator=generator)
    reference.close(torch.cat(ranks(2).run(of_other_lengths), 1),
                    reference.forward(q, kv[:, :, 0], kv[:, :, 1], causal=True)[0], 2e-5)


def wrong_call(rank, world_size, name, arguments, options):
    import ringattn.ring_flash_attn

    return getattr(ringattn.ring_flash_attn, name)(*arguments, **options)


ROWS = torch.zeros(6, 2, 8)


@pytest.mark.parametrize("name, arguments, options, kind, match", [
    ("zigzag_ring_flash_attn_func", [torch.zeros(1, 3, 2, 8)] * 3, {}, "InvalidArgumentError",
     "q: has 3 tokens of a sequence on each rank; zigzag needs an even number"),
    ("ring_flash_attn_func", [ROWS] * 3, {}, "InvalidArgumentError",
     "q: has the shape [6, 2, 8]; must be [batch, tokens, heads, head_dim]"),
    ("ring_flash_attn_qkvpacked_func", [torch.zeros(1, 6, 2, 2, 8)], {}, "InvalidArgumentError", "qkv: has the shape"),
    ("ring_flash_attn_kvpacked_func", [ROWS[None], [1]], {}, "TypeError", "kv: is a list"),
    ("ring_flash_attn_func", [ROWS[None], None, None], {}, "TypeError", "k: is missing"),
    ("ring_flash_attn_varlen_func", [ROWS] * 3 + [torch.tensor([0, 5]), 5], {}, "InvalidArgumentError",
     "cu_seqlens: ends with 5; q has 6 tokens"),
    ("ring_flash_attn_varlen_func", [ROWS] * 3 + [torch.tensor([0, 7, 6]), 5], {}, "InvalidArgumentError",
     "cu_seqlens: must begin with 0 and not decrease"),
    ("zigzag_ring_flash_attn_varlen_func", [ROWS] * 3 + [torch.tensor([0, 1, 6]), 5], {}, "InvalidArgumentError",
     "cu_seqlens: has 1 tokens of a sequence on each rank"),
    ("llama3_flash_attn_varlen_func", [ROWS] * 3 + [torch.tensor([0, 6])] * 2 + [6, 6, 1, None], {}, "TypeError",
     "local_k_slice: is None"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"window_size": 3}, "InvalidArgumentError", "window_size: is 3"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"group": 3}, "TypeError", "group: is an int"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"causal": "no"}, "InvalidArgumentError", "causal: is 'no'"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"deterministic": "no"}, "InvalidArgumentError", "deterministic: is 'no'"),
    ("ring_flash_attn_func", [torch.nested.nested_tensor([ROWS, ROWS[:3]])] * 3, {}, "InvalidArgumentError",
     "q: is a nested tensor"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"dropout_p": 0.1, "dropout_seed": -1}, "InvalidArgumentError",
     "dropout_seed: is -1"),
    ("ring_flash_attn_func", [ROWS[None]] * 3, {"dropout_p": 0.1, "dropout_seed": 0.5}, "InvalidArgumentError",
     "dropout_seed: is 0.5"),
])
def test_wrong_arguments(ranks, name, arguments, options, kind, match):
    for _, found, text in ranks(2).outcomes(wrong_call, name, arguments, options):
        assert found == kind and match in text, (found, text)


def with_other_options(rank, world_size):
    from ringattn.ring_flash_attn import ring_flash_attn_func

    q = torch.zeros(1, 8, 2, 8)
    return ring_flash_attn_func(q, q, q, causal=rank == 0)


def test_options_that_differ_between_ranks(ranks):
    for _, kind, text in ranks(2).outcomes(with_other_options):
        assert kind == "InvalidArgumentError" and "WRITERS_DIFFER" in text, text


def of_many_documents(rank, world_size, name, documents):
    import ringattn.ring_flash_attn

    offsets = torch.arange(documents + 1) * 2
    q = torch.ones(2 * documents, 1, 8)
    return getattr(ringattn.ring_flash_attn, name)(q, q, q, offsets, 2)


@pytest.mark.parametrize("name, most", [("ring_flash_attn_varlen_func", 1024), ("zigzag_ring_flash_attn_varlen_func", 512)])
def test_the_largest_number_of_documents(ranks, name, most):
    for out in ranks(2).run(of_many_documents, name, most):
        assert (out - 1).abs().max() < 1e-6
    for _, kind, text in ranks(2).outcomes(of_many_documents, name, most + 1):
        assert kind == "InvalidArgumentError" and "transport.writer" in text and "spans" in text, text


def test_calls_after_wrong_arguments(ranks):
    check(ZIGZAG, ranks(2))


def wrong_on_one_rank(rank, world_size):
    import ringattn
    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_func

    client = ringattn.default_client()
    ringattn.set_default_client(client, deadline=3.0)
    try:
        q = torch.zeros(1, 7 if rank else 8, 2, 8)
        return zigzag_ring_flash_attn_func(q, q, q, dropout_p=0.5)
    finally:
        ringattn.set_default_client(client, deadline=60.0)


def test_calls_after_one_rank_has_rejected_its_arguments(ranks):
    first, second = ranks(2).outcomes(wrong_on_one_rank)
    assert first[1] == "DeadlineExceededError", first
    assert second[1] == "InvalidArgumentError" and "q: has 7 tokens" in second[2], second
    check(ZIGZAG, ranks(2))


def mapped(rank, world_size):
    from ringattn.ring_flash_attn import ring_flash_attn_func

    q = torch.zeros(3, 1, 8, 2, 8)
    return torch.vmap(lambda q: ring_flash_attn_func(q, q, q))(q)


def test_vmap_is_refused(ranks):
    for _, kind, text in ranks(2).outcomes(mapped):
        assert kind == "NotImplementedError" and "q: torch.vmap" in text, text
