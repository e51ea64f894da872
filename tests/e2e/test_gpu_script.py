"""tests/gpu/service.sh runs where there are GPUs; --cpu keeps its logic from rotting elsewhere."""

import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zipfile

import pytest

from cluster import BIN, CLI
from stubs import ROOT

sys.path.append(str(ROOT / "tests/gpu/service"))

import correctness  # noqa: E402
import inputs  # noqa: E402
import main  # noqa: E402
import rings  # noqa: E402
import tables  # noqa: E402
import timeline  # noqa: E402
from harness import Failure, Harness  # noqa: E402


def test_the_share_of_exchange_that_compute_hides(tmp_path):
    def bar(category, begin, end, process=10):
        return {"ph": "X", "pid": process, "cat": category, "name": "", "tid": 1,
                "ts": begin, "dur": end - begin}
    events = [{"ph": "M", "pid": 10, "name": "process_name"},
              bar("upload", -500, 0), bar("compute", 0, 100), bar("compute", 90, 200),
              bar("compute", 300, 400),
              bar("exchange", 50, 150), bar("exchange", 150, 350),  # 100 and 50 + 50 hidden
              bar("compute", 20, 30, 11), bar("exchange", 10, 110, 11),
              bar("compute", 0, 1000, 1)]  # the client's, no rank's
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    result = timeline.analyse(tmp_path / "trace.json")
    assert result["ranks"][0]["hidden_share"] == pytest.approx(200 / 300)
    assert result["ranks"][0]["compute_seconds"] == pytest.approx(300e-6)
    assert result["ranks"][0]["span_seconds"] == pytest.approx(400e-6)
    assert result["ranks"][1]["hidden_share"] == pytest.approx(0.1)
    assert result["ranks"][1]["begin_seconds"] == pytest.approx(10e-6)
    assert result["ranks"][1]["first_kernel_seconds"] == pytest.approx(10e-6)
    assert result["hidden_share"] == pytest.approx(210 / 400)
    assert result["slowest_span_seconds"] == pytest.approx(400e-6)
    assert result["begin_skew_seconds"] == pytest.approx(10e-6)
    assert result["end_skew_seconds"] == pytest.approx(290e-6)


def test_what_a_ring_is_compared_with():
    cases = rings.cases(main.GPU)
    assert {name: shape.seq_len for name, shape in rings.alone(cases["256k"], 4).items()} == {
        "single": 65536, "single_equal_work": 131072}
    assert rings.alone(cases["128k"], 2)["single_equal_work"].seq_len == 92672  # 131072 / sqrt(2)
    assert rings.alone(cases["32k"], 4)["single_equal_work"].seq_len == 16384
    # Shorter cases have no bound; longer ones keep one GPU busy long enough.
    for name in ("16k", "512k", "1m", "full", "packed"):
        assert list(rings.alone(cases[name], 4)) == ["single"]
    figures = {"of_single": 0.96, "of_single_equal_work": 0.99, "timeline": {"hidden_share": 0.8}}
    assert [(goal["what"], goal["met"]) for goal in rings.goals(cases["256k"], 4, "forward", figures)] == [
        ("forward: of one GPU", False), ("forward: of one GPU with equal work", True),
        ("forward: exchange hidden", False)]
    for name, goal in (("256k", 0.98), ("64k", 0.97), ("32k", 0.95)):
        figures = {"of_single": 1, "of_single_equal_work": goal - 0.001, "timeline": {"hidden_share": 0.949}}
        missed = [goal["goal"] for goal in rings.goals(cases[name], 4, "forward", figures) if not goal["met"]]
        assert missed == [goal, 0.95]


def test_what_cleans_up_is_not_ended_with_its_part(tmp_path):
    def run(result):
        try:
            raise Failure("too late for cleaning up to end within the part")
        finally:
            harness.run(["sh", "-c", f"sleep 2; touch {tmp_path}/clean"], seconds=30, cleans_up=True)

    before = signal.getsignal(signal.SIGALRM)
    harness = Harness(tmp_path, 100)
    try:
        assert not harness.part("late", 1, run)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "clean").exists()


def test_one_file_of_random_numbers_serves_many_shapes(tmp_path):
    dense = inputs.Shape(1000, 4, 2, 64)
    shapes = [dense, dense.share(4), inputs.Shape(150, 2, 2, 32, "fp32"),
              inputs.Shape(600, 4, 4, 32, documents=(100, 499, 1))]
    files = inputs.Inputs(CLI, tmp_path)
    for shape in shapes:
        files.want(shape, True)
    files.start()
    assert len(files.arenas) == 1
    for shape in shapes:
        path = files.view(shape, True, 30)
        mask = ["--causal"]
        # The command line refuses a file whose header leaves out a byte.
        done = subprocess.run([CLI, "verify", f"--input={path}", f"--output={path}", "--json", *mask],
                              capture_output=True, text=True, timeout=60)
        assert "none of out, lse" in done.stdout + done.stderr
        length = struct.unpack("<Q", path.read_bytes()[:8])[0]
        header = json.loads(path.read_bytes()[8:8 + length])
        assert header["q"]["shape"][-3:] == [shape.seq_len, shape.heads, shape.head_dim]
        assert ("cu_seqlens_k" in header) == bool(shape.documents)
        begin, end = header["q"]["data_offsets"]
        data = path.read_bytes()[8 + length:][begin:end]
        if shape.dtype == "bf16":
            values = [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, 20000, 2)]
        else:
            values = struct.unpack(f"<{len(data) // 4}f", data)
        assert max(map(abs, values)) < 4
        assert math.sqrt(sum(value * value for value in values) / len(values)) == pytest.approx(1, .1)
    with pytest.raises(Failure, match="no input was made"):
        files.view(inputs.Shape(100000, 4, 2, 64), True, 1)
    files.close()


