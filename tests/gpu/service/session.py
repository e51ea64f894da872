"""State shared by the parts of a run: the ring, the inputs, the sizes, and the output paths."""

import dataclasses
import os
import pathlib
import shutil
import tempfile
import zipfile

import gpus
from calls import call, plan_flags
from harness import Harness
from inputs import Inputs
from ring import Ring

CAUSAL = ["--causal"]
WARM_UP_TOKENS = 8192  # per worker


class Session:
    def __init__(self, args, profile, out):
        self.args, self.profile = args, profile
        self.harness = Harness(out, args.seconds)
        self.gpu = not args.cpu
        self.gpu_names = gpus.names()
        self.workers = args.workers or (3 if args.cpu else max(1, len(self.gpu_names)))
        self.bundle = pathlib.Path(args.bundle).resolve()
        self.bin = self.bundle / "bin"
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="ringattn-gpu-",
                                                     dir=args.scratch or None))
        self.ring = self.make_ring("state", self.workers, "cpu" if args.cpu else "cuda")
        self.ring.up_flags = [f"--worker_flag={flag}" for flag in args.worker_flag]
        self.inputs = Inputs(self.bin / "ringattn", self.scratch)
        self.nccl = os.environ.get("RINGATTN_NCCL", "as the loader finds it")
        self.part = None  # the name of the one that runs
        self.hosts = {}  # by layout: what the parts of hosts.py have found
        self.warm = set()  # (generation of the cluster, command, shape) that have run already

    def make_ring(self, name, workers, device, transport=""):
        return Ring(self.harness, self.bin, workers, device, self.scratch / name,
                    self.harness.out / "cluster.log", transport)

    def output(self, name):
        return self.scratch / f"{name}.out.safetensors"

    def view(self, shape, with_dout):
        return self.inputs.view(shape, with_dout, self.harness.remaining())

    def warm_up(self, command, shape, options, world_size):
        """A short request of this kind, once per cluster: kernels and NCCL's connections are made ready
        at their first use. Not needed in front of three runs, whose median does without the first."""
        short = dataclasses.replace(shape, documents=(),
                                    seq_len=min(shape.seq_len, WARM_UP_TOKENS * self.workers))
        key = (self.ring.incarnation, command, dataclasses.replace(short, seq_len=0), str(options),
               world_size)
        if key in self.warm:
            return
        call(self.harness, self.ring, command, self.view(short, True), self.output("warm-up"),
             [*options, *plan_flags(world_size)])
        self.warm.add(key)

    def keep_trace(self, name, path):
        with zipfile.ZipFile(self.harness.out / "traces.zip", "a", zipfile.ZIP_DEFLATED) as traces:
            traces.write(path, f"{name}.json")

    def close(self):
        self.inputs.close()
        self.ring.down()
        shutil.rmtree(self.scratch, ignore_errors=True)
