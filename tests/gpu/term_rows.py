"""Compares score terms with our plain kernel and PyTorch's peers, in one run on one GPU: kernel_speed.py
--terms. Every row is verified before it is timed: out, lse and dq of sampled rows in fp64, with
dropout's bits from a separate Philox implementation in this file."""
import ctypes
import importlib.util
import os
import random
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernel_speed

SEED = 0x1234_5678_9ABC_DEF0
THRESHOLD = 6554  # of 65536: a rate of 0.1
SEGMENTS = 8
# Required fractions of our plain kernel's speed, forward and backward (None: no bound).
WANTED = {"alibi": (0.90, 0.90), "shallow": (0.90, 0.90), "segments": (0.90, 0.90), "mask": (0.75, 0.75),
          # Compared with the dense mask, not the plain kernel: every second tile of 128 queries and keys is empty.
          "halved": (1.6, 1.6), "bias": (0.60, 0.65),
          "dbias": (None, 0.45), "dropout": (0.60, 0.70), "all": (0.40, 0.40),
          "sinks": (0.99, 0.99), "dlse": (None, 0.99), "fp32": (0.99, 0.99)}
BACKWARD_ONLY = ("dbias", "dlse")


class Terms(ctypes.Structure):
    """As in kernel_abi.cc."""
    _fields_ = [(name, ctypes.c_void_p) for name in
                ("slopes", "bias", "dbias", "mask", "q_segments", "kv_segments")] + [
                    ("seed", ctypes.c_uint64), ("threshold", ctypes.c_uint32),
                    ("bias_heads", ctypes.c_int32), ("sinks", ctypes.c_void_p), ("dsinks", ctypes.c_void_p),
                    ("dlse", ctypes.c_void_p), ("fp32_results", ctypes.c_int32)]


