"""Inputs without a file per shape: a few large files of random numbers, generated in the background. Each new
shape gets a new header in the same file.

One shape at a time: no process may have a file open while another shape's header replaces its own."""

import dataclasses
import json
import os
import pathlib
import struct
import subprocess
import threading
import time

from harness import check

HEADER_BYTES = 4096  # the 8 bytes of its length too
CU_BYTES = 4096      # in front of the tensors, for cu_seqlens
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
SAFETENSORS_DTYPE = {"bf16": "BF16", "fp32": "F32"}


@dataclasses.dataclass(frozen=True)
class Shape:
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"
    documents: tuple = ()  # lengths that add up to seq_len; none: one sequence, not packed

    def share(self, workers):
        """Returns the shape for one of `workers`: as many documents, each that much shorter."""
        if not self.documents:
            return dataclasses.replace(self, seq_len=self.seq_len // workers)
        documents = tuple(max(1, length // workers) for length in self.documents)
        return dataclasses.replace(self, seq_len=sum(documents), documents=documents)

    def tensors(self, with_dout):
        """(name, dimensions) in file order; dout last, so that the others lie where they lie without."""
        batch = [] if self.documents else [1]
        wide = [*batch, self.seq_len, self.heads, self.head_dim]
        narrow = [*batch, self.seq_len, self.kv_heads, self.head_dim]
        return [("q", wide), ("k", narrow), ("v", narrow), *([("dout", wide)] if with_dout else [])]

    def bytes(self, with_dout):
        elements = self.seq_len * self.head_dim * (
            (2 if with_dout else 1) * self.heads + 2 * self.kv_heads)
        return elements * ELEMENT_BYTES[self.dtype]


def header(shape, with_dout, data_bytes):
    """Returns the first HEADER_BYTES + CU_BYTES of a file with `data_bytes` after its header. Every byte must
    belong to a tensor, so bytes outside the shape's tensors become tensors that are never read."""
    entries, at, lengths = {}, 0, b""

    def add(name, dtype, dimensions, count_bytes):
        nonlocal at
        entries[name] = {"dtype": dtype, "shape": dimensions, "data_offsets": [at, at + count_bytes]}
        at += count_bytes

    if shape.documents:
        ends = [0]
        for length in shape.documents:
            ends.append(ends[-1] + length)
        packed = struct.pack(f"<{len(ends)}i", *ends)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            add(name, "I32", [len(ends)], len(packed))
            lengths += packed
        check(len(lengths) <= CU_BYTES, "too many documents")
    if at < CU_BYTES:
        add("unused_front", "U8", [CU_BYTES - at], CU_BYTES - at)
    for name, dimensions in shape.tensors(with_dout):
        count = ELEMENT_BYTES[shape.dtype]
        for dimension in dimensions:
            count *= dimension
        add(name, SAFETENSORS_DTYPE[shape.dtype], dimensions, count)
    check(at <= data_bytes, f"{shape} needs {at} bytes of {data_bytes}")
    if at < data_bytes:
        add("unused_end", "U8", [data_bytes - at], data_bytes - at)
    text = json.dumps(entries).encode()
    check(len(text) <= HEADER_BYTES - 8, "the header has grown too long")
    text = text.ljust(HEADER_BYTES - 8)
    return struct.pack("<Q", len(text)) + text + lengths.ljust(CU_BYTES, b"\0")


def join(path, *sources):
    """Writes a file with the tensors of all `sources`, except those that are never read."""
    entries, pieces, at = {}, [], 0
    for source in sources:
        with open(source, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            described = json.loads(file.read(length))
        for name, entry in described.items():
            if name == "__metadata__" or name.startswith("unused_"):
                continue
            check(name not in entries, f"{name} is in two of {sources}")
            begin, end = entry["data_offsets"]
            entries[name] = {**entry, "data_offsets": [at, at + end - begin]}
            pieces.append((source, 8 + length + begin, end - begin))
            at += end - begin
    text = json.dumps(entries).encode()
    text = text.ljust((len(text) + 8 + 63) // 64 * 64 - 8)
    with open(path, "wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        target.flush()
        for source, begin, count in pieces:
            with open(source, "rb") as file:
                while count > 0:
                    copied = os.sendfile(target.fileno(), file.fileno(), begin, count)
                    check(copied > 0, f"{source} has become shorter")
                    begin, count = begin + copied, count - copied


class Arena:
    """One file of near-normal bf16. Read as fp32 they are near-normal too: the upper halves are."""

    # q, k and v of one token of the request that `ringattn generate` is asked for.
    TOKEN_BYTES = 3 * 32 * 128 * 2

    def __init__(self, cli, path, tensor_bytes):
        self.path, self.tensor_bytes = path, tensor_bytes
        # Additional tokens for the bytes that the new header takes, and for the smallest header
        # there is.
        tokens = (tensor_bytes + HEADER_BYTES + CU_BYTES) // self.TOKEN_BYTES + 1
        self.command = [str(cli), "generate", f"--output={path}", f"--seq_len={tokens}", "--heads=32",
                        "--kv_heads=32", "--head_dim=128", "--dtype=bf16", "--seed=3"]
        self.error = None  # "" when it is there
        self.process = None
        self.seconds = None

    def make(self):
        begin = time.monotonic()
        try:
            self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.PIPE, text=True)
            error = self.process.communicate()[1]
            if self.process.returncode == 0:
                with open(self.path, "rb") as file:
                    length = struct.unpack("<Q", file.read(8))[0]
                # With an odd length, our elements would straddle two generated ones.
                error = "" if length % 2 == 0 else f"an odd header of {length} bytes"
            self.seconds = round(time.monotonic() - begin, 2)
            self.error = error or ("" if self.process.returncode == 0 else "failed")
        except OSError as error:
            self.error = str(error)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


class Inputs:
    # A need goes to the first class it fits into; a class is as large as its largest need. So small
    # requests do not wait for the files of large ones.
    CLASSES = (1.5e9, 9e9, 1e12)

    def __init__(self, cli, folder):
        self.cli, self.folder = cli, pathlib.Path(folder)
        self.needs = []
        self.arenas = []
        self.threads = []

    def want(self, shape, with_dout):
        """Before start(): a shape that will be asked for."""
        self.needs.append(shape.bytes(with_dout))

    def start(self):
        low = 0
        for number, high in enumerate(self.CLASSES):
            needs = [need for need in self.needs if low < need <= high]
            low = high
            if needs:
                self.arenas.append(Arena(self.cli, self.folder / f"random-{number}.safetensors",
                                         max(needs)))
        for arena in self.arenas:
            self.threads.append(threading.Thread(target=arena.make, daemon=True))
            self.threads[-1].start()

    def view(self, shape, with_dout, seconds):
        """A file with this shape's tensors, until the next view is asked for."""
        need = shape.bytes(with_dout)
        arena = next((arena for arena in self.arenas if need <= arena.tensor_bytes), None)
        check(arena is not None, f"no input was made for {shape}")
        end = time.monotonic() + seconds
        while arena.error is None:
            check(time.monotonic() < end, f"{arena.path.name} was not generated in time")
            time.sleep(0.05)
        check(arena.error == "", f"{arena.path.name}: {arena.error}")
        data_bytes = arena.path.stat().st_size - HEADER_BYTES
        with open(arena.path, "r+b") as file:
            file.write(header(shape, with_dout, data_bytes))
        return arena.path

    def close(self):
        for arena in self.arenas:
            arena.close()
