"""vLLM with K/V on the workers: its tokens equal those of vLLM's own attention on CPUs.

vLLM needs other versions of packages. Every program therefore runs with the interpreter that RINGATTN_VLLM_PYTHON names,
which tests/lib/python_tests.sh sets.
"""
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from conftest import BIN, EXAMPLES, wait_until

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from lib import vllm_program  # noqa: E402

PYTHON = os.environ.get("RINGATTN_VLLM_PYTHON")
PROGRAM = vllm_program.__file__
pytestmark = pytest.mark.skipif(not PYTHON, reason=os.environ.get("RINGATTN_NO_VLLM") or
                                "RINGATTN_VLLM_PYTHON names no interpreter with vLLM; tests/lib/python_tests.sh sets it")
FULL = pytest.mark.skipif(os.environ.get("RINGATTN_VLLM_TESTS") != "full", reason="the full tier runs it, and so does "
                          "RINGATTN_VLLM_TESTS=full ./tests/lib/python_tests.sh -k test_vllm")


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(*arguments, **more):
    """Returns what the program prints."""
    (out,) = run_all([(arguments, more)])
    return out


def run_all(programs, seconds=900):
    """Runs (arguments, environment) next to each other. Returns what they print."""
    with contextlib.ExitStack() as stack:
        running = []
        for arguments, more in programs:
            out = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen([PYTHON, *map(str, arguments)], stdout=out, stderr=out, env=environment(**more))
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, out))
        texts = []
        for process, out in running:
            code = process.wait(seconds)
            out.seek(0)
            texts.append(out.read())
            assert code == 0, texts[-1][-6000:]
        return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    run(PROGRAM, "models", folder)
    return folder


@pytest.fixture(scope="module")
def results(folder, address):
    """{case: result} with vLLM's own attention, and with ringattn's."""
    switches = ("0", "1")
    run_all([((PROGRAM, "tokens", folder, folder / switch), {"RINGATTN_VLLM": switch, "RINGATTN_ADDRESS": address})
             for switch in switches])
    return [json.loads((folder / switch).read_text()) for switch in switches]


IN_BFLOAT16 = "llama, bfloat16"


@pytest.mark.parametrize("case", [case for case in vllm_program.CASES if case != IN_BFLOAT16])
def test_tokens_are_vllms_own(results, case):
    own, ours = (result[case] for result in results)
    assert ours["tokens"] == own["tokens"]
    assert len({token for tokens in own["tokens"][0] for token in tokens}) > 10  # not one token for everything
    if "shared prefixes" in case:
        assert ours["hits"] == own["hits"] >= 100
    if "preemption" in case:
        assert ours["preemptions"] >= 1
    assert ours["parts"] == (2 if "position parts" in case else 1)
    if "drafts" in case:
        assert 0 < ours["accepted"] < ours["drafted"]


def test_windows_change_the_tokens(results):
    """The models llama and mistral have equal weights; without windows, the comparison would show nothing."""
    tokens = [results[0][case]["tokens"][0] for case in ("llama", "mistral")]
    assert tokens[0][0] == tokens[1][0] and tokens[0][2] != tokens[1][2]  # a short and a long prompt


def test_engines_delete_their_caches(results, address):
    """At once, and not when the hold ends."""
    def workers():
        topology = subprocess.run([BIN / "client/ringattn", "topology", f"--server={address}", "--json"], check=True,
                                  capture_output=True, text=True, timeout=60)
        return json.loads(topology.stdout)["workers"]

    wait_until(lambda: all(worker["kv_caches"] == 0 for worker in workers()), 5, "the caches are deleted")


def test_bfloat16_is_as_exact_as_vllms_own(results):
    """Log probabilities of a prompt, against those in float32."""
    exact = np.array(results[0]["llama"]["logprobs"])
    assert len(exact) == 99 and np.abs(exact - results[1]["llama"]["logprobs"]).max() < 1e-3
    own, ours = (np.linalg.norm(exact - result[IN_BFLOAT16]["logprobs"]) for result in results)
    assert 0 < ours < 1.5 * own


@pytest.fixture(scope="module")
def refusals(folder, address):
    run(PROGRAM, "refused", folder, folder / "refused", RINGATTN_VLLM="1", RINGATTN_ADDRESS=address)
    return json.loads((folder / "refused").read_text())


@FULL
@pytest.mark.parametrize("name", vllm_program.REFUSED)
def test_what_is_not_served_is_refused_by_name(refusals, name):
    kind, text = refusals[name]
    values = ("num_gpu_blocks_override", "transprot", "block_size")
    assert kind == ("ValueError" if name in values else "NotImplementedError"), (kind, text)
    assert re.search(rf"\b{name}\b", text), text


@FULL
def test_a_lost_worker_ends_the_engine(folder, results, tmp_path):
    """With a typed error. Another engine generates the same tokens on the remaining worker."""
    state = tmp_path / "service"
    command = [BIN / "client/ringattn"]
    up = subprocess.run([*command, "up", "--workers=2", "--port=0", "--device=cpu", "--threads=1", "--detach",
                         f"--state_dir={state}"], capture_output=True, text=True, timeout=120,
                        env={**os.environ, "RINGATTN_BIN_DIR": os.environ.get("RINGATTN_BIN_DIR", "")})
    try:
        address = re.search(r"gRPC address (\S+),", up.stdout)[1]
        pids = {name: int(pid) for name, pid in re.findall(r"started (worker-\d+), process id (\d+)", up.stderr)}
        assert len(pids) == 2, up.stderr
        switch = {"RINGATTN_VLLM": "1", "RINGATTN_ADDRESS": address}
        run(PROGRAM, "lost", folder, tmp_path / "lost", json.dumps(pids), **switch)
        run(PROGRAM, "tokens", folder, tmp_path / "again", "llama", **switch)
    finally:
        subprocess.run([*command, "down", f"--state_dir={state}"], capture_output=True, timeout=120)
    assert json.loads((tmp_path / "lost").read_text())[0] == "CacheLostError"
    assert json.loads((tmp_path / "again").read_text())["llama"]["tokens"] == results[0]["llama"]["tokens"]


@FULL
def test_example(address):
    """vLLM's engine runs in another process."""
    out = run(EXAMPLES / "vllm_generate.py", address)
    assert [len(line.split("then ")[1].split()) for line in out.splitlines() if "then " in line] == [12, 12], out


@pytest.mark.parametrize("switch", ["yes", "127.0.0.1:7700"])
def test_the_switch_is_checked(switch):
    program = "import ringattn.vllm; ringattn.vllm.register()"
    failed = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True,
                            env=environment(RINGATTN_VLLM=switch))
    assert failed.returncode and "RINGATTN_VLLM is" in failed.stderr and "ValueError" in failed.stderr
