"""Residuals under autograd: fewer bytes, the same gradients, nothing left behind."""
import gc
import os
import threading

import pytest
import reference
from conftest import wait_until

torch = pytest.importorskip("torch", reason=os.environ.get("RINGATTN_NO_TORCH") or None)

from torch.utils.checkpoint import checkpoint  # noqa: E402

import ringattn  # noqa: E402
from ringattn._graph_calls import keeper  # noqa: E402

B, S, H, HKV, D = 2, 50, 4, 2, 16


class Log:
    """Calls of a client as they are made, with their reports."""

    def __init__(self, client, monkeypatch):
        self.forwards, self.backwards, self.deleted = [], [], []
        kind = type(client)
        forward, backward, delete = kind.forward, kind.backward, kind.delete_residual

        def logged_forward(*arguments, **options):
            result = forward(*arguments, **options)
            self.forwards.append(result.report)
            return result

        def logged_backward(*arguments, **options):
            result = backward(*arguments, **options)
            # The tensors among them would keep the graph.
            kept = {name: options.get(name) for name in ("residual", "keep_residual")}
            self.backwards.append((kept, result.report))
            return result

        def logged_delete(client, residual, **options):
            self.deleted.append(residual)
            return delete(client, residual, **options)

        monkeypatch.setattr(kind, "forward", logged_forward)
        monkeypatch.setattr(kind, "backward", logged_backward)
        monkeypatch.setattr(kind, "delete_residual", logged_delete)

    def residuals(self):
        return [report.residual for report in self.forwards if report.residual is not None]


@pytest.fixture(autouse=True)
def residuals_end(default_client):
    yield
    gc.collect()  # an error and its frames hold each other, and the graph
    wait_until(lambda: len(keeper) == 0, 20, "every residual was used or deleted")


@pytest.fixture
def log(default_client, monkeypatch):
    return Log(default_client, monkeypatch)


def leaves(dtype=torch.float32):
    return [torch.randn(B, S, heads, D).to(dtype).requires_grad_() for heads in (H, HKV, HKV)]


def gradients(inputs, **options):
    out, lse = ringattn.attention(*inputs, causal=True, **options)
    return torch.autograd.grad(out.square().sum() + lse.sum(), inputs)


