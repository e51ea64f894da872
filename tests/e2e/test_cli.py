"""The command line as users type it."""

import contextlib
import json
import pathlib
import re
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from cluster import BIN, CLI, SERVER, WORKER
from command_line import OPTIONS, cli, generate


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_generate_forward_backward_verify(ring, tmp_path, dtype):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    generate(source, dtype=dtype)
    cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}", *OPTIONS)
    assert "out" in cli("verify", f"--input={source}", f"--output={forward}", "--causal").stdout
    cli("backward", f"--server={ring.address}", f"--input={source}", f"--output={backward}",
        *OPTIONS)
    assert "dk" in cli("verify", f"--input={source}", f"--output={backward}", "--causal").stdout


def test_a_batch_without_rows(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    shape = ["--seq_len=70", "--heads=4", "--kv_heads=2", "--head_dim=32", "--seed=7", "--batch=0"]
    cli("generate", f"--output={source}", *shape, "--with_dout", "--sinks")
    server, read = f"--server={ring.address}", f"--input={source}"
    cli("forward", server, read, f"--output={forward}", "--sinks", *OPTIONS)
    cli("backward", server, read, f"--output={backward}", "--sinks", *OPTIONS)
    for path in (forward, backward):
        cli("verify", read, f"--output={path}", "--sinks", "--causal")


def retyped(source, target, types):
    """Copies a safetensors file with its tensors in other types: {type: (new type, conversion)}."""
    data = source.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors, header, body = json.loads(data[8:begin]), {}, b""
    tensors.pop("__metadata__", None)
    for name, tensor in tensors.items():
        first, last = tensor["data_offsets"]
        raw = data[begin + first:begin + last]
        if name in types:
            tensor["dtype"], convert = types[name]
            raw = convert(raw)
        header[name] = tensor | {"data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_integers_and_sinks_of_other_types(ring, tmp_path):
    """PyTorch's integers are I64, and a model's sinks are BF16."""
    source, narrow, wide = (tmp_path / f"{n}.safetensors" for n in ("source", "narrow", "wide"))
    cli("generate", f"--output={source}", "--seq_len=350", "--heads=4", "--kv_heads=2", "--head_dim=32",
        "--seed=7", "--documents=100,0,250", "--segment_ids", "--sinks")

    def widen(raw):
        return np.frombuffer(raw, np.int32).astype(np.int64).tobytes()

    upper = lambda raw: (np.frombuffer(raw, np.uint32) >> 16).astype(np.uint16)
    retyped(source, narrow, {"sinks": ("F32", lambda raw: (upper(raw).astype(np.uint32) << 16).tobytes())})
    retyped(source, wide, {"sinks": ("BF16", lambda raw: upper(raw).tobytes())} | {
        name: ("I64", widen) for name in ("cu_seqlens_q", "cu_seqlens_k", "q_segment_ids", "kv_segment_ids")})
    flags, results = ["--segment_ids", "--sinks"], {}
    for path in (narrow, wide):
        out = path.with_suffix(".out")
        cli("forward", f"--server={ring.address}", f"--input={path}", f"--output={out}", *flags, *OPTIONS)
        cli("verify", f"--input={path}", f"--output={out}", *flags, "--causal")
        results[path] = out.read_bytes()
    assert results[narrow] == results[wide]
    retyped(source, wide, {"q_segment_ids": (
        "I64", lambda raw: (np.frombuffer(raw, np.int32).astype(np.int64) + 2**31).tobytes())})
    done = cli("forward", f"--server={ring.address}", f"--input={wide}", f"--output={tmp_path}/x", *flags,
               *OPTIONS, code=3)
    assert '"q_segment_ids" has 2147483648 at 0; it must fit int32' in done.stderr


def test_verify_expects_nan_where_the_inputs_have_it(ring, tmp_path):
    source, poisoned, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ipfb")
    generate(source)

    def poison(raw):
        q = np.frombuffer(raw, np.uint16).copy()
        q[5] = 0x7fc0  # NaN, in the first token's first head
        return q.tobytes()

    retyped(source, poisoned, {"q": ("BF16", poison)})
    server, read = f"--server={ring.address}", f"--input={poisoned}"
    cli("forward", server, read, f"--output={forward}", *OPTIONS)
    cli("backward", server, read, f"--output={backward}", *OPTIONS)
    for output in (forward, backward):
        assert " ok" in cli("verify", read, f"--output={output}", "--causal").stdout
        cli("verify", f"--input={source}", f"--output={output}", "--causal", code=1)
    clean = tmp_path / "c.safetensors"
    cli("forward", server, f"--input={source}", f"--output={clean}", *OPTIONS)
    cli("verify", read, f"--output={clean}", "--causal", code=1)


class LateServer:
    """Forwards connections to an address, each after some seconds, as a busy machine does."""

    def __init__(self, address, seconds):
        self.upstream = address.rsplit(":", 1)
        self.seconds = seconds
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        time.sleep(self.seconds)
        with contextlib.suppress(OSError):
            upstream = socket.create_connection((self.upstream[0], int(self.upstream[1])))
            threading.Thread(target=self._copy, args=[upstream, connection], daemon=True).start()
            self._copy(connection, upstream)

    @staticmethod
    def _copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self.listener.close()


def test_a_busy_server_that_accepts_late(ring, tmp_path):
    """An attempt to connect lasts longer than gRPC's first backoffs of up to two seconds."""
    source = tmp_path / "i.safetensors"
    generate(source, seq_len=40)
    late = LateServer(ring.address, 2.5)
    cli("forward", f"--server={late.address}", f"--input={source}",
        f"--output={tmp_path / 'f.safetensors'}", "--causal", timeout=30)
    late.close()


@pytest.mark.parametrize("documents", [[], ["--documents=100,0,250,350"]])
def test_sinks_and_dlse(ring, tmp_path, documents):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--seq_len=700", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--dtype=bf16", "--seed=7", "--with_dout", "--sinks", "--dlse", *documents)
    server, read = f"--server={ring.address}", f"--input={source}"
    cli("forward", server, read, f"--output={forward}", "--sinks", *OPTIONS)
    checked = cli("verify", read, f"--output={forward}", "--sinks", "--causal").stdout
    assert "out" in checked and "lse" in checked
    cli("backward", server, read, f"--output={backward}", "--sinks", "--dlse", *OPTIONS)
    checked = cli("verify", read, f"--output={backward}", "--sinks", "--dlse", "--causal").stdout
    assert re.search(r"^dsinks ok", checked, re.M), checked
    # Neither a flag nor a tensor is ignored, and the result is another one without them.
    for command, flags, says in [
            ("forward", [], "sinks"), ("backward", ["--sinks"], "dlse"),
            ("backward", ["--dlse"], "sinks")]:
        done = cli(command, server, read, f"--output={tmp_path}/x", *flags, *OPTIONS, code=3)
        assert f'"{says}" is given without --{says}' in done.stderr
    plain = tmp_path / "p.safetensors"
    generate(plain)
    done = cli("forward", server, f"--input={plain}", f"--output={tmp_path}/x", "--sinks", *OPTIONS,
               code=3)
    assert '"sinks" is missing; --sinks needs it' in done.stderr


def test_fp32_results(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    generate(source)
    server, fp32 = f"--server={ring.address}", "--output_dtype=fp32"
    ask = [server, fp32, *OPTIONS]
    wrote = cli("forward", *ask, f"--input={source}", f"--output={forward}").stdout
    assert "out fp32" in wrote
    cli("verify", f"--input={source}", f"--output={forward}", fp32, "--causal")
    # Without the flag neither the file's type nor the result is taken for something else.
    done = cli("verify", f"--input={source}", f"--output={forward}", "--causal", code=3)
    assert '"out" is F32 and must be BF16' in done.stderr
    cli("backward", *ask, f"--input={source}", f"--output={backward}")
    checked = cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", fp32,
                  "--causal").stdout
    assert "dq" in checked and "dv" in checked


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_fp8(ring, tmp_path, dtype):
    """Products in e4m3: judged by the option's own bound, which a result without it does not keep."""
    source, fp8, plain = (tmp_path / f"{n}.safetensors" for n in "ifp")
    generate(source, dtype=dtype)
    server, read, asked = f"--server={ring.address}", f"--input={source}", "--compute_dtype=fp8_e4m3"
    cli("forward", server, read, f"--output={fp8}", asked, *OPTIONS)
    checked = cli("verify", read, f"--output={fp8}", asked, "--causal").stdout
    assert re.search(r"^out ok", checked, re.M) and re.search(r"^lse ok", checked, re.M), checked
    cli("forward", server, read, f"--output={plain}", *OPTIONS)
    # Each is the other's wrong result: neither could pass if the option were ignored somewhere.
    for output, flags in [(fp8, []), (plain, [asked])]:
        done = cli("verify", read, f"--output={output}", *flags, "--causal", code=1)
        assert "FAIL" in done.stdout, done.stdout
    for command, flags, says in [
            ("backward", [], "options.compute_dtype"),
            ("forward", ["--probabilities=0:5"], "reply.probability_rows")]:
        done = cli(command, server, read, f"--output={tmp_path}/x", asked, *flags, *OPTIONS, code=None)
        assert done.returncode != 0 and says in done.stderr, done.stderr
    fp32 = tmp_path / "32.safetensors"
    generate(fp32, dtype="fp32")
    done = cli("forward", server, f"--input={fp32}", f"--output={tmp_path}/x", asked, *OPTIONS, code=None)
    assert done.returncode != 0 and "options.compute_dtype" in done.stderr, done.stderr


TERMS = ["--alibi", "--bias", "--mask", "--segment_ids"]


@pytest.mark.parametrize("documents, encoding", [([], []), (["--documents=100,0,250,350"],
                                                            ["--mask_bits"])])
def test_score_terms(ring, tmp_path, documents, encoding):
    """Every option of single pairs through files: computed, verified, and none of them ignored."""
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--seq_len=700", "--heads=4", "--kv_heads=2",
        "--head_dim=32", "--dtype=bf16", "--seed=7", "--with_dout", "--alibi", "--bias=heads",
        "--mask=one", "--segment_ids", *encoding, *documents)
    server, read = f"--server={ring.address}", f"--input={source}"
    terms = [*TERMS, *encoding, "--dropout=0.1,42", "--dbias", "--softcap=20",
             "--bias_before_softcap", *OPTIONS]
    judged = [flag for flag in terms if flag not in OPTIONS] + ["--causal"]
    cli("forward", server, read, f"--output={forward}", *terms)
    checked = cli("verify", read, f"--output={forward}", *judged).stdout
    assert "out" in checked and "lse" in checked
    cli("backward", server, read, f"--output={backward}", *terms)
    once, again = (tmp_path / f"{n}.safetensors" for n in ("once", "again"))
    for output in (once, again):
        cli("backward", server, read, f"--output={output}", *terms, "--deterministic")
    assert again.read_bytes() == once.read_bytes()
    checked = cli("verify", read, f"--output={backward}", *judged).stdout
    assert re.search(r"^dbias ok", checked, re.M), checked
    # Another seed, another result; and what has a tensor needs its flag.
    other = [flag if "dropout" not in flag else "--dropout=0.1,43" for flag in judged]
    cli("verify", read, f"--output={forward}", *other, code=1)
    for flag, tensor in [("--alibi", "alibi_slopes"), ("--bias", "bias"), ("--mask", "mask"),
                         ("--segment_ids", "q_segment_ids")]:
        fewer = [f for f in terms if f != flag and not (flag == "--bias" and "bias" in f)
                 and not (flag == "--mask" and "mask" in f)]
        done = cli("forward", server, read, f"--output={tmp_path}/x", *fewer, code=3)
        assert f'"{tensor}" is given without {flag}' in done.stderr
    fewer = [f for f in judged if f != "--dbias"]
    done = cli("verify", read, f"--output={backward}", *fewer, code=3)
    assert '"dbias" is given without --dbias' in done.stderr
    plain = tmp_path / "p.safetensors"
    generate(plain)
    for flag, tensor in [("--bias", "bias"), ("--mask", "mask"), ("--alibi", "alibi_slopes"),
                         ("--segment_ids", "q_segment_ids")]:
        done = cli("forward", server, f"--input={plain}", f"--output={tmp_path}/x", flag, *OPTIONS,
                   code=3)
        assert f'"{tensor}" is missing; {flag} needs it' in done.stderr


