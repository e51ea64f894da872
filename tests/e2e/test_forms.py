"""Forms of tensors: packed inputs and their gradients, lse per document. Every form and transport
gives the bits of the plain request."""

import json
import struct
import threading

import numpy as np
import pytest

from command_line import cli

OPTIONS = ["--causal", "--schedule=ring"]
TYPES = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    from cluster import Cluster
    directory = tmp_path_factory.mktemp("forms")
    cluster = Cluster(directory, workers=4, worker_flags=["--local_memory=host_memory",
                                                          f"--local_socket_dir={directory}",
                                                          "--client_data_listen=127.0.0.1:0"])
    yield cluster
    print(cluster.tail())
    cluster.close()


def tensors_of(path):
    """The tensors of a safetensors file, as bits."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, tensor in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        kind = TYPES.get(tensor["dtype"], np.uint8)
        shape = tensor["shape"] if tensor["dtype"] in TYPES else [end - begin]
        found[name] = np.frombuffer(data[8 + size + begin:8 + size + end], kind).reshape(shape)
    return found


DENSE = ["--batch=2", "--seq_len=701"]
DOCUMENTS = ["--documents=100,0,251,350"]


@pytest.mark.parametrize("transport", ["relay", "host_memory", "direct"])
@pytest.mark.parametrize("packing", ["qkv", "kv"])
@pytest.mark.parametrize("shape, dtype, layout", [(DENSE, "bf16", "zigzag"),
                                                  (DENSE, "fp32", "striped"),
                                                  (DOCUMENTS, "fp16", "zigzag_per_document")])
def test_packed_inputs(ring, tmp_path, transport, packing, shape, dtype, layout):
    heads = ["--heads=4"] if packing == "qkv" else ["--heads=4", "--kv_heads=2"]
    made = [*shape, *heads, "--head_dim=24", f"--dtype={dtype}", "--seed=7", "--with_dout",
            "--sinks"]
    apart, packed = tmp_path / "apart.safetensors", tmp_path / "packed.safetensors"
    cli("generate", f"--output={apart}", *made)
    cli("generate", f"--output={packed}", *made, f"--packing={packing}")
    ask = [f"--server={ring.address}", "--sinks", f"--layout={layout}", *OPTIONS]
    plain, whole = tensors_of(apart), tensors_of(packed)
    parts = ["q", "k", "v"] if packing == "qkv" else ["k", "v"]
    assert np.array_equal(whole[packing], np.stack([plain[n] for n in parts], -3))
    results = {}
    for source, way in [(apart, "relay"), (packed, transport)]:
        for command in ("forward", "backward"):
            output = tmp_path / f"{source.stem}.{command}.safetensors"
            told = cli(command, *ask, f"--transport={way}", f"--input={source}",
                       f"--output={output}").stdout
            if source == packed and command == "backward":
                assert f"d{packing} " in told
            cli("verify", f"--input={source}", f"--output={output}", "--causal", "--sinks")
            results[source.stem, command] = tensors_of(output)
    for name in ("out", "lse"):
        assert np.array_equal(results["packed", "forward"][name], results["apart", "forward"][name])
    expected = results["apart", "backward"]
    got = results["packed", "backward"]
    assert np.array_equal(got[f"d{packing}"], np.stack([expected[f"d{n}"] for n in parts], -3))
    assert np.array_equal(got["dsinks"], expected["dsinks"])
    if packing == "kv":
        assert np.array_equal(got["dq"], expected["dq"])
    # A wrong gradient is found in its packed form, too.
    done = cli("verify", f"--input={packed}", f"--output={tmp_path}/packed.backward.safetensors",
               "--sinks", code=1)
    assert "MISMATCH" in done.stdout


def test_packed_files_that_make_no_sense(ring, tmp_path):
    packed = tmp_path / "packed.safetensors"
    cli("generate", f"--output={packed}", *DENSE, "--heads=4", "--head_dim=24", "--packing=qkv",
        "--with_dout")
    for flags, field in [(["--kv_heads=2", "--packing=qkv"], "shape.num_kv_heads"),
                         (["--seq_len_kv=9", "--packing=qkv"], "shape.seq_len_kv"),
                         (["--head_dim_v=8", "--packing=kv"], "shape.head_dim_v")]:
        done = cli("generate", f"--output={tmp_path}/x", "--seq_len=8", "--heads=4", *flags, code=3)
        assert field in done.stderr
    # Both forms in one file: which one is meant?
    data = packed.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    end = max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__")
    header["k"] = {"dtype": "BF16", "shape": [0, 1, 4, 24], "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    both = tmp_path / "both.safetensors"
    both.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size:])
    done = cli("forward", f"--server={ring.address}", f"--input={both}", f"--output={tmp_path}/x",
               code=3)
    assert '"k" cannot be combined with "qkv"' in done.stderr


@pytest.mark.parametrize("transport", ["relay", "host_memory"])
@pytest.mark.parametrize("documents", ["100,0,251,350", "5,3,0,700,1,1,9", "900"])
def test_lse_per_document(ring, tmp_path, transport, documents):
    made = [f"--documents={documents}", "--heads=4", "--kv_heads=2", "--head_dim=24",
            "--dtype=bf16", "--seed=7", "--with_dout", "--dlse"]
    flat, per_document = tmp_path / "flat.safetensors", tmp_path / "document.safetensors"
    cli("generate", f"--output={flat}", *made)
    cli("generate", f"--output={per_document}", *made, "--lse=per_document")
    ask = [f"--server={ring.address}", f"--transport={transport}", *OPTIONS]
    form = "--lse=per_document"
    forward, other = tmp_path / "f.safetensors", tmp_path / "o.safetensors"
    # In a file for both directions, dlse belongs to backward alone, so forward does not read it.
    source = tmp_path / "source.safetensors"
    cli("generate", f"--output={source}", *made[:-1])
    cli("forward", *ask, f"--input={source}", f"--output={forward}")
    cli("forward", *ask, f"--input={source}", f"--output={other}", form)
    cli("verify", f"--input={source}", f"--output={other}", form, "--causal")
    lse, by_document = (tensors_of(path)["lse"] for path in (forward, other))
    lengths = [int(n) for n in documents.split(",")]
    assert by_document.shape == (len(lengths), 4, max(lengths))
    begin = 0
    for row, length in zip(by_document, lengths):
        assert np.array_equal(row[:, :length], lse[:, begin:begin + length])
        assert (row[:, length:] == 0xff800000).all()
        begin += length
    # Backward takes both, and dlse, in that form; elements after a document's end are ignored.
    gradients = tmp_path / "g.safetensors"
    cli("backward", *ask, f"--input={per_document}", f"--output={gradients}", form, "--dlse")
    checked = cli("verify", f"--input={per_document}", f"--output={gradients}", form, "--dlse",
                  "--causal").stdout
    assert "dq" in checked
    with_forward = tmp_path / "w.safetensors"
    join(source, other, with_forward)
    cli("backward", *ask, f"--input={with_forward}", f"--output={gradients}", form)
    cli("verify", f"--input={with_forward}", f"--output={gradients}", form, "--causal")
    done = cli("backward", *ask, f"--input={with_forward}", f"--output={gradients}", code=3)
    assert '"lse" has shape' in done.stderr


def join(first, second, target):
    """A file with the tensors of both."""
    header, body = {}, b""
    for path in (first, second):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, tensor in json.loads(data[8:8 + size]).items():
            if name == "__metadata__" or name in header:
                continue
            begin, end = tensor["data_offsets"]
            part = data[8 + size + begin:8 + size + end]
            header[name] = {**tensor, "data_offsets": [len(body), len(body) + len(part)]}
            body += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_lse_per_document_needs_documents(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24", "--with_dout")
    done = cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={tmp_path}/x",
               "--lse=per_document", code=3)
    assert "lse_format" in done.stderr


@pytest.mark.parametrize("transport", ["relay", "host_memory"])
@pytest.mark.parametrize("schedule", [["--schedule=single"], ["--schedule=ring", "--world_size=3"],
                                      ["--schedule=all_gather", "--layout=striped"]])
def test_probabilities(ring, tmp_path, transport, schedule):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    cli("generate", f"--output={source}", *DOCUMENTS, "--heads=4", "--kv_heads=2", "--head_dim=24",
        "--dtype=bf16", "--seed=7", "--sinks", "--alibi", "--mask=heads")
    asked = ["--sinks", "--alibi", "--mask", "--dropout=0.2,5", "--causal",
             "--probabilities=3:349,0:0,2:250,0:99,0:0"]
    server = f"--server={ring.address}"
    told = cli("forward", server, *schedule, f"--transport={transport}", f"--input={source}",
               f"--output={forward}", *asked).stdout
    assert "probabilities fp32 [5, 4, 350]" in told
    checked = cli("verify", f"--input={source}", f"--output={forward}", *asked).stdout
    assert "probabilities ok" in checked
    tensors = tensors_of(forward)
    p, lse = (tensors[n].view(np.float32) for n in ("probabilities", "lse"))
    sinks = tensors_of(source)["sinks"].view(np.float32)
    tokens = [100 + 251 + 349, 0, 100 + 250, 99, 0]
    for row, token in zip(p, tokens):
        assert np.allclose(row.sum(-1) + np.exp(sinks - lse[:, token]), 1, atol=1e-4)
    assert np.array_equal(p[1], p[4])
    # Neither the flag nor the tensor is ignored, and other rows are another result.
    fewer = [flag for flag in asked if "probabilities" not in flag]
    done = cli("verify", f"--input={source}", f"--output={forward}", *fewer, code=3)
    assert '"probabilities" is given without --probabilities' in done.stderr
    other = [*fewer, "--probabilities=3:348,0:0,2:250,0:99,0:0"]
    cli("verify", f"--input={source}", f"--output={forward}", *other, code=1)


def test_bad_probabilities(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24", "--with_dout")
    files = [f"--server={ring.address}", f"--input={source}", f"--output={tmp_path}/x"]
    for rows, field in [("2:0", "reply.probability_rows[0].batch"),
                        ("0:0,1:701", "reply.probability_rows[1].position")]:
        assert field in cli("forward", *files, f"--probabilities={rows}", code=3).stderr
    assert "expected BATCH:POSITION" in cli("forward", *files, "--probabilities=5", code=2).stderr
    many = ",".join(["0:1"] * 4097)
    assert "reply.probability_rows" in cli("forward", *files, f"--probabilities={many}",
                                           code=3).stderr


@pytest.mark.parametrize("tile", [["--tile_q=12"], ["--tile_kv=192", "--tile_q=480"],
                                  ["--key_splits=1", "--tile_kv=960"]])
def test_tuning(ring, tmp_path, tile):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24", "--with_dout")
    for command, output in [("forward", forward), ("backward", backward)]:
        cli(command, f"--server={ring.address}", f"--input={source}", f"--output={output}", *tile,
            *OPTIONS)
        cli("verify", f"--input={source}", f"--output={output}", "--causal")


def test_tuning_that_no_worker_offers(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24")
    files = [f"--server={ring.address}", f"--input={source}", f"--output={tmp_path}/x"]
    for flag, says in [("--tile_q=100", "plan.tuning.tile_q: is 100"),
                       ("--tile_kv=128", "take 192, 384, 576, 768, 960"),
                       ("--key_splits=2", "plan.tuning.key_splits: is 2")]:
        done = cli("forward", *files, flag, "--json", code=3)
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "INVALID_ARGUMENT" and error["reason"] == "TUNING_NOT_OFFERED"
        assert says in error["message"]


def test_members_by_name(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24", "--with_dout")
    files = [f"--server={ring.address}", f"--input={source}", f"--output={tmp_path}/x"]
    names = sorted(worker.name for worker in ring.topology().workers)
    assert len(names) == 4
    for chosen in [[names[2], names[0]], [names[1]], names[::-1]]:
        for command in ("forward", "backward"):
            done = cli(command, *files, f"--members={','.join(chosen)}", "--causal", "--json")
            assert json.loads(done.stdout)["plan"]["members"] == chosen
            cli("verify", f"--input={source}", f"--output={tmp_path}/x", "--causal")
    done = cli("forward", *files, f"--members={names[0]},nobody", "--json", code=3)
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "FAILED_PRECONDITION" and error["reason"] == "MEMBER_NOT_READY"
    assert "nobody" in error["message"] and error["violations"][0]["field"] == "plan.members"
    done = cli("forward", *files, f"--members={names[0]}", "--world_size=2", code=3)
    assert "plan.members" in done.stderr
    # A forward's residual stays on its workers in any order of members.
    kept = json.loads(cli("forward", *files, f"--members={names[3]},{names[1]}", "--causal",
                          "--retain=1m", "--json").stdout)["residual"]["handle"]
    done = cli("backward", *files, f"--residual={kept}", "--keep_residual", "--causal", "--json")
    assert json.loads(done.stdout)["plan"]["members"] == [names[3], names[1]]
    cli("verify", f"--input={source}", f"--output={tmp_path}/x", "--causal")
    done = cli("backward", *files, f"--residual={kept}", f"--members={names[1]},{names[3]}",
               "--causal", code=3)
    assert "plan.members" in done.stderr and f"{names[3]}, {names[1]}" in done.stderr
    cli("backward", *files, f"--residual={kept}", f"--members={names[3]},{names[1]}", "--causal")


def call_side_by_side(ring, tmp_path, groups):
    """Two forwards by each group of members, all at once, each verified."""
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", *DENSE, "--heads=4", "--head_dim=24")
    wrong = []

    def call(index, members):
        output = tmp_path / f"{index}.safetensors"
        done = cli("forward", f"--server={ring.address}", f"--input={source}",
                   f"--output={output}", f"--members={','.join(members)}", "--json")
        if json.loads(done.stdout)["plan"]["members"] != members:
            wrong.append(members)
        cli("verify", f"--input={source}", f"--output={output}")

    calls = range(2 * len(groups))
    threads = [threading.Thread(target=call, args=(i, groups[i % len(groups)])) for i in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all((tmp_path / f"{i}.safetensors").exists() for i in calls)


def test_disjoint_members_side_by_side(ring, tmp_path):
    names = sorted(worker.name for worker in ring.topology().workers)
    call_side_by_side(ring, tmp_path, [names[:2], names[2:]])


def test_groups_of_a_ring_of_eight_side_by_side(make_ring, tmp_path):
    ring = make_ring(workers=8)
    names = sorted(worker.name for worker in ring.topology().workers)
    call_side_by_side(ring, tmp_path, [names[7:3:-1], names[:3], names[3:4]])
