"""Stock Python stubs of ringattn.v1, generated from proto/ once per run: the
service must be usable by any generated client, not only by its own library."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]


def _generate():
    out = tempfile.mkdtemp(prefix="ringattn-stubs-")
    protos = sorted(str(p) for p in (ROOT / "proto/ringattn/v1").glob("*.proto"))
    rpc = [str(ROOT / f".deps/googleapis/google/rpc/{n}.proto") for n in ("status", "error_details")]
    includes = [f"-I{ROOT / 'proto'}", f"-I{ROOT / '.deps/googleapis'}", "-I/usr/include"]
    plugin = shutil.which("grpc_python_plugin")
    subprocess.run(["protoc", *includes, f"--plugin=protoc-gen-grpc={plugin}",
                    f"--python_out={out}", f"--grpc_out={out}", *protos, *rpc], check=True)
    return out


sys.path.insert(0, _generate())

from google.rpc import error_details_pb2, status_pb2  # noqa: E402
from ringattn.v1 import (admin_pb2, admin_pb2_grpc, attention_pb2,  # noqa: E402
                         attention_pb2_grpc, cluster_pb2, cluster_pb2_grpc, kv_cache_pb2,
                         kv_cache_pb2_grpc, local_memory_pb2, local_memory_pb2_grpc, shard_pb2,
                         shard_pb2_grpc, tensor_pb2)

__all__ = ["admin_pb2", "admin_pb2_grpc", "attention_pb2", "attention_pb2_grpc", "cluster_pb2",
           "cluster_pb2_grpc", "kv_cache_pb2", "kv_cache_pb2_grpc", "local_memory_pb2",
           "local_memory_pb2_grpc", "shard_pb2", "shard_pb2_grpc", "tensor_pb2", "error_details_pb2", "status_pb2", "ROOT"]