def test_bad_term_flags(ring, tmp_path):
    plain = tmp_path / "p.safetensors"
    generate(plain)
    files = [f"--server={ring.address}", f"--input={plain}", f"--output={tmp_path}/x"]
    for flags, says in [(["--dropout=0.1"], "--dropout=0.1: expected RATE,SEED"),
                        (["--dropout=x,1"], "--dropout=x,1"), (["--dbias"], "--dbias needs --bias"),
                        (["--mask_bits"], "--mask_bits needs --mask"),
                        (["--bias_before_softcap"], "--bias_before_softcap needs --bias")]:
        assert says in cli("forward", *files, *flags, code=2).stderr
    assert "options.dropout.rate" in cli("forward", *files, "--dropout=1.0,1", code=3).stderr
    # Without a file there is nothing that ALiBi's slopes could come from.
    problem = ["--seq_len=1000", "--heads=4"]
    assert "--alibi" in cli("plan", *problem, "--alibi", code=2).stderr
    small = json.loads(cli("plan", *problem, "--world_size=4", "--schedule=ring", "--json").stdout)
    large = json.loads(cli("plan", *problem, "--world_size=4", "--schedule=ring", "--json",
                           "--bias=heads", "--alibi=geometric", "--segment_ids",
                           "--dropout=0.1,3").stdout)
    # The bias lies with its rows and never travels; ids travel with their keys.
    grown = large["plan"]["ranks"][0]["buffer_bytes"] - small["plan"]["ranks"][0]["buffer_bytes"]
    assert 4 * 250 * 1000 * 2 <= grown <= 4 * 250 * 1000 * 2 + 4 * 1000
    sent = large["plan"]["ranks"][0]["sent_bytes"] - small["plan"]["ranks"][0]["sent_bytes"]
    assert sent == 3 * 250 * 4


