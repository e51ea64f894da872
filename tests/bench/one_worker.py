"""A coordinator and one CPU worker with one thread, of a given build."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e/support"))

import cluster  # noqa: E402
from small_requests import program  # noqa: E402


def start(build, directory, worker_flags=()):
    cluster.SERVER = program(build, "ringattn-server")
    cluster.WORKER = program(build, "ringattn-worker")
    return cluster.Cluster(directory, workers=1, worker_flags=worker_flags)
