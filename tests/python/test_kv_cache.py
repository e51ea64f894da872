"""K/V caches through the installed package: results against numpy, errors by type, and flash-attn's function."""
import gc
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from conftest import BIN, wait_until
from kv_reference import Sequences, attend

import ringattn
from ringattn import LayerGroup, Row

SHAPE = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
HEADS = 4
WAYS = pytest.mark.parametrize("transport", ["direct", "relay"])


def make(client, **fields):
    fields = {**SHAPE, "dtype": "float32", "tokens": 1024, "block_tokens": 16, **fields}
    return client.create_cache(**fields)


class Driver:
    """A cache and its reference; every step is checked."""

    def __init__(self, cache, dtype=np.float32, tolerance=2e-5, kv_heads=2, **mask):
        self.cache, self.mask, self.tolerance = cache, mask, tolerance
        self.layers = {layer: Sequences(kv_heads, 16, dtype, layer) for layer in cache.layers}

    def step(self, rows, **commands):
        resolved = []
        first = next(iter(self.layers.values()))
        for row in rows:
            keep = first.length(row.sequence) if row.keep is None else row.keep
            resolved.append((row.sequence, keep, row.append))
        with self.cache.step(rows, **commands) as step:
            for layer, model in self.layers.items():
                q = model.draw(step.q_tokens, HEADS)
                k, v = model.draw(step.append_tokens), model.draw(step.append_tokens)
                model.write(resolved, k, v)
                out, lse = step.attend(layer, q, k, v, lse=True)
                assert isinstance(out, np.ndarray) and out.shape == q.shape and out.dtype == q.dtype
                at = 0
                for row in rows:
                    part = slice(at, at := at + row.q_tokens)
                    want, want_lse = attend(q[part], *model.contents[row.sequence], **self.mask)
                    np.testing.assert_allclose(out[part], want, rtol=self.tolerance, atol=self.tolerance)
                    np.testing.assert_allclose(lse[:, part], want_lse, rtol=1e-3, atol=1e-3)
        return step

    def fork(self, source, target, length):
        for model in self.layers.values():
            model.contents[target] = tuple(x[:length] for x in model.contents[source])


@WAYS
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_prefill_decode_and_rollback(client, transport, world_size):
    with make(client, transport=transport, world_size=world_size) as cache:
        assert cache.transport == transport
        assert len(cache.placement["members"]) == world_size
        driver = Driver(cache)
        driver.step([Row(1, 37)])
        driver.step([Row(1, 20), Row(7, 5)])
        for _ in range(4):
            driver.step([Row(1), Row(7)])
        step = driver.step([Row(1, 3, keep=50), Row(7, 1)])
        assert cache.sequences == {1: 53, 7: 10}
        assert len(step.reports) == 2 and step.reports[0].device_time > 0
        if world_size == 1:
            moved = step.reports[0]
            assert moved.sent_bytes == 4 * (HEADS + 2 + 2) * 16 * 4
            assert moved.received_bytes == 4 * HEADS * (16 + 1) * 4