def test_distances_between_results():
    a = {"out": ([1, 2, 2, 2], [1.0, 2, 3, 4, 5, 6, 7, 8]), "lse": ([1, 2, 2], [0.0, 1, -math.inf, 3])}
    b = {"out": ([1, 2, 2, 2], [1.0, 2, 3, 4, 5, 9, 7, 4]), "lse": ([1, 2, 2], [0.0, 1, -math.inf, 2.5])}
    assert correctness.distances(a, b) == {"out": 4, "lse": 0.5}  # heads 0 and 1: 3 and 4
    b["out"][1][0] = math.nan
    b["lse"][1][0] = math.nan
    assert all(math.isnan(value) for value in correctness.distances(a, b).values())


def test_json_is_read_apart_from_what_a_long_command_says(tmp_path):
    harness = Harness(tmp_path, 20)
    say = "import sys; print('after 10 s', file=sys.stderr, flush=True); print({})"
    assert harness.run_json([sys.executable, "-c", say]) == {}
    with pytest.raises(Failure, match="printed no JSON: after"):
        harness.run_json([sys.executable, "-c", "print('after')"])
    with pytest.raises(Failure, match="(?s)exits 1.*after 10 s"):
        harness.run_json([sys.executable, "-c", say + "; sys.exit(1)"])


def test_numbers_in_tables():
    assert [tables.number(value) for value in (None, 0, 0.98765, 12.345, 123.45, 0.0012345)] == [
        "", "0", "0.988", "12.3", "123", "0.00123"]


def test_the_gpu_script_on_cpu_workers(tmp_path):
    if shutil.which("patchelf") is None:
        pytest.skip("patchelf is not installed (deploy/install_deps.sh patchelf)")
    made = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}",
                           "--with=//tests/e2e:service_sweep,//tests/e2e:kv_service_sweep", f"--output={tmp_path}/bundle"],
                          capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout + made.stderr
    out = tmp_path / "out"
    names = ("smoke,sweep,agree,64k,128k-mha:backward,packed,kill,kill-backward,in-flight,"
             "end-to-end,residual,memory,kv,peer,tests").split(",")
    done = subprocess.run([ROOT / "tests/gpu/service.sh", "--cpu", f"--bundle={tmp_path}/bundle",
                           f"--only={','.join(names)}", "--seconds=900", "--sweep_seconds=6"],
                          env={**os.environ, "OUT": str(out)}, capture_output=True, text=True,
                          timeout=960)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    parts = json.loads((out / "summary.json").read_text())["parts"]
    assert list(parts) == ["environment", *names]
    assert all(part["ok"] for part in parts.values())
    assert parts["sweep"]["cases"] > 10 and parts["sweep"]["options"]["cases"] > 10
    assert parts["sweep"]["score_terms"]["cases"] > 10
    assert len(parts["agree"]["cases"]) == 9
    assert all(sweep["results"] > 20 and sweep["failed"] == 0 for sweep in parts["kv"]["sweeps"])
    assert parts["kv"]["beside"]["decode"]["runs_of_requests"] > 0
    assert "KV_LOST" in parts["kv"]["loss"]["error"] or "DATA_LOSS" in parts["kv"]["loss"]["error"]
    assert parts["kill"]["replay"]["bit_equal"] and parts["kill"]["repeat_bit_equal"]
    assert parts["kill-backward"]["replay"]["right"]
    for name, command in (("64k", "forward"), ("64k", "backward"), ("128k-mha:backward", "backward"),
                          ("packed", "forward"), ("packed", "backward")):
        figures = parts[name][command]
        assert 0 < figures["timeline"]["hidden_share"] <= 1
        assert figures["of_single"] > 0
        assert 0 < figures["balance"] <= 1
        # The ranks' own spans lie within what the coordinator saw.
        assert figures["timeline"]["slowest_span_seconds"] <= figures["ring_seconds"] * 1.01 + 1e-3
        assert len(figures["timeline"]["ranks"]) == 3
    assert "forward" not in parts["128k-mha:backward"]
    assert [line["clients"] for line in parts["in-flight"]["much to move"]["clients"]] == [1, 2, 4]
    residual = parts["residual"]
    assert [goal["what"].split()[-1] for goal in residual["goals"]] == list(residual["time_ratios"])
    assert residual["backward_stateless_with_forward"]["bytes_up"] > residual["backward_stateless"]["bytes_up"]
    text = (out / "summary.md").read_text()
    for title in ("Parts", "Checks", "Goals", "Rings", "Ranks", "End to end", "Requests in flight",
                  "A call beside", "A training step",
                  "A worker lost"):
        assert f"### {title}" in text
    for line in re.findall(r"^\|---.*$", text, re.M):  # every row has as many cells as its title
        table = text[text.index(line):].split("\n\n")[0].splitlines()
        assert len({row.count(" | ") for row in table[1:]}) == 1
    with zipfile.ZipFile(out / "traces.zip") as traces:
        assert "64k-backward.json" in traces.namelist()
    assert len(list(out.iterdir())) <= 8


def test_the_gpu_script_refuses_unknown_parts(tmp_path):
    done = subprocess.run([ROOT / "tests/gpu/service.sh", "--cpu", "--only=smoke,64x"],
                          env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 2 and "--only: is 64x, must be one of " in done.stderr