def keeps(heads, rows, keys, threshold):
    """[heads, rows, keys] of bool: dropout's bits of batch row 0, by docs/semantics.md."""
    low = 0xFFFFFFFF
    shape = (len(heads), len(rows), len(keys))
    as64 = lambda x, dim: x.to(torch.int64).view([-1 if d == dim else 1 for d in range(3)]).expand(shape)
    head, row, key = as64(heads, 0), as64(rows, 1), as64(keys, 2)
    c = [4 * (key // 32) + key // 2 % 4, row, head, torch.zeros_like(key)]
    k0, k1 = SEED & low, SEED >> 32

    def product(multiplier, x):  # of 32 bits each, by halves: int64 has no unsigned product
        first, second = (x & 0xFFFF) * multiplier, (x >> 16) * multiplier
        total = (first >> 16) + (second & 0xFFFFFFFFFFFF)
        return total >> 16, ((total & 0xFFFF) << 16 | first & 0xFFFF) & low

    for _ in range(10):
        high_a, low_a = product(0xD2511F53, c[0])
        high_b, low_b = product(0xCD9E8D57, c[2])
        c = [high_b ^ c[1] ^ k0, low_b, high_a ^ c[3] ^ k1, low_a]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    part = key // 8 % 4
    word = torch.stack(c).gather(0, part[None])[0]
    return (word >> (16 * (key % 2)) & 0xFFFF) >= threshold


class Problem:
    """Tensors of one length, and the row terms' tensors."""

    def __init__(self, length, dim, heads, kv_heads, dtype):
        make = lambda h: torch.randn(1, length, h, dim, device="cuda", dtype=dtype)
        self.length, self.heads, self.group = length, heads, heads // kv_heads
        self.tensors = make(heads), make(kv_heads), make(kv_heads), make(heads)
        self.ids = torch.arange(length, device="cuda", dtype=torch.int32)[None] * SEGMENTS // length
        self.bits = torch.randint(0, 256, (length, (length + 7) // 8), device="cuda", dtype=torch.uint8)
        tile = torch.arange(length, device="cuda") // 128
        byte_tile = torch.arange((length + 7) // 8, device="cuda") // 16
        self.halved = torch.where((tile[:, None] + byte_tile[None]) % 2 == 0, self.bits, 0)
        self.sinks = torch.full((heads,), 9.0, device="cuda")  # of the order of lse
        self.dsinks = torch.empty_like(self.sinks)
        self.dlse = torch.randn(1, heads, length, device="cuda")
        self.bias = torch.randn(heads, length, length, device="cuda", dtype=dtype)

    def slopes_of(self, names):
        """ALiBi's published ones, under which most tiles of a long request lie too far away to count; or
        slopes that leave every tile something."""
        if "shallow" in names:
            return [2.0 ** -14] * self.heads
        return [2.0 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)]

    def mask_of(self, names):
        return self.halved if "halved" in names else self.bits

    def bools(self, names, rows=slice(None)):
        """The mask of some rows: the lowest bit of a byte is the first key."""
        shifts = torch.arange(8, device="cuda", dtype=torch.uint8)
        bits = self.mask_of(names)[rows][..., None] >> shifts & 1
        return bits.flatten(1)[:, :self.length].bool()

    def terms(self, names, dbias=None):
        host = (ctypes.c_float * self.heads)(*self.slopes_of(names))
        terms = Terms(seed=SEED, bias_heads=self.heads)
        terms.kept_alive = host
        if "alibi" in names:
            terms.slopes = ctypes.addressof(host)
        if "segments" in names:
            terms.q_segments = terms.kv_segments = self.ids.data_ptr()
        if "mask" in names:
            terms.mask = self.mask_of(names).data_ptr()
        if "bias" in names:
            terms.bias = self.bias.data_ptr()
        if "dropout" in names:
            terms.threshold = THRESHOLD
        if dbias is not None:
            terms.dbias = dbias.data_ptr()
        if "sinks" in names:
            terms.sinks, terms.dsinks = self.sinks.data_ptr(), self.dsinks.data_ptr()
        if "dlse" in names:
            terms.dlse = self.dlse.data_ptr()
        terms.fp32_results = "fp32" in names
        return terms


class Ours(kernel_speed.Ours):
    """One problem with terms, prepared through ringattn_prepare_terms."""

    def __init__(self, build, dtype, tensors, terms, dbias=None):
        self.terms, self.dbias = terms, dbias
        library = build.library
        pointer = ctypes.c_void_p
        library.ringattn_prepare_terms.restype = pointer
        library.ringattn_prepare_terms.argtypes = [pointer] + list(library.ringattn_prepare.argtypes)
        plain = library.ringattn_prepare

        class WithTerms:  # kernel_speed.Ours prepares by the library's plain entry
            def __getattr__(self, name):
                return getattr(library, name)

            @staticmethod
            def ringattn_prepare(*arguments):
                if terms is None:
                    return plain(*arguments)
                return library.ringattn_prepare_terms(ctypes.byref(terms), *arguments)

        super().__init__(kernel_speed.Build(WithTerms(), build.family), dtype, *tensors, True,
                         fp32_results=terms is not None and bool(terms.fp32_results))


def verify(ours, problem, names, backward, count=24):
    """Worst errors of sampled rows of one head, in fp64."""
    q, k, v, dout = ours.inputs
    n, dim = problem.length, q.shape[3]
    rows = torch.randint(0, n, (count,), device="cuda")
    head = random.randrange(problem.heads)
    key, value = (t[0, :, head // problem.group].double() for t in (k, v))
    own = q[0, rows, head].double()
    columns = torch.arange(n, device="cuda")
    s = own @ key.T * dim ** -0.5
    if "bias" in names:
        s += problem.bias[head, rows].double()
    if "alibi" in names:
        s -= problem.slopes_of(names)[head] * (rows[:, None] - columns[None]).abs().double()
    hidden = columns[None] > rows[:, None]
    if "segments" in names:
        hidden |= problem.ids[0, rows][:, None] != problem.ids[0][None]
    if "mask" in names:
        hidden |= ~problem.bools(names, rows)
    s.masked_fill_(hidden, float("-inf"))
    lse = s.logsumexp(-1)
    if "sinks" in names:
        lse = torch.logaddexp(lse, problem.sinks[head].double())
    p = (s - lse[:, None]).exp().nan_to_num()  # a row without keys has none
    scale = torch.ones_like(p)
    if "dropout" in names:
        kept = keeps(torch.tensor([head], device="cuda"), rows, columns, THRESHOLD)[0]
        scale = kept.double() * (65536 / (65536 - THRESHOLD))
    out = (p * scale) @ value
    gradient = dout[0, rows, head].double()
    # delta is of the rounded out, as the kernels have it.
    delta = (gradient * ours.out[0, rows, head].double()).sum(-1, keepdim=True)
    if "dlse" in names:
        delta -= problem.dlse[0, head, rows, None].double()
    ds = p * ((gradient @ value.T) * scale - delta)
    error = lambda actual, expected: float((actual.double() - expected).norm() / expected.norm())
    finite = lse.isfinite()
    errors = {"out": error(ours.out[0, rows, head], out),
              "lse": float((ours.lse[0, head, rows].double() - lse)[finite].abs().max())}
    if backward:
        errors["dq"] = error(ours.gradients[0][0, rows, head], ds @ key * dim ** -0.5)
        if ours.dbias is not None:
            errors["dbias"] = error(ours.dbias[head, rows], ds)
        if "sinks" in names:
            deltas = (dout[0, :, head].double() * ours.out[0, :, head].double()).sum(-1)
            share = (problem.sinks[head].double() - ours.lse[0, head].double()).exp()
            errors["dsinks"] = error(problem.dsinks[head], -(share * deltas).sum())
    good = errors["out"] < 1e-2 and errors["lse"] < 1e-3 and errors.get("dq", 0) < 2e-2 and (
        max(errors.get("dbias", 0), errors.get("dsinks", 0)) < 2e-2)
    return good, errors


class Peer:
    """`call` of some tensors, whose gradients are autograd's."""

    def __init__(self, tensors, dout, call):
        self.tensors, self.dout, self.call, self.result = tensors, dout, call, None

    def forward(self):
        with torch.no_grad():
            return self.call(*self.tensors)

    def backward(self):
        if self.result is None:
            self.result = self.call(*self.tensors)
        return torch.autograd.grad(self.result, self.tensors, self.dout, retain_graph=True)


def sdpa(backend, problem, attn_mask=None, dropout=0.0):
    """scaled_dot_product_attention on one back end, with a mask that the causal one is a part of."""
    q, k, v, dout = (t.detach().transpose(1, 2) for t in problem.tensors)
    if backend == SDPBackend.EFFICIENT_ATTENTION:  # has no groups of heads
        k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    arguments = dict(attn_mask=attn_mask, dropout_p=dropout, is_causal=attn_mask is None,
                     enable_gqa=q.shape[1] != k.shape[1])

    def call(*tensors):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, **arguments)

    return Peer([t.contiguous().requires_grad_() for t in (q, k, v)], dout, call)


def flex(problem, name):
    """PyTorch's FlexAttention, compiled: ALiBi as a change of scores, segments as a mask of blocks."""
    from torch.nn.attention import flex_attention
    q, k, v, dout = (t.detach().transpose(1, 2).contiguous() for t in problem.tensors)
    slopes = torch.tensor(problem.slopes_of({name}), device="cuda", dtype=torch.float32)
    ids, n = problem.ids[0], problem.length
    causal = lambda b, h, i, j: i >= j
    seen = (lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])) if name == "segments" else causal
    change = None if name == "segments" else (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    blocks = flex_attention.create_block_mask(seen, None, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    return Peer([t.requires_grad_() for t in (q, k, v)], dout,
                lambda *tensors: compiled(*tensors, score_mod=change, block_mask=blocks, enable_gqa=True))


def flash_alibi(problem):
    """FlashAttention 2's own ALiBi, where its package is installed."""
    from flash_attn import flash_attn_func
    slopes = torch.tensor(problem.slopes_of({}), device="cuda", dtype=torch.float32)
    return Peer([t.detach().requires_grad_() for t in problem.tensors[:3]], problem.tensors[3],
                lambda *tensors: flash_attn_func(*tensors, causal=True, alibi_slopes=slopes))


def peer_of(name, problem):
    """(name, peer) of who has the term, or None."""
    if name == "alibi" and importlib.util.find_spec("flash_attn"):
        return "FA2 alibi", flash_alibi(problem)
    if name in ("alibi", "shallow", "segments"):
        return "FlexAttention", flex(problem, name)
    causal = torch.ones(problem.length, problem.length, device="cuda", dtype=torch.bool).tril_()
    if name == "mask":
        return "SDPA bool mask", sdpa(SDPBackend.EFFICIENT_ATTENTION, problem,
                                      problem.bools({}).logical_and_(causal)[None, None])
    if name == "bias":
        mask = problem.bias.masked_fill(~causal, float("-inf"))
        return "SDPA float mask", sdpa(SDPBackend.EFFICIENT_ATTENTION, problem, mask[None])
    if name == "dropout":
        return "FA2 dropout", sdpa(SDPBackend.FLASH_ATTENTION, problem,
                                   dropout=THRESHOLD / 65536)
    return None


def plain_beside(name, build, forced, dtype, problem):
    """Ours on what the row is compared with, the plain kernel but for "halved", and its share of the
    causal pairs."""
    if name == "halved":
        return Ours(kernel_speed.Build(build.library, forced), dtype, problem.tensors, problem.terms({"mask"})), 1.0
    tensors = problem.tensors
    if name != "segments":
        return kernel_speed.Ours(build, dtype, *tensors, True), 1.0
    # The packed request: as many sequences as there are segments, each of them causal.
    parts = [t.reshape(SEGMENTS, -1, *t.shape[2:]) for t in tensors]
    return kernel_speed.Ours(build, dtype, *parts, True), 1.0 / SEGMENTS


def time_row(name, direction, args, libraries, problem):
    """Prints a row of each library, all interleaved; False if something was wrong. The plain kernel is
    the first library's."""
    names = {"dbias": {"bias"}, "shallow": {"alibi", "shallow"},
             "halved": {"mask", "halved"}, "all": {"alibi", "segments", "mask", "bias", "dropout"}}.get(name, {name})
    dbias = None
    if name == "dbias":
        dbias = torch.full_like(problem.bias, float("nan"))
    ours, notes, all_good = {}, {}, True
    for key, build in libraries:
        forced = kernel_speed.Build(build.library, args.term_family or build.family)
        one = Ours(forced, args.dtype, problem.tensors, problem.terms(names, dbias), dbias)
        one.forward()
        if direction == "backward":
            one.backward()
        torch.cuda.synchronize()
        good, errors = verify(one, problem, names, direction == "backward")
        all_good &= good
        ours[key] = one
        notes[key] = " ".join(f"{k} {value:.1e}" for k, value in errors.items()) + (
            "" if good else " WRONG")
    plain, share = plain_beside(name, libraries[0][1], args.term_family or libraries[0][1].family, args.dtype, problem)
    plain.forward()
    runs = [*ours.items(), ("plain", plain)]
    peer, note = None, ""
    if not args.no_peers:
        try:
            peer = peer_of(name, problem)
            if peer is not None:
                getattr(peer[1], direction)()
                runs.append(peer)
        except (ImportError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            note += f" peer: {str(error).splitlines()[0][:40]}"
            peer = None
    times = {key: [] for key, _ in runs}
    for round_index in range(args.rounds + 1):
        for key, run in random.sample(runs, len(runs)):
            ms = kernel_speed.time_ms(getattr(run, direction), 3)
            if round_index > 0:
                times[key].append(ms)
    ms = {key: statistics.median(values) for key, values in times.items()}
    dim, n = problem.tensors[0].shape[3], problem.length
    flops = 2 * n * n * dim * problem.heads * (1.0 if direction == "forward" else 2.5)
    wanted = WANTED[name][direction == "backward"]
    for key in ours:
        beside = f"{peer[0]} {ms[peer[0]] / ms[key]:.2f}" if peer else "-"
        print(f"| {name} | {direction} | {key} | {ms[key]:.3f} | "
              f"{flops * share / ms[key] / 1e9:.0f} | {ms['plain'] / ms[key]:.2f} | "
              f"{'-' if wanted is None else wanted} | {beside} | {notes[key]}{note} |", flush=True)
    for run in (*ours.values(), plain):
        run.release()
    return all_good


def run(args, libraries, heads, kv_heads):
    """The table; the exit status: 1 if a row was wrong."""
    names = args.term_rows.split(",") if args.term_rows else list(WANTED)
    if unknown := set(names) - set(WANTED):
        sys.exit(f"--term_rows: {', '.join(unknown)} are none of {', '.join(WANTED)}")
    failed = False
    for length in map(int, args.lengths.split(",")):
        for dim in map(int, args.dims.split(",")):
            if length % SEGMENTS:
                sys.exit(f"--lengths must be multiples of {SEGMENTS}")
            problem = Problem(length, dim, heads, kv_heads, kernel_speed.DTYPES[args.dtype][1])
            print(f"\nscore terms by {args.term_family or 'any kernel family'}, {length} causal tokens, dim "
                  f"{dim}; ratios are of times: > 1 is faster than the other")
            print("| terms | direction | library | ms | TFLOP/s | /plain | wanted | /peer | errors |")
            print("|---" * 9 + "|")
            for direction in args.directions.split(","):
                for name in names:
                    if name in BACKWARD_ONLY and direction == "forward":
                        continue
                    failed |= not time_row(name, direction, args, libraries, problem)
            del problem
            torch.cuda.empty_cache()
    os.environ.pop("RINGATTN_KERNEL_FAMILY", None)
    return 1 if failed else 0
