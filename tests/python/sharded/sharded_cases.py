"""Cases of the functions that ranks call with their shards: what each rank passes, and what it must receive.

The expected values are those of attention over the whole sequence in fp64 (torch_reference).
"""
import dataclasses
import zlib

import numpy as np
import reference
import torch
import torch_reference

#: Names of functions up to the packing, their module, and how a sequence is sharded.
LAYOUTS = {
    "ring_flash_attn": ("ring_flash_attn", "contiguous"),
    "zigzag_ring_flash_attn": ("ring_flash_attn", "zigzag"),
    "stripe_flash_attn": ("ring_flash_attn", "striped"),
    "ring_flash_attn_varlen": ("ring_flash_attn", "contiguous"),
    "zigzag_ring_flash_attn_varlen": ("ring_flash_attn", "zigzag"),
    "llama3_flash_attn_varlen": ("ring_flash_attn", "packed"),
    "wrap_ring_attn": ("nnscaler", "contiguous"),
    "wrap_zigzag_attn": ("nnscaler", "contiguous"),
    "wrap_ring_attn_varlen": ("nnscaler", "packed"),
}


@dataclasses.dataclass
class Case:
    """One call on every rank."""

    name: str  #: of LAYOUTS
    form: str = ""  #: "", "kvpacked" or "qkvpacked"
    lengths: tuple = (32,)  #: tokens of each document, or of the sequence
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    options: dict = dataclasses.field(default_factory=dict)  #: the function's own arguments
    with_dlse: bool = False  #: a gradient flows through lse
    seed: int = 0

    @property
    def is_packed(self):
        return "varlen" in self.name

    @property
    def offsets(self):
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    def tensors(self):
        """q, k, v, dout and dlse of the whole sequence; with a batch axis unless they are packed."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = sum(self.lengths)
        leading = (tokens,) if self.is_packed else (self.batch, tokens)

        def draw(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=generator).to(dtype)

        return (draw(*leading, self.heads, self.head_dim), draw(*leading, self.kv_heads, self.head_dim),
                draw(*leading, self.kv_heads, self.head_dim), draw(*leading, self.heads, self.head_dim),
                draw(*leading[:-1], self.heads, tokens, dtype=torch.float32) if self.with_dlse else None)


def tokens_of_rank(case, rank, world_size):
    """The tokens of the whole sequence that the rank has, in its order."""
    layout = LAYOUTS[case.name][1]
    every = torch.arange(sum(case.lengths))
    if layout == "packed":
        return every.chunk(world_size)[rank]
    rows = []
    for document in every.split(case.lengths):
        if layout == "contiguous":
            rows.append(document.chunk(world_size)[rank])
        elif layout == "zigzag":
            pieces = document.chunk(2 * world_size)
            rows += [pieces[rank], pieces[-1 - rank]]
        else:
            rows.append(document.reshape(-1, world_size)[:, rank])
    return torch.cat(rows)


def arguments_of(case, rank, world_size):
    """The arguments of a function about documents, by name."""
    if not case.is_packed:
        return {}
    offsets = torch.tensor(case.offsets, dtype=torch.int32)
    if case.name.startswith("wrap"):
        return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    if case.name.startswith("llama3"):
        from ringattn.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens

        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
        values = llama3_flash_attn_prepare_cu_seqlens(offsets, case.options.get("causal", False), rank, world_size)
        return dict(zip(names, values)) | {"heads_k_stride": 1}
    return {"cu_seqlens": offsets // world_size, "max_seqlen": max(case.lengths) // world_size}


def function_of(case):
    import importlib

    module, _ = LAYOUTS[case.name]
    name = "_".join(part for part in (case.name, case.form, "func") if part)
    return getattr(importlib.import_module(f"ringattn.{module}"), name)


def call_on_rank(rank, world_size, case, group=None, **more):
    """Calls the function with the rank's shard. Returns (out, lse or None, dq, dk, dv) of its rows, in fp32."""
    rows = tokens_of_rank(case, rank, world_size)
    axis = 0 if case.is_packed else 1
    q, k, v, dout, dlse = case.tensors()
    q, k, v, dout = (tensor.index_select(axis, rows) for tensor in (q, k, v, dout))
    if case.form == "qkvpacked":
        leaves = [torch.stack([q, k, v], -3)]
    else:
        leaves = [q, torch.stack([k, v], -3)] if case.form == "kvpacked" else [q, k, v]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    keywords = arguments_of(case, rank, world_size) | case.options | more
    if case.name.startswith("wrap"):
        out, lse = function_of(case)(*leaves, process_group=group or list(range(world_size)), **keywords), None
    else:
        out, lse, nothing = function_of(case)(*leaves, return_attn_probs=True, group=group, **keywords)
        assert nothing is None
    outputs, gradients = [out], [dout]
    if dlse is not None:
        outputs.append(lse)
        gradients.append(dlse[..., rows])
    of_leaves = torch.autograd.grad(outputs, leaves, gradients)
    assert all(gradient.dtype == case.dtype for gradient in (out, *of_leaves))
    parts = [part for gradient, leaf in zip(of_leaves, leaves)
             for part in (gradient.unbind(-3) if leaf.dim() > q.dim() else (gradient,))]
    return [None if value is None else value.detach().float().numpy() for value in (out, lse, *parts)]