@WAYS
def test_position_parts_divide_blocks(client, transport):
    with make(client, transport=transport, kv_heads=1, world_size=2, block_tokens=64, divide_blocks=True) as cache:
        assert cache.placement["position_parts"] == 2
        assert cache.placement["block_tokens"] == cache.spec["block_tokens"] == 32
        assert cache.bytes_per_worker == 2 * (1024 // 2) * (16 + 16) * 4  # layers, half of the entries, k and v
        driver = Driver(cache, kv_heads=1)
        driver.step([Row(1, 90), Row(2, 3)])
        for _ in range(8):
            driver.step([Row(1), Row(2)])
        driver.step([Row(1, 3, keep=70), Row(2)])


def test_the_coordinator_chooses_position_parts(client):
    # One query head: the rate of memory decides, which is a constant. Kernels have measured rates.
    long = {"layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "tokens": 65536, "block_tokens": 64}
    with make(client, **long) as cache:
        assert cache.placement["position_parts"] == 2 and "(predicted)" in cache.placement["reason"], cache.placement
    for fields in ({"divide_blocks": False}, {"tokens": 64}, {"world_size": 1}):
        with make(client, **{**long, **fields}) as cache:
            assert len(cache.placement["members"]) == 1, cache.placement


def test_forks_and_drops(client):
    with make(client, world_size=2) as cache:
        driver = Driver(cache)
        driver.step([Row(1, 40)])
        cache.fork(1, 2, 30)
        driver.fork(1, 2, 30)
        driver.step([Row(1), Row(2)])
        driver.fork(2, 3, 31)
        driver.step([Row(3, 2), Row(1)], fork=[(2, 3, 31)], drop=[2])
        assert cache.sequences == {1: 42, 3: 33}
        cache.drop(1)
        assert cache.sequences == {3: 33}


@pytest.mark.parametrize("mask", [{"window": 5}, {"softcap": 2.0}, {"causal": False}, {"softmax_scale": 0.5}],
                         ids=lambda mask: next(iter(mask)))
def test_masks_and_scores(client, mask):
    with make(client, **mask) as cache:
        mask = {"scale" if name == "softmax_scale" else name: value for name, value in mask.items()}
        driver = Driver(cache, **mask)
        driver.step([Row(1, 40)])
        driver.step([Row(1, 1), Row(2, 3)])


def test_sinks_and_partial_results(client):
    sinks = np.array([[0.5, -1.0, 2.0, 0.0]], np.float32)
    with make(client, layers=1, sinks=sinks) as cache:
        Driver(cache, sinks=sinks[0]).step([Row(1, 20)])
        model = Sequences(2, 16)
        q, k, v = model.draw(4, HEADS), model.draw(4), model.draw(4)
        out, lse = cache.step([Row(2, 4)]).attend(0, q, k, v, partial=True)
        want, want_lse = attend(q, k, v)  # without sinks
        np.testing.assert_allclose(out, want, atol=2e-5)
        np.testing.assert_allclose(lse, want_lse, atol=1e-3)


def test_groups_of_layers(client):
    groups = [LayerGroup([0, 2], 4, 2, 16, window=7), LayerGroup([1], 4, 2, 16)]
    with client.create_cache(groups=groups, dtype="float32", tokens=256, block_tokens=16) as cache:
        assert cache.layers == [0, 1, 2]
        model = Sequences(2, 16)
        for tokens in (20, 1, 1):
            step = cache.step([Row(1, tokens)])
            for layer in cache.layers:
                q, k, v = model.draw(tokens, HEADS), model.draw(tokens), model.draw(tokens)
                model.contents.setdefault(layer, (k[:0], v[:0]))
                model.write([(layer, model.length(layer), tokens)], k, v)
                want, _ = attend(q, *model.contents[layer], window=None if layer == 1 else 7)
                np.testing.assert_allclose(step.attend(layer, q, k, v), want, atol=2e-5)


def test_imports_and_reads(client):
    with make(client, layers=1) as cache:
        model = Sequences(2, 16)
        k, v = model.draw(30), model.draw(30)
        cache.step([Row(1, 30, queries=0)]).append(0, k, v)
        q = model.draw(4, HEADS)
        out = cache.step([Row(1, 0, queries=4)]).attend(0, q)
        np.testing.assert_allclose(out, attend(q, k, v)[0], atol=2e-5)


def test_blocks_numbering(client):
    with make(client, layers=1, numbering="blocks", tokens=None, blocks=8) as cache:
        model = Sequences(2, 16)
        q, k, v = model.draw(20, HEADS), model.draw(20), model.draw(20)
        out = cache.step([Row(1, 20, keep=0, tables=[(0, 0, [5, 2])])]).attend(0, q, k, v)
        np.testing.assert_allclose(out, attend(q, k, v)[0], atol=2e-5)
        more = model.draw(1, HEADS), model.draw(1), model.draw(1)
        # Another sequence starts after a prefix that it shares.
        out = cache.step([Row(2, 1, keep=16, tables=[(0, 0, [5, 3])])]).attend(0, *more)
        k, v = (np.concatenate([a[:16], b]) for a, b in ((k, more[1]), (v, more[2])))
        np.testing.assert_allclose(out, attend(more[0], k, v)[0], atol=2e-5)
        with pytest.raises(ringattn.InvalidArgumentError, match="keep"):
            cache.step([Row(1, 1)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(client, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    with make(client, dtype=dtype) as cache:
        driver = Driver(cache, kind, 4e-3 if dtype == "float16" else 3e-2)
        driver.step([Row(1, 30)])
        driver.step([Row(1)])


# ------------------------------------------------------------------ errors


def test_a_refused_step_changes_nothing(client):
    with make(client, tokens=64, world_size=2) as cache:
        driver = Driver(cache)
        driver.step([Row(1, 40)])
        step = cache.step([Row(1, 100), Row(2, 1)])
        model = driver.layers[0]
        with pytest.raises(ringattn.StepRefusedError, match="KV_FULL") as error:
            step.attend(0, model.draw(101, HEADS), model.draw(101), model.draw(101))
        assert error.value.rows[0]["reason"] == "KV_FULL" and error.value.rows[0]["blocks_missing"] > 0
        assert cache.sequences == {1: 40}
        driver.step([Row(1)])  # under the same number


def test_steps_must_be_complete(client):
    with make(client) as cache:
        model = Sequences(2, 16)
        tensors = model.draw(3, HEADS), model.draw(3), model.draw(3)
        step = cache.step([Row(1, 3)])
        step.attend(0, *tensors)
        with pytest.raises(ringattn.FailedPreconditionError, match="1 of 2 layers") as error:
            cache.step([Row(1, 1)])
        assert error.value.reason == "STEP_ORDER"
        step.attend(1, *tensors)
        step.attend(1, *tensors)  # again: computed again, not appended again
        cache.commit()
        assert cache.sequences == {1: 3}


def test_arguments_are_checked_by_name(client):
    for fields, name in (({"heads": 3}, "num_kv_heads"), ({"block_tokens": 17}, "block_tokens"),
                         ({"tokens": None}, "tokens"), ({"dtype": "int32"}, "dtype"), ({"window": 2.5}, "window"),
                         ({"head_dim": 16.5}, "head_dim"), ({"layers": [0, 1.5]}, "layers"), ({"layers": 2.5}, "layers"),
                         ({"tokens": 100.5}, "tokens"), ({"softcap": "1"}, "softcap"),
                         ({"sinks": np.ma.zeros((2, 4), np.float32)}, "sinks")):
        with pytest.raises(ringattn.InvalidArgumentError, match=name):
            make(client, **fields)
    with make(client) as cache:
        model = Sequences(2, 16)
        step = cache.step([Row(1, 3)])
        q, k, v = model.draw(3, HEADS), model.draw(3), model.draw(3)
        for wrong, name in (((q[:2], k, v), "q"), ((q, k[:, :1], v), "k"), ((q, k, v[..., :8]), "v"),
                            ((q.astype(np.float16), k, v), "q"), ((q, k, None), "v")):
            with pytest.raises(ringattn.InvalidArgumentError, match=f"^INVALID_ARGUMENT: {name}: "):
                step.attend(0, *wrong)
        with pytest.raises(ringattn.InvalidArgumentError, match="layer"):
            step.attend(2, q, k, v)
        for rows, options, name in (([Row(1, 2.5)], {}, "append_tokens"), ([Row(1.5, 2)], {}, "sequence"),
                                    ([Row(1, 2, queries=1.5)], {}, "q_tokens"), ([Row(1, 2, keep=1.5)], {}, "keep"),
                                    ([], {"drop": [1.5]}, "drop"), ([], {"fork": [(1, 2, 1.5)]}, "fork")):
            with pytest.raises(ValueError, match=f"{name}.*: is .*; must be a whole number"):
                cache.step(rows, **options)
        with pytest.raises(TypeError, match="q"):
            step.attend(0, [1.0], k, v)
        with pytest.raises(ringattn.InvalidArgumentError, match="k: is a numpy masked array"):
            step.attend(0, q, np.ma.masked_array(k, k > 0), v)


def test_members_that_are_no_strings(client):
    with pytest.raises(ValueError, match="members: is .*; must be a list of strings"):
        make(client, members=[1])


def test_a_second_writer_fences_the_first(client):
    with make(client) as cache:
        driver = Driver(cache)
        driver.step([Row(1, 10)])
        cache.commit()
        second = client.open_cache(cache.id)
        assert second.epoch > cache.epoch and second.sequences == {1: 10}
        with pytest.raises(ringattn.CacheFencedError) as error:
            driver.step([Row(1)])
        assert error.value.reason == "KV_FENCED"
        with pytest.raises(ringattn.CacheFencedError):
            cache.step([Row(1)])
        driver = Driver(second)
        driver.step([Row(2, 3)])
        second.close()


def test_a_deleted_cache_is_gone(client):
    cache = make(client)
    assert cache.id in [info["cache_id"] for info in client.list_caches()]
    client.delete_cache(cache.id)
    with pytest.raises(ringattn.CacheExpiredError) as error:
        Driver(cache).step([Row(1)])
    assert error.value.reason == "KV_DELETED"
    assert cache.id not in [info["cache_id"] for info in client.list_caches() if "ended" not in info]
    with pytest.raises(ringattn.NotFoundError):
        client.open_cache(b"x" * 16)


def test_a_hold_keeps_a_cache_and_close_ends_it(client):
    held, loose = make(client, ttl=1.0), make(client, ttl=1.0, hold=False)
    time.sleep(2.5)
    Driver(held).step([Row(1, 4)])
    with pytest.raises(ringattn.CacheExpiredError):
        Driver(loose).step([Row(1, 4)])
    held.delete()
    with pytest.raises(RuntimeError, match="closed"):
        held.step([Row(1)])


def test_a_worker_that_leaves_is_announced(tmp_path):
    command = [BIN / "client/ringattn"]
    up = subprocess.run([*command, "up", "--workers=1", "--port=0", "--device=cpu", "--threads=1", "--detach",
                         f"--state_dir={tmp_path}"], capture_output=True, text=True, timeout=120)
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        launcher = (tmp_path / "launcher.pid").read_text().strip()
        children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        worker = [int(child) for child in children
                  if "ringattn-worker" in pathlib.Path(f"/proc/{child}/cmdline").read_text()]
        with ringattn.connect(re.search(r"gRPC address (\S+),", up.stdout)[1]) as client:
            cache = make(client)
            driver = Driver(cache)
            driver.step([Row(1, 4)])
            assert cache.leaving is False
            os.kill(worker[0], signal.SIGTERM)

            def told():
                driver.step([Row(1, 1)])
                return cache.leaving

            wait_until(told, 5, "a step says that the worker leaves")
    finally:
        subprocess.run([*command, "down", f"--state_dir={tmp_path}"], capture_output=True, timeout=120)


def test_ctrl_c_ends_a_call_and_it_can_be_repeated(client):
    with make(client, layers=1, tokens=1 << 15, world_size=1) as cache:
        model = Sequences(2, 16)
        # Several seconds of work on one thread.
        k, v = model.draw(30000), model.draw(30000)
        step = cache.step([Row(1, 30000)])
        q = model.draw(30000, HEADS)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                step.attend(0, q, k, v)
                time.sleep(5)
        finally:
            timer.join()


def test_threads_and_garbage(client):
    caches = [make(client) for _ in range(4)]
    drivers = [Driver(cache) for cache in caches]
    errors = []

    def run(driver):
        try:
            driver.step([Row(1, 20)])
            for _ in range(10):
                driver.step([Row(1)])
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    ids = [cache.id for cache in caches]
    for cache in caches:
        cache.delete()
    del caches, drivers
    gc.collect()
    wait_until(lambda: not {info["cache_id"] for info in client.list_caches() if "ended" not in info} & set(ids), 5,
               "the end of the caches")


# ------------------------------------------------------------------ PyTorch and flash-attn


reason = os.environ.get("RINGATTN_NO_TORCH") or None


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason=reason)
    with ringattn.connect(os.environ["RINGATTN_ADDRESS"]) as client, make(client, dtype="bfloat16") as cache:
        q, k, v = (torch.randn(5, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        step = cache.step([Row(1, 5)])
        out, lse = step.attend(0, q, k, v, lse=True)
        assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        want, _ = attend(*(x.float().numpy() for x in (q, k, v)))
        np.testing.assert_allclose(out.float().numpy(), want, atol=3e-2)
        step.attend(1, q.transpose(0, 1).contiguous().transpose(0, 1), k, v)  # strides do not matter


@pytest.mark.parametrize("batch", [1, 3])
def test_flash_attn_with_kvcache(client, batch):
    torch = pytest.importorskip("torch", reason=reason)
    from ringattn import flash_attn_with_kvcache

    torch.manual_seed(0)
    with make(client) as cache:
        keys = {layer: torch.zeros(batch, 0, 2, 16) for layer in (0, 1)}
        values = {layer: torch.zeros(batch, 0, 2, 16) for layer in (0, 1)}
        length = 0
        for tokens, keep in ((20, 0), (1, 20), (5, 21), (2, 23)):  # the last forgets three rejected drafts
            for layer in (0, 1):
                q, k, v = (torch.randn(batch, tokens, heads, 16) for heads in (4, 2, 2))
                lengths = torch.full((batch,), keep, dtype=torch.int32) if layer else keep
                out, lse = flash_attn_with_kvcache(q, cache.layer(layer), None, k, v, cache_seqlens=lengths,
                                                   causal=True, return_softmax_lse=True)
                keys[layer] = torch.cat([keys[layer][:, :keep], k], 1)
                values[layer] = torch.cat([values[layer][:, :keep], v], 1)
                for b in range(batch):
                    want, want_lse = attend(q[b], keys[layer][b], values[layer][b])
                    np.testing.assert_allclose(out[b], want, atol=2e-5)
                    np.testing.assert_allclose(lse[b], want_lse, atol=1e-3)
            length = keep + tokens
            assert set(cache.sequences.values()) == {length}
        out = flash_attn_with_kvcache(torch.randn(1, 1, 4, 16), cache.layer(0), cache_batch_idx=torch.tensor([0]))
        assert out.shape == (1, 1, 4, 16)  # reads only


def test_flash_attn_with_kvcache_under_autocast(client):
    torch = pytest.importorskip("torch", reason=reason)
    from ringattn import flash_attn_with_kvcache

    q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16).bfloat16()
    with make(client, dtype="bfloat16") as cache:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = flash_attn_with_kvcache(q, cache.layer(0), None, k, v, causal=True)
        want, _ = attend(*(x[0].bfloat16().float().numpy() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out[0].float().numpy(), want, atol=3e-2)


def test_flash_attn_refuses_by_name(client):
    torch = pytest.importorskip("torch", reason=reason)
    from ringattn import flash_attn_with_kvcache

    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 2, 16)
    with make(client, window=5) as cache:
        place = cache.layer(0)
        for name in ("rotary_cos", "rotary_sin", "cache_leftpad", "block_table", "alibi_slopes", "v_cache"):
            with pytest.raises(NotImplementedError, match=name):
                flash_attn_with_kvcache(q, place, **{name: torch.ones(1)}, causal=True)
        for options, name in (({"softmax_scale": 1.0}, "softmax_scale"), ({"softcap": 1.0}, "softcap"),
                              ({"causal": False, "window_size": (5, -1)}, "causal"), ({}, "window_size")):
            with pytest.raises(ValueError, match=name):
                flash_attn_with_kvcache(q, place, None, k, k, **{"causal": True, **options})
        with pytest.raises(ValueError, match="cache_seqlens"):
            flash_attn_with_kvcache(q, place, None, k, k, cache_seqlens=3, causal=True, window_size=(5, 0))
        for position, name in enumerate("qkv"):
            given = [q, k, k]
            given[position] = given[position].clone().requires_grad_()
            with pytest.raises(NotImplementedError, match=f"requires_grad: {name} "):
                flash_attn_with_kvcache(given[0], place, None, *given[1:], causal=True, window_size=(5, 0))
            with torch.autograd.forward_ad.dual_level():
                given[position] = torch.autograd.forward_ad.make_dual(given[position].detach(), torch.ones_like(given[position]))
                with pytest.raises(NotImplementedError, match=f"{name}: forward-mode"):
                    flash_attn_with_kvcache(given[0], place, None, *given[1:], causal=True, window_size=(5, 0))
        with pytest.raises(TypeError, match="q: is a numpy.ndarray"):
            flash_attn_with_kvcache(q.numpy(), place, None, k, k, causal=True, window_size=(5, 0))
        with pytest.raises(ValueError, match="k_cache"):
            flash_attn_with_kvcache(q, cache, None, k, k)
        with pytest.raises(TypeError, match="k_cache"):
            flash_attn_with_kvcache(q, k, None, k, k)
