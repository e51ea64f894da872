"""The input tensors of a call in all their forms, and the shape that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringattn._arrays import Array
from ringattn._errors import invalid
from ringattn._writer import Writer

#: Packed tensors, and the length of the axis (before the heads) that divides them.
PARTS = {"qkv": 3, "kv": 2}
_FORMS = {"qkv": ("qkv",), "kv": ("q", "kv"), None: ("q", "k", "v")}


def inputs_of(q: Any, k: Any, v: Any, qkv: Any, kv: Any) -> dict[str, Any]:
    """Returns the given tensors by name.

    Raises:
        InvalidArgumentError: packed and separate tensors are mixed.
    """
    values = {"q": q, "k": k, "v": v, "qkv": qkv, "kv": kv}
    form = "qkv" if qkv is not None else "kv" if kv is not None else None
    for name, value in values.items():
        if value is not None and name not in _FORMS[form]:
            raise invalid(name, f"is given in addition to {form}")
    return {name: values[name] for name in _FORMS[form]}


def none_given(*values: Any) -> bool:
    return all(value is None for value in values)


class Shape:
    """The shape of a call. The constructor checks the tensors against each other.

    With a writer, `seq_q` and `seq_k` are those of its own rows; the header has those of the whole request.
    """

    def __init__(self, tensors: Mapping[str, Array], cu_q: list[int] | None, cu_k: list[int] | None,
                 writer: Writer | None = None) -> None:
        self.packed = cu_q is not None
        self.writer = writer
        self.packing = next((name for name in tensors if name in PARTS), None)
        first = next(iter(tensors))
        self.dtype = tensors[first].dtype
        for name, tensor in tensors.items():
            self._check_axes(name, tensor)
            if tensor.dtype != self.dtype:
                raise invalid(name, f"is {tensor.dtype}; must be {self.dtype}, as {first}")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise invalid(first, f"is {self.dtype}; must be float32, bfloat16 or float16")
        # The shapes of q, k and v without the axis of a packed tensor.
        alone = {name: (*tensor.shape[:-3], *tensor.shape[-2:]) if name in PARTS else tensor.shape
                 for name, tensor in tensors.items()}
        q, k = alone[first], alone.get("k") or alone.get("kv") or alone[first]
        v = alone.get("v", k)
        self.batch = 1 if self.packed else q[0]
        self.seq_q, self.heads, self.dim = q[-3:]
        self.seq_k, self.kv_heads, k_dim = k[-3:]
        self.dim_v = v[-1]
        self.leading = () if self.packed else (self.batch,)
        if k_dim != self.dim:
            raise invalid(self.packing or "k", f"has a head_dim of {k_dim}; must be {self.dim}, as q")
        for name, columns in (("k", self.dim), ("kv", self.dim), ("v", self.dim_v)):
            if name in tensors:
                parts = (PARTS[name],) if name in PARTS else ()
                self.require(name, tensors[name], (*self.leading, self.seq_k, *parts, self.kv_heads, columns))
        self.lengths_q = self._lengths(cu_q, self.seq_q)
        self.lengths_k = self._lengths(cu_k, self.seq_k)
        keys = self.seq_k if writer is None else writer.seq_len_kv
        self.longest_k = max(self.lengths_k, default=0) if self.packed else keys
        if writer is not None:
            for axis, rows, name in (("q", self.seq_q, first), ("kv", self.seq_k, "k" if "k" in tensors else first)):
                if writer.rows(axis) != rows:
                    raise invalid(f"writer.{axis}", f"has {writer.rows(axis)} tokens; {name} has {rows} rows")
        self.documents = len(self.lengths_q) if self.packed else 0

    def _check_axes(self, name: str, tensor: Array) -> None:
        axes = ["tokens", "heads", "head_dim"] if self.packed else ["batch", "tokens", "heads", "head_dim"]
        if name in PARTS:
            axes.insert(-2, str(PARTS[name]))
        if len(tensor.shape) != len(axes) or (name in PARTS and tensor.shape[-3] != PARTS[name]):
            raise invalid(name, f"has the shape {list(tensor.shape)}; must be [{', '.join(axes)}]")

    def _lengths(self, cu: list[int] | None, tokens: int) -> list[int]:
        """Returns the length of each batch row or document."""
        return [tokens] * self.batch if cu is None else [b - a for a, b in zip(cu, cu[1:])]

    def require(self, name: str, tensor: Array, shape: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> None:
        if tensor.shape != shape:
            raise invalid(name, f"has the shape {list(tensor.shape)}; must be {list(shape)}")
        if dtypes and tensor.dtype not in dtypes:
            raise invalid(name, f"is {tensor.dtype}; must be {' or '.join(dict.fromkeys(dtypes))}")

    def header(self, cu_q: list[int] | None, cu_k: list[int] | None,
               documents: list[dict[str, Any]]) -> dict[str, Any]:
        writer = self.writer
        shape: dict[str, Any] = {
            "batch": self.batch,
            "seq_len_q": self.seq_q if writer is None else writer.seq_len_q,
            "seq_len_kv": self.seq_k if writer is None else writer.seq_len_kv,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads, "head_dim": self.dim, "head_dim_v": self.dim_v, "packing": self.packing}
        if self.packed:
            shape["packed"] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "options": documents}
        return shape

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.leading, self.seq_q, self.heads, self.dim_v)

    def lse(self, lse_format: str | None) -> tuple[int, ...]:
        if lse_format == "per_document":
            return (self.documents, self.heads, max(self.lengths_q, default=0))
        return (*self.leading, self.heads, self.seq_q)

    def probabilities(self, rows: list[dict[str, int]]) -> tuple[int, ...]:
        """Returns [rows, heads, largest number of keys of the rows]."""
        for index, row in enumerate(rows):
            if not 0 <= row["batch"] < len(self.lengths_k):
                raise invalid(f"probability_rows[{index}]", f"has {'document' if self.packed else 'batch row'} "
                                                            f"{row['batch']}; the call has {len(self.lengths_k)}")
        return (len(rows), self.heads, max((self.lengths_k[row["batch"]] for row in rows), default=0))

    def pairs(self, name: str, tensor: Array, columns: int) -> None:
        """Checks a bias or mask: [batch or 1, heads or 1, queries, columns]."""
        shape = tensor.shape
        if (len(shape) != 4 or shape[0] not in (1, self.batch) or shape[1] not in (1, self.heads)
                or shape[2:] != (self.seq_q, columns)):
            batch = "1" if self.packed else f"{self.batch} or 1"
            raise invalid(name, f"has the shape {list(shape)}; must be [{batch}, {self.heads} or 1, {self.seq_q}, "
                                f"{columns}]")