def test_packed_documents(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=600", "--heads=2",
        "--head_dim=32", "--dtype=fp16", "--seed=7", "--documents=100,0,250,250", "--with_dout")
    cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}", *OPTIONS)
    cli("verify", f"--input={source}", f"--output={forward}", "--causal")


def test_thousands_of_stripes(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=8192", "--heads=1",
        "--head_dim=8", "--dtype=fp32", "--seed=7", "--with_dout")
    server, striped = f"--server={ring.address}", ["--layout=striped", "--stripe=2"]
    cli("forward", server, f"--input={source}", f"--output={forward}", *striped, *OPTIONS)
    cli("backward", server, f"--input={source}", f"--output={backward}", *striped, *OPTIONS)
    cli("verify", f"--input={source}", f"--output={backward}", f"--forward={forward}", "--causal")


def test_verify_finds_a_wrong_result(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    generate(source)
    cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}", *OPTIONS)
    cli("verify", f"--input={source}", f"--output={forward}", code=1)  # not causal: another answer
    cli("verify", f"--input={source}", f"--output={forward}", "--causal", "--window=64,0", code=1)


def test_verify_judges_everything_of_a_long_request_or_says_what_not(ring, tmp_path):
    source, forward, backward = (tmp_path / f"{n}.safetensors" for n in "ifb")
    # Long enough that the statistics of dk and dv are not computed; the window keeps it quick.
    window = "--window=64,0"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=65536", "--heads=1",
        "--head_dim=2", "--dtype=fp32", "--seed=7", "--with_dout")
    server = f"--server={ring.address}"
    cli("forward", server, f"--input={source}", f"--output={forward}", window)
    cli("backward", server, f"--input={source}", f"--output={backward}", window)
    files = [f"--input={source}", f"--output={backward}"]

    whole = json.loads(cli("verify", *files, f"--forward={forward}", window, "--json").stdout)
    assert whole["passed"] and whole["unjudged"] == {}
    assert list(whole["tensors"]) == ["out", "lse", "dq", "dk", "dv"]
    assert whole["tensors"]["dk"]["rows"] == 64

    partly = cli("verify", *files, window, code=4).stdout
    assert "dk  not judged: too large without out and lse" in partly and "INCOMPLETE" in partly
    told = json.loads(cli("verify", *files, window, "--json", code=4).stdout)
    assert not told["passed"] and list(told["unjudged"]) == ["dk", "dv"]

    # A wrong answer outweighs what is missing, and so does a wrong forward pass.
    cli("verify", *files, "--window=63,0", code=1)
    cli("verify", *files, f"--forward={forward}", "--window=63,0", code=1)
    # Of two files with an out, one would not be judged; gradients do not hold a forward pass.
    twice = cli("verify", f"--input={source}", f"--output={forward}", f"--forward={forward}",
                window, code=3)
    assert "out is in" in twice.stderr
    cli("verify", *files, f"--forward={backward}", window, code=3)


