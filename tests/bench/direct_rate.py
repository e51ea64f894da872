#!/usr/bin/python3
"""Compares direct streams, host memory (staged and not) and the relay with plain TCP, memcpy and Arrow Flight, in one
run, rounds interleaved:

  tests/bench/direct_rate.py [--workers=4] [--channels=2] [--megabytes=256] [--rounds=7] [--flight=PYTHON]
                             [--paths=host,staged,direct,relay]
  tests/bench/direct_rate.py --packed=HEADSxDIM [--workers=2] [--megabytes=96] [--paths=host,direct,relay]

Starts a ring of CPU workers and runs transport_rate against it. --flight: a Python that has pyarrow, in a separate
environment; without it, no Flight. --packed: packed_rate instead, which compares uploads of packed inputs with q, k and
v apart. Bazel targets needed: //server:ringattn-server //worker:ringattn-worker //tests/bench:transport_rate
(:packed_rate).
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e/support"))

from cluster import BIN, Cluster  # noqa: E402


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("workers", 4), ("channels", 2), ("megabytes", 256), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--paths", default=None)
    parser.add_argument("--flight", default="")
    parser.add_argument("--packed", default="", metavar="HEADSxDIM")
    options = parser.parse_args()
    paths = options.paths or ("host,direct,relay" if options.packed else "host,staged,direct,relay")
    with tempfile.TemporaryDirectory() as directory:
        ring = Cluster(directory, workers=options.workers,
                       worker_flags=["--client_data_listen=127.0.0.1:0", "--local_memory=host_memory",
                                     f"--local_socket_dir={directory}"])
        try:
            program = "packed_rate" if options.packed else "transport_rate"
            command = [BIN / "tests/bench" / program, f"--server={ring.address}",
                       f"--paths={paths}", f"--workers={options.workers}",
                       f"--channels={options.channels}", f"--megabytes={options.megabytes}",
                       f"--rounds={options.rounds}"]
            if options.packed:
                heads, dim = options.packed.split("x")
                command += [f"--heads={heads}", f"--head_dim={dim}"]
            if options.flight and not options.packed:
                command.append(f"--beside={options.flight} {HERE / 'flight_rate.py'} "
                               f"{options.megabytes} {options.workers} {options.channels}")
            subprocess.run([str(word) for word in command], check=True)
        finally:
            ring.close()


if __name__ == "__main__":
    main()
