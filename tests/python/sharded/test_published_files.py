"""ring_flash_attn's published test files, with ringattn.ring_flash_attn in place of their import.

RINGATTN_RING_FLASH_ATTENTION names a checkout of github.com/zhuzilin/ring-flash-attention; without it they are skipped.
"""
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

CHECKOUT = os.environ.get("RINGATTN_RING_FLASH_ATTENTION")
WORLD_SIZE = int(os.environ.get("RINGATTN_RING_FLASH_ATTENTION_RANKS", "2"))  # the published number is 8
# Results that each rank compares. The file about prepare_cu_seqlens asserts by itself.
FILES = {"test_ring_flash_attn_func": 5, "test_zigzag_ring_flash_attn_func": 5, "test_stripe_flash_attn_func": 5,
         "test_ring_flash_attn_varlen_func": 7, "test_zigzag_ring_flash_attn_varlen_func": 7,
         "test_llama3_flash_attn_varlen_func": 5, "test_llama3_prepare_cu_seqlens": 0}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.skipif(not CHECKOUT, reason="RINGATTN_RING_FLASH_ATTENTION names no checkout of ring-flash-attention")
@pytest.mark.parametrize("mode", [[], ["compile"]], ids=["eager", "compile"])
@pytest.mark.parametrize("name", FILES)
def test_published_file(address, name, mode):
    here = pathlib.Path(__file__).parent
    path = pathlib.Path(CHECKOUT) / "test" / f"{name}.py"
    common = {**os.environ, "RINGATTN_ADDRESS": address, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
              "WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen([sys.executable, here / "published_program.py", path, *mode],
                                  env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(WORLD_SIZE)]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
        assert re.search(rf"^compared {FILES[name]}$", output, re.M), output