def test_json_holds_what_it_documents(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    generate(source)
    done = cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}",
               f"--trace={tmp_path}/trace.json", "--json", *OPTIONS)
    report = json.loads(done.stdout)
    assert report["plan"]["world_size"] == 4
    assert done.stderr == ""  # no progress bar without a terminal
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any("exchange" in json.dumps(e) for e in trace["traceEvents"])
    # Which kernels served: in the report, in the timeline and in words.
    for rank in report["ranks"]:
        assert [(use["call"], use["class"]) for use in rank["kernels"]] == [("forward", "plain")]
        (use,) = rank["kernels"]
        assert use["family"] in ("cpu_bf16", "cpu_fp32") and use["instructions"] and use["calls"] > 0
    forwards = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].endswith(" forward")]
    assert forwards and all(e["args"] == {"family": use["family"], "class": "plain"} for e in forwards)
    done = cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}", *OPTIONS)
    assert f"ran    forward by {use['family']}/plain {use['instructions']}\n" in done.stdout


def test_plan_without_a_server():
    done = cli("plan", "--batch=1", "--seq_len=65536", "--heads=8", "--head_dim=128",
               "--dtype=bf16", "--causal", "--schedule=ring", "--world_size=4")
    assert "rank" in done.stdout and "zigzag" in done.stdout