def expected(case):
    """out, lse, dq, dk and dv of the whole sequence in fp64."""
    q, k, v, dout, dlse = case.tensors()
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    options = dict(case.options)
    options.pop("deterministic", None)
    options["window"] = options.pop("window_size", (-1, -1))
    slopes = options.pop("alibi_slopes", None)
    outs, lses = [], []
    for index, (begin, end) in enumerate(zip(case.offsets, case.offsets[1:])):
        parts = [leaf[None, begin:end] if case.is_packed else leaf for leaf in leaves]
        of_document = slopes[index] if case.is_packed and slopes is not None and slopes.dim() == 2 else slopes
        # Dropout counts documents as rows of a batch.
        repeats = index + 1 if case.is_packed and options.get("dropout_p") else 1
        out, lse = torch_reference.attention(*(part.repeat(repeats, 1, 1, 1) for part in parts),
                                             alibi_slopes=of_document, **options)
        outs.append(out[-1] if case.is_packed else out)
        lses.append(lse[-1] if case.is_packed else lse)
    out, lse = torch.cat(outs, 0 if case.is_packed else 1), torch.cat(lses, -1)
    seen = ~torch.isneginf(lse)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse[seen] * dlse.double()[seen]).sum()
    return [value.detach().numpy() for value in (out, lse, *torch.autograd.grad(loss, leaves))]


def check(case, ranks):
    """Runs the case on the ranks and compares the rows of all of them with the whole sequence's."""
    relative = 2e-5 if case.dtype == torch.float32 else 2e-2
    results = ranks.run(call_on_rank, case)
    order = torch.cat([tokens_of_rank(case, rank, ranks.world_size) for rank in range(ranks.world_size)]).argsort().numpy()
    for name, *of_ranks, whole in zip(("out", "lse", "dq", "dk", "dv"), *results, expected(case)):
        if of_ranks[0] is None:
            continue
        axis = -1 if name == "lse" else 0 if case.is_packed else 1
        try:
            reference.close(np.concatenate(of_ranks, axis).take(order, axis), whole, relative)
        except AssertionError as error:
            raise AssertionError(f"{name} on {ranks.world_size} ranks: {error}: {case}") from error


def draw(name, world_size, number):
    """A case of this function with drawn shapes and options."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {world_size} {number}".encode()))

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    module, layout = LAYOUTS[name]
    unit = {"zigzag": 2 * world_size, "packed": 1}.get(layout, world_size)
    if "varlen" in name:
        lengths = [unit * pick(1, 2, 3, 5, 8) for _ in range(pick(1, 2, 3, 5))]
        lengths[-1] += -sum(lengths) % world_size
    else:
        lengths = [unit * pick(1, 2, 5, 9)]
    form = pick("", "kvpacked", "qkvpacked") if module == "ring_flash_attn" else ""
    kv_heads = pick(1, 2)
    heads = kv_heads * (1 if form == "qkvpacked" else pick(1, 2, 3))
    case = Case(name, form, tuple(lengths), 1 if "varlen" in name else pick(1, 2), heads, kv_heads, pick(8, 16, 24),
                pick(torch.float32, torch.float32, torch.float32, torch.bfloat16), seed=number,
                with_dlse=module == "ring_flash_attn" and pick(True, False))
    case.options["causal"] = pick(True, False)
    for option, value in (("window_size", pick((3, 0), (7, 2), (-1, 1), (1, -1))), ("softmax_scale", 0.3),
                          ("softcap", 1.5), ("deterministic", True)):
        if pick(True, False, False):
            case.options[option] = value
    if pick(True, False, False):
        rows = pick((), (len(lengths) if case.is_packed else case.batch,))
        case.options["alibi_slopes"] = torch.rand((*rows, heads), generator=generator)
    if pick(True, False, False):
        case.options |= {"dropout_p": pick(0.1, 0.5), "dropout_seed": number + 1}
    return case