@pytest.mark.parametrize("mode", ["auto", "remote"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_stateless_ones(log, mode, dtype):
    inputs = leaves(dtype)
    expected = gradients(inputs, residual="off")
    assert log.residuals() == []
    ours = gradients(inputs, residual=mode)
    assert all((a == b).all() for a, b in zip(ours, expected))
    sent = log.backwards[-1][1]
    # dout and dlse, and nothing of the rest.
    assert sent.bytes_up == B * S * H * (D * inputs[0].element_size() + 4) and sent.residual_failure == ""
    assert len(log.residuals()) == 1 and log.deleted == []


@pytest.mark.parametrize("mode", ["auto", "remote", "off"])
@pytest.mark.parametrize("plan", [{"schedule": "ring", "world_size": 1}, {"members": "all"}, {"key_splits": 1}])
def test_a_default_plan_serves_both_directions(default_client, log, mode, plan):
    """The backward gets the forward's plan: its members, a single device, and options of the forward alone."""
    inputs = leaves()
    ringattn.set_default_client(default_client, world_size=2)
    ringattn.attention(*inputs, residual="off")
    if "members" in plan:
        plan = {"members": list(log.forwards[-1].plan.members)}
    ringattn.set_default_client(default_client, residual=mode, **plan)
    out, lse = ringattn.attention(*inputs, causal=True)
    torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
    assert log.backwards[-1][1].residual_failure == ""


def test_bias_and_sinks(log):
    inputs = leaves()
    bias, sinks = torch.randn(1, H, S, S, requires_grad=True), torch.randn(H, requires_grad=True)
    wanted = [*inputs, bias, sinks]

    def run(mode):
        out, _ = ringattn.attention(*inputs, bias=bias, sinks=sinks, dropout_p=0.2,
                                    dropout_seed=torch.tensor([5]), residual=mode)
        return torch.autograd.grad(out.square().sum(), wanted)

    expected = run("off")
    for mode in ("auto", "remote"):
        assert all((a == b).all() for a, b in zip(run(mode), expected))
        assert log.backwards[-1][1].bytes_up == B * S * H * D * 4


def test_only_what_will_be_differentiated_is_kept(log):
    q, k, v = leaves()
    with torch.no_grad():
        ringattn.attention(q, k, v)
    ringattn.attention(q.detach(), k.detach(), v.detach())
    with torch.inference_mode():
        ringattn.attention(q, k, v)
    assert len(log.forwards) == 3 and log.residuals() == []
    ringattn.attention(q.detach(), k, v.detach())[0].sum().backward()
    assert len(log.residuals()) == 1


@pytest.mark.parametrize("mode", ["auto", "remote"])
def test_a_graph_that_is_dropped_lets_go_of_it(default_client, log, mode):
    inputs = leaves()
    out, lse = ringattn.attention(*inputs, residual=mode)
    residual, = log.residuals()
    assert default_client.renew_residuals([residual]) == [""]
    del out
    gc.collect()
    assert default_client.renew_residuals([residual]) == [""]  # lse is of the graph, too
    del lse
    gc.collect()
    wait_until(lambda: log.deleted == [residual.handle], 10, "it is deleted")
    wait_until(lambda: default_client.renew_residuals([residual]) == ["RESIDUAL_CONSUMED"], 10, "it is gone")


def test_retain_graph_keeps_it(log):
    inputs = leaves()
    out, _ = ringattn.attention(*inputs, causal=True)
    loss = out.square().sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs[0], retain_graph=True)
    third = torch.autograd.grad(loss, inputs)
    assert all((a == b).all() for a, b in zip(first, third)) and (second[0] == first[0]).all()
    assert [options["keep_residual"] for options, _ in log.backwards] == [True, True, False]
    assert all(report.residual_failure == "" for _, report in log.backwards)
    assert log.deleted == []


def test_a_lost_one_costs_bytes_not_the_step(default_client, log):
    inputs = leaves()
    expected = gradients(inputs, residual="off")
    out, lse = ringattn.attention(*inputs, causal=True)
    default_client.delete_residual(log.residuals()[0])
    ours = torch.autograd.grad(out.square().sum() + lse.sum(), inputs)
    assert all((a == b).all() for a, b in zip(ours, expected))
    assert log.backwards[-1][1].residual_failure == "RESIDUAL_CONSUMED"


def test_remote_has_nothing_to_fall_back_on(default_client, log):
    inputs = leaves()
    out, _ = ringattn.attention(*inputs, residual="remote")
    saved = [t for t in _saved_tensors(out.grad_fn) if t.numel() == inputs[0].numel()]
    assert saved == []
    default_client.delete_residual(log.residuals()[0])
    with pytest.raises(ringattn.FailedPreconditionError) as error:
        out.sum().backward()
    assert error.value.reason == "RESIDUAL_CONSUMED"
    keeper.forget(log.residuals()[0].handle)


def _saved_tensors(node):
    return [t for t in getattr(node, "saved_tensors", ()) if t is not None]


def test_modes(default_client, log):
    ringattn.set_default_client(default_client, residual="off")
    gradients(leaves())
    assert log.residuals() == []
    gradients(leaves(), residual="auto")
    assert len(log.residuals()) == 1
    with pytest.raises(ValueError, match="residual"):
        ringattn.attention(*leaves(), residual="maybe")
    with pytest.raises(ValueError, match="residual"):
        ringattn.set_default_client(default_client, residual="maybe")


def test_double_backward_is_refused_by_name(log):
    inputs = leaves()
    out, _ = ringattn.attention(*inputs)
    gradient, = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_does_not_leak(default_client, log, use_reentrant):
    inputs = leaves()

    def layer(q, k, v):
        return ringattn.flash_attn_func(q.sin(), k, v, causal=True)

    expected = torch.autograd.grad(layer(*inputs).square().sum(), inputs)
    del log.forwards[:], log.backwards[:]
    out = checkpoint(layer, *inputs, use_reentrant=use_reentrant)
    # The first run's residuals are released.
    wait_until(lambda: len(keeper) == 0, 10, "no residual kept")
    out.square().sum().backward()
    assert all((a.grad == b).all() for a, b in zip(inputs, expected))
    assert len(log.forwards) == 2 and len(log.backwards) == 1
    assert log.backwards[0][1].residual_failure == "" and log.backwards[0][1].bytes_up == B * S * H * D * 4
    assert len(log.residuals()) == (1 if use_reentrant else 2)


def test_compiled(log):
    inputs = leaves()

    def model(q, k, v):
        return (ringattn.flash_attn_func(q * 2, k, v, causal=True) ** 2).sum()

    expected = torch.autograd.grad(model(*inputs), inputs)
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for _ in range(2):
            ours = torch.autograd.grad(compiled(*inputs), inputs)
            assert all((a == b).all() for a, b in zip(ours, expected))
            assert log.backwards[-1][1].bytes_up == B * S * H * D * 4


def test_from_several_threads(log):
    inputs = leaves()
    expected = gradients(inputs, residual="off")
    failures = []

    def work():
        mine = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        for _ in range(5):
            if not all((a == b).all() for a, b in zip(gradients(mine), expected)):
                failures.append("different")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and log.deleted == []


def test_an_accumulated_step(log):
    """Several layers, several micro-batches: each residual is read once."""
    inputs = leaves()
    for _ in range(3):
        out = ringattn.flash_attn_func(*inputs, causal=True)
        for _ in range(3):
            out = ringattn.flash_attn_func(out, inputs[1], inputs[2], causal=True)
        out.square().mean().backward()
    assert len(log.residuals()) == len(log.backwards) == 12
    assert all(report.residual_failure == "" for _, report in log.backwards)
    reference.close(inputs[0].grad, inputs[0].grad, 0)  # no NaN


@pytest.mark.parametrize("mode", ["auto", "remote"])
def test_a_graph_holds_what_it_needs(default_client, monkeypatch, mode):
    """However long until the backward; and no longer than the graph."""
    held = set()
    kind = type(default_client)
    hold, release = kind.hold_residuals, kind.release_residuals

    def logged_hold(client, residuals):
        held.update(residual.handle for residual in residuals)
        hold(client, residuals)

    def logged_release(client, residuals):
        held.difference_update(residuals)
        release(client, residuals)

    monkeypatch.setattr(kind, "hold_residuals", logged_hold)
    monkeypatch.setattr(kind, "release_residuals", logged_release)
    q, k, v = leaves()
    out, _ = ringattn.attention(q, k, v, residual=mode)
    (residual,) = [keeper.find(handle) for handle in held]
    assert residual is not None and len(held) == 1 and default_client.hold_trouble is None
    out.sum().backward()
    assert held == set()
    out = ringattn.attention(q, k, v, residual=mode)[0]
    assert len(held) == 1
    del out
    gc.collect()
    wait_until(lambda: not held, 10, "a dropped graph holds nothing")