def test_errors_are_typed(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    generate(source)
    done = cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}",
               "--softcap=-1", code=None)
    assert "INVALID_ARGUMENT" in done.stderr and "options.softcap" in done.stderr
    assert not forward.exists()
    done = cli("forward", "--server=127.0.0.1:1", f"--input={source}", f"--output={forward}",
               "--deadline=2s", code=None)
    assert "UNAVAILABLE" in done.stderr or "DEADLINE_EXCEEDED" in done.stderr


@pytest.mark.parametrize("make", [
    lambda source, target: source, lambda source, target: target.symlink_to(source) or target,
    lambda source, target: target.hardlink_to(source) or target])
@pytest.mark.parametrize("flag", ["--output", "--trace"])
def test_an_input_is_never_overwritten(tmp_path, make, flag):
    source = tmp_path / "i.safetensors"
    generate(source, seq_len=20)
    before = source.read_bytes()
    target = make(source, tmp_path / "other-name")
    output = [] if flag == "--output" else [f"--output={tmp_path}/f.safetensors"]
    for command in ("forward", "backward"):
        # No process listens there: the command must reject the flag before it dials.
        done = cli(command, "--server=127.0.0.1:1", f"--input={source}", *output,
                   f"{flag}={target}", code=2)
        assert f"{flag}=" in done.stderr and "same file as --input=" in done.stderr
        assert source.read_bytes() == before and target.read_bytes() == before


