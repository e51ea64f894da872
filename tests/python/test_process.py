"""Ctrl-C, fork, the process's end, and what thousands of calls leave behind."""
import asyncio
import gc
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import is_served, state_of, wait_until

import ringattn

# 20,000 calls when asked for (RINGATTN_PYTHON_CALLS=20000), fewer in a default run.
CALLS = int(os.environ.get("RINGATTN_PYTHON_CALLS", "1500"))
# 200 exits in the full tier.
EXITS = 200 if os.environ.get("RINGATTN_PYTHON_LOAD") == "full" else 12


def python(source, **options):
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            **options)


def test_ctrl_c_frees_the_workers(address, client):
    child = python(f"""
import signal, numpy as np, ringattn
# As at a terminal: what a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
q = np.ones((1, 65536, 8, 16), np.float32)
client = ringattn.connect({address!r})
try:
    client.forward(q, q, q, request_id="py-interrupted")
except KeyboardInterrupt:
    print("interrupted", flush=True)
out, _, _ = client.forward(q[:, :64], q[:, :64], q[:, :64], deadline=20)
print(float(out.sum()))
""")
    wait_until(lambda: child.poll() is not None or state_of(client, "py-interrupted") == "computing", 60, "computing")
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    try:
        wait_until(lambda: state_of(client, "py-interrupted") == "failed", 15, "the operation's end")
    except AssertionError:
        print(client.get_operation("py-interrupted"), child.poll())  # for whoever reads the failure
        child.kill()
        print(*child.communicate(timeout=60))
        raise
    seconds = time.monotonic() - began
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and out.splitlines() == ["interrupted", "8192.0"], out + err
    assert seconds < 10
    assert is_served(client)


def test_fork_is_refused_by_name(client):
    q = np.ones((1, 8, 1, 8), np.float32)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for call in (lambda: client.forward(q, q, q), lambda: ringattn.connect("127.0.0.1:1")):
            try:
                call()
                answers.append("done")
            except RuntimeError as error:
                answers.append(str(error)[:23])
            except BaseException as error:
                answers.append(repr(error))
        os.write(write, "|".join(answers).encode())
        os._exit(0)
    assert os.read(read, 1000) == b"this process was forked|this process was forked"
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)
    assert is_served(client)


def test_a_forked_child_ends_in_peace(address):
    child = python(f"""
import os, numpy as np, ringattn, sys
q = np.ones((1, 8, 1, 8), np.float32)
client = ringattn.connect({address!r})
client.forward(q, q, q)
pid = os.fork()
if pid == 0:
    del client
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
print(client.forward(q, q, q).out.sum())
""")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and out.strip() == "64.0", out + err


def test_a_process_may_end_in_the_middle_of_a_call(address, client):
    child = python(f"""
import numpy as np, ringattn, threading, time
q = np.ones((1, 65536, 8, 16), np.float32)
client = ringattn.connect({address!r})
threading.Thread(target=lambda: client.forward(q, q, q, request_id="py-left"), daemon=True).start()
while True:
    try:
        if client.get_operation("py-left")["state"] == "computing": break
    except ringattn.NotFoundError: pass
    time.sleep(0.02)
""")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, out + err
    wait_until(lambda: state_of(client, "py-left") == "failed", 15, "the operation's end")
    assert is_served(client)


def test_processes_end_with_calls_of_daemon_threads_in_flight(address):
    """A thread that comes back from a call while the interpreter ends may not take its lock, and must not abort."""
    source = f"""
import numpy as np, ringattn, sys, threading, time
client = ringattn.connect({address!r})
q = np.ones((1, 64, 2, 16), np.float32)
client.forward(q, q, q)
def calls():
    while True:
        client.forward(q, q, q)
for _ in range(6):
    threading.Thread(target=calls, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""
    for first in range(0, EXITS, 4):
        children = [subprocess.Popen([sys.executable, "-c", source, str(0.003 * (first + child))],
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for child in range(4)]
        for child in children:
            out, _ = child.communicate(timeout=120)
            assert child.returncode == 0 and not out, (child.returncode, out)


def resident_bytes():
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("way", ["blocking", "event loop", "refused"])
def test_calls_leave_nothing_behind(client, rng, way):
    q, k, v = (rng.standard_normal((1, 32, 2, 16), np.float32) for _ in range(3))

    def some(count):
        if way == "blocking":
            for _ in range(count):
                client.forward(q, k, v)
        elif way == "refused":
            for _ in range(count):
                with pytest.raises(ringattn.RingattnError):
                    client.forward(q, k, v, softcap=-1.0)
        else:
            async def main():
                for _ in range(count // 10):
                    await asyncio.gather(*(client.forward_async(q, k, v) for _ in range(10)))

            asyncio.run(main())

    calls = CALLS if way == "blocking" else CALLS // 3
    some(max(calls // 3, 200))
    before, descriptors = resident_bytes(), len(os.listdir("/proc/self/fd"))
    some(calls)
    grown = resident_bytes() - before
    assert grown <= max(4 << 20, 100 * calls), grown
    assert len(os.listdir("/proc/self/fd")) <= descriptors