def test_a_trace_that_cannot_be_written_costs_no_computation(tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    generate(source, seq_len=20)
    done = cli("forward", "--server=127.0.0.1:1", f"--input={source}", f"--output={forward}",
               f"--trace={tmp_path}/no/such/folder/t.json", "--deadline=60s", code=3)
    assert "NOT_FOUND" in done.stderr and "--trace=" in done.stderr


def test_long_work_shows_that_it_goes_on(make_ring, tmp_path):
    ring = make_ring(workers=1, server_flags=["--heartbeat_interval=50ms"])
    source, backward = tmp_path / "i.safetensors", tmp_path / "b.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=6000", "--heads=8",
        "--head_dim=64", "--dtype=fp32", "--seed=7", "--with_dout")
    # One device, so one step: it is the tiles that move.
    done = cli("backward", f"--server={ring.address}", f"--input={source}",
               f"--output={backward}", "--schedule=single", "--progress_interval=50ms")
    seen = [int(p) for p in re.findall(r"^ringattn: computing, (\d+)%, after \d+ s$", done.stderr,
                                       re.MULTILINE)]
    assert seen == sorted(seen)
    assert len({p for p in seen if 0 < p < 100}) >= 4, done.stderr
    quiet = cli("backward", f"--server={ring.address}", f"--input={source}",
                f"--output={backward}", "--schedule=single", "--progress_interval=0")
    assert quiet.stderr == ""


def test_a_long_computation_is_announced(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    cli("generate", f"--output={source}", "--batch=1", "--seq_len=131072", "--heads=8", "--head_dim=16",
        "--dtype=bf16", "--seed=7")
    call = subprocess.Popen(
        [CLI, "forward", f"--server={ring.address}", f"--input={source}",
         f"--output={tmp_path}/f.safetensors", "--world_size=1"], stderr=subprocess.PIPE, text=True)
    said = call.stderr.readline()
    call.terminate()
    call.wait(timeout=30)
    seconds = re.fullmatch(r"ringattn: computing is predicted to take (\d+) s\n", said)
    assert seconds and int(seconds[1]) >= 10, said


def test_the_readmes_example_is_small_enough_for_cpus():
    """Two seconds at most, forward and backward, at 1e10 operations per second."""
    text = (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    flags = re.search(r"^\$ringattn generate --output=\S+ (.*)$", text, re.M)[1].split()
    shape = [flag for flag in flags if flag != "--with_dout"] + ["--causal", "--json"]
    flops = sum(json.loads(cli("plan", *shape, *backward).stdout)["plan"]["flops"]
                for backward in ([], ["--backward"]))
    assert 0 < flops < 2e10


@pytest.mark.parametrize("flags", [
    ["plan"], ["plan", "--seq_len=8", "--window=3,"], ["plan", "--seq_len=8", "--documents=9"],
    ["plan", "--seq_len=-1"], ["plan", "--no_such_flag"], ["no_such_command"], [],
    ["info", "--server=127.0.0.1:1", "--deadline=soon"],
    ["forward", "--server=127.0.0.1:1", "--input=i", "--output=o", "--deadline=-1s"],
    ["verify", "--input=i", "--output=o", "--progress_interval=often"]])
def test_wrong_usage_exits_with_2(flags):
    done = cli(*flags, code=2)
    assert done.stderr and not done.stdout


def test_other_failures_exit_with_3(tmp_path):
    cli("verify", f"--input={tmp_path}/absent", f"--output={tmp_path}/absent", code=3)
    cli("plan", "--seq_len=8", "--softcap=-1", code=3)
    assert json.loads(cli("plan", "--json", code=2).stdout)["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("binary", [CLI, SERVER, WORKER])
def test_version(binary):
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)
    done = subprocess.run([str(binary), "--no_such_flag"], capture_output=True, text=True,
                          timeout=20)
    assert done.returncode == 2


def test_plan_with_a_server_predicts_what_the_server_predicts(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    shape = ["--batch=1", "--seq_len=3000", "--heads=4", "--head_dim=64", "--dtype=bf16"]
    cli("generate", f"--output={source}", "--seed=7", *shape)
    report = json.loads(cli("forward", f"--server={ring.address}", f"--input={source}",
                            f"--output={forward}", "--schedule=ring", "--json").stdout)
    planned = json.loads(cli("plan", *shape, "--schedule=ring", f"--server={ring.address}",
                             "--json").stdout)["plan"]
    assert planned["world_size"] == report["plan"]["world_size"] == 4
    assert planned["rates"]["source"] == "server"
    assert planned["predicted_compute_seconds"] == pytest.approx(
        report["plan"]["predicted_compute_seconds"], rel=1e-6)
    assert "measured" in cli("plan", *shape, f"--server={ring.address}").stdout
    alone = cli("plan", *shape)
    assert "with default rates, which describe no real machine" in alone.stdout
    assert json.loads(cli("plan", *shape, "--json").stdout)["plan"]["rates"]["source"] == "defaults"


def test_messages_say_things_once_and_in_one_unit(ring, tmp_path):
    source = tmp_path / "i.safetensors"
    generate(source, seq_len=20)
    done = cli("forward", f"--server={ring.address}", f"--input={source}",
               f"--output={tmp_path}/f.safetensors", "--schedule=ring", "--world_size=9", code=3)
    assert "plan.world_size: is 9, but only" in done.stderr
    assert "plan.world_size: plan.world_size" not in done.stderr
    one = cli("plan", "--seq_len=1", "--heads=1", "--head_dim=8").stdout
    assert "1 token is within" in one and "1 tokens" not in one
    plan = cli("plan", "--seq_len=65536", "--heads=8", "--head_dim=128", "--schedule=ring").stdout
    assert " MB" in plan and "iB" not in plan


def test_a_file_of_another_kind_is_called_that(tmp_path):
    source = tmp_path / "notes.txt"
    source.write_text("1,2,3\n" * 100)
    done = cli("verify", f"--input={source}", f"--output={source}", code=3)
    assert "notes.txt: not a safetensors file" in done.stderr
    assert not re.search(r"\d{10}", done.stderr)


def test_verify_finds_a_hundredth_of_the_tokens_zeroed(ring, tmp_path):
    source, forward = tmp_path / "i.safetensors", tmp_path / "f.safetensors"
    tokens, heads, dim = 4000, 4, 32
    cli("generate", f"--output={source}", "--batch=1", f"--seq_len={tokens}", f"--heads={heads}",
        f"--head_dim={dim}", "--dtype=fp32", "--seed=7")
    cli("forward", f"--server={ring.address}", f"--input={source}", f"--output={forward}",
        "--causal")
    files = [f"--input={source}", f"--output={forward}", "--causal"]
    right = json.loads(cli("verify", *files, "--json").stdout)["tensors"]["out"]
    assert (right["rows"], right["total_rows"], right["suspects"]) == (64, tokens * heads, 0)
    assert f"rows 64 of {tokens * heads} (all scanned, 0 suspect)" in cli("verify", *files).stdout

    content = bytearray(forward.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    row = heads * dim * 4
    begin = header + json.loads(content[8:header])["out"]["data_offsets"][0] + 1500 * row
    content[begin:begin + tokens // 100 * row] = bytes(tokens // 100 * row)
    forward.write_bytes(content)
    for seed in range(1, 6):
        wrong = cli("verify", *files, f"--seed={seed}", code=1).stdout
        assert f"(all scanned, {tokens // 100 * heads} suspect)" in wrong


@pytest.mark.parametrize("content", [
    b"", b"short", struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"{}  ",
    struct.pack("<Q", 9) + b"not json!", struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 62) + b'{"q":{"dtype":"F32","shape":[4],"data_offsets":[0,9999999999]}}'[:62]])
def test_malformed_files(ring, tmp_path, content):
    source = tmp_path / "bad.safetensors"
    source.write_bytes(content)
    done = cli("forward", f"--server={ring.address}", f"--input={source}",
               f"--output={tmp_path}/f.safetensors", code=None)
    assert "bad.safetensors" in done.stderr


def test_every_command_has_help():
    listed = cli("--help").stdout
    for command in ("generate", "forward", "backward", "verify", "plan", "info", "topology",
                    "bench", "up", "down"):
        assert command in listed
        assert "--" in cli(command, "--help").stdout


def test_info_topology_and_bench(ring):
    assert "version" in cli("info", f"--server={ring.address}").stdout.lower()
    assert "worker-3" in cli("topology", f"--server={ring.address}").stdout
    problem = ["--batch=1", "--seq_len=1024", "--heads=4", "--head_dim=64", "--dtype=bf16", *OPTIONS]
    for more in [[], ["--backward", "--sinks"]]:
        done = cli("bench", f"--server={ring.address}", *problem, *more)
        assert "GB/s" in done.stdout


def test_the_example_runs(ring):
    done = subprocess.run([str(BIN / "client/examples/forward_example"), ring.address],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
