"""See tests/gpu/service.sh."""

import argparse
import atexit
import os
import pathlib
import re
import shutil
import sys
import tempfile

import faults
import gpus
from harness import Harness, check
from calls import Inputs, call, measure, plan_flags, verify
from ring import GaugeWatch, Ring

CAUSAL = ["--causal"]
# tokens of the long requests; shapes of those, of the smoke request, and of the one that is lost a
# worker (no mask and fp32: a second or more of computing for little upload).
GPU = {"long": {"32k": 32768, "64k": 65536, "256k": 262144, "1m": 1048576},
       "shape": {"heads": 32, "kv_heads": 8, "head_dim": 128},
       "documents": [1000, 30000, 4000, 12000, 500, 18036],
       "smoke": {"seq_len": 8192, "heads": 8, "kv_heads": 2, "head_dim": 64},
       "fault": {"seq_len": 262144, "heads": 4, "kv_heads": 4, "head_dim": 128, "dtype": "fp32"}}
CPU = {"long": {"64k": 4096, "256k": 8192},
       "shape": {"heads": 8, "kv_heads": 2, "head_dim": 64},
       "documents": [100, 2000, 400, 1596],
       "smoke": {"seq_len": 2048, "heads": 8, "kv_heads": 2, "head_dim": 64},
       "fault": {"seq_len": 16384, "heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "fp32"}}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", default=".bundle/ringattn")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=210)
    parser.add_argument("--sweep_seconds", type=int, default=0)
    parser.add_argument("--only", default="")
    return parser.parse_args()


class Session:
    def __init__(self, args):
        self.args = args
        self.harness = Harness(os.environ["OUT"], args.seconds)
        self.profile = CPU if args.cpu else GPU
        self.gpu_names = gpus.names()
        self.workers = args.workers or (3 if args.cpu else max(1, len(self.gpu_names)))
        self.bin = pathlib.Path(args.bundle).resolve() / "bin"
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="ringattn-gpu-"))
        self.ring = Ring(self.harness, self.bin, self.workers, "cpu" if args.cpu else "cuda",
                         self.scratch / "state")
        self.inputs = Inputs(self.bin / "ringattn", self.scratch)
        self.gpu = not args.cpu
        atexit.register(self.close)

    def close(self):
        self.inputs.close()
        if self.ring.state_dir.exists():
            self.ring.collect_logs(self.harness.out / "cluster.log")
            self.ring.down()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def output(self, name):
        return self.scratch / f"{name}.out.safetensors"

    # ------------------------------------------------------------------ parts

    def environment(self, result):
        result["gpus"] = self.gpu_names
        result["workers"] = self.workers
        result["nccl"] = os.environ.get("RINGATTN_NCCL", "as the loader finds it")
        result["bundle"] = (self.bin.parent / "MANIFEST").read_text()
        if self.gpu:
            self.harness.run(["nvidia-smi"], log_to="environment.txt")
            self.harness.run(["nvidia-smi", "topo", "-m"], log_to="environment.txt")
            check(self.gpu_names, "no GPU")

    def tests(self, result):
        """The test programs that are in the bundle; each is tried whatever became of the others."""
        failed = []
        if not self.gpu:
            result["skipped"] = "they need GPUs"
            return
        for name, seconds in (("cuda_device_test", 40), ("nccl_ring_test", 60)):
            if not (self.bin / name).exists():
                result[name] = "not in the bundle"
                failed.append(name)
                continue
            try:
                code, text = self.harness.run([self.bin / name], seconds=seconds,
                                              log_to="tests.log")
            except Exception as error:  # pylint: disable=broad-except
                code, text = -1, str(error)
            result[name] = {
                "exit_code": code,
                "passed": len(re.findall(r"^\[       OK \]", text, re.M)),
                "failed": sorted(set(re.findall(r"^\[  FAILED  \] (\S+?),? \(", text, re.M))),
                "said": re.findall(r"^(?:small groups|\d+ CTAs|abort).*$", text, re.M)}
            if code != 0:
                failed.append(name)
        check(not failed, f"failed: {failed}")

    def smoke(self, result):
        result["up_seconds"] = self.ring.up()
        topology = self.ring.topology_or_none() or {}
        result["devices"] = [worker.get("device") for worker in topology.get("workers", [])]
        source = self.inputs.get("smoke", 20)
        forward, backward = self.output("smoke-forward"), self.output("smoke-backward")
        for command, output in (("forward", forward), ("backward", backward)):
            options = [*CAUSAL, *plan_flags(self.workers, "zigzag")]
            call(self.harness, self.ring, command, source, output, options)
        verify(self.harness, self.ring, source, backward, CAUSAL, rows=32, forward=forward)

    def sweep(self, result):
        self.ring.ensure()
        seconds = self.args.sweep_seconds or (8 if self.args.cpu else 40)
        code, text = self.harness.run(
            [self.bin / "service_sweep", f"--server={self.ring.address}", "--cases=5000",
             f"--budget={seconds}s", f"--max_world_size={self.workers}", "--threads=4"],
            log_to="sweep.log")
        result["summary"] = text.strip().splitlines()[-2:]
        result["failures"] = re.findall(r"^FAILED.*$", text, re.M)[:20]
        match = re.search(r"service sweep: (\d+) cases, (\d+) failed", text)
        check(match, f"no summary: {text[-500:]}")
        result["cases"], result["failed"] = int(match[1]), int(match[2])
        check(code == 0, f"{match[2]} of {match[1]} cases failed")

    def long_request(self, name, runs):
        """Forward and backward on the whole ring, beside one GPU with a GPU's share of the tokens:
        the ring's rate per GPU as a part of that is what the ring costs."""
        def run(result):
            self.ring.ensure()
            tokens = result["tokens"] = self.profile["long"][name]
            ring_input = self.inputs.get(f"tokens-{tokens}", self.harness.remaining())
            single_input = self.inputs.get(f"tokens-{tokens // self.workers}",
                                           self.harness.remaining())
            for command in runs:
                # Only some are kept: $OUT holds eight files.
                folder = self.harness.out if name == "64k" else self.scratch
                trace_file = (folder / f"trace_{name}_{command}.json"
                              if self.workers > 1 else None)
                output = self.output(f"{name}-{command}")
                flags = [*CAUSAL, *plan_flags(self.workers, "zigzag")]
                figures = measure(self.harness, self.ring, command, ring_input, output, flags,
                                  runs[command], self.gpu, trace_file)
                result[command] = figures
                forward = self.output(f"{name}-forward") if command == "backward" else None
                verify(self.harness, self.ring, ring_input, output, CAUSAL,
                       rows=16 if tokens < 1 << 20 else 4, forward=forward)
                single = measure(self.harness, self.ring, command, single_input,
                                 self.output("single"), [*CAUSAL, *plan_flags(1)],
                                 runs[command], False)
                figures["single"] = single["best"]
                figures["of_single_gpu"] = round(
                    figures["best"]["ring_tflops_per_gpu"]
                    / max(single["best"]["kernel_tflops_per_gpu"], 1e-9), 4)
        return run

    def masks(self, result):
        """Rings whose ranks do not all have a half of the pairs: rates, and how even the ranks are."""
        self.ring.ensure()
        tokens = self.profile["long"]["64k"]
        plain = self.inputs.get(f"tokens-{tokens}", self.harness.remaining())
        packed = self.inputs.get("packed", self.harness.remaining())
        for name, source, mask in (("full", plain, []),
                                   ("window", plain, ["--causal", f"--window={tokens // 16},0"]),
                                   ("packed", packed, CAUSAL)):
            output = self.output(name)
            figures = measure(self.harness, self.ring, "forward", source, output,
                              [*mask, *plan_flags(self.workers)], 2, False)
            verify(self.harness, self.ring, source, output, mask, rows=16)
            seconds = figures["best"]["kernel_seconds"]
            figures["balance"] = round(sum(seconds) / len(seconds) / max(*seconds, 1e-9), 4)
            figures["ring_over_kernels"] = round(
                max(seconds) / max(figures["best"]["ring_seconds"], 1e-9), 4)
            result[name] = figures

    def memory(self, result):
        """What a request takes of each GPU beyond an idle worker's, on rings of 1, 2, 4, ..."""
        if not self.gpu:
            result["skipped"] = "needs GPUs"
            return
        source = self.inputs.get(f"tokens-{self.profile['long']['256k']}", self.harness.remaining())
        try:
            ring = 1
            while ring <= self.workers:
                self.ring.down()
                self.ring.workers = ring
                self.ring.ensure()
                for command in ("forward", "backward") if ring == self.workers else ("forward",):
                    with GaugeWatch(self.ring, "ringattn_device_allocated_bytes") as allocated:
                        figures = measure(self.harness, self.ring, command, source,
                                          self.output("memory"), [*CAUSAL, *plan_flags(ring)], 1,
                                          True)
                    first, peak = figures["memory_first_bytes"], figures["memory_peak_bytes"]
                    result[f"{command} on {ring}"] = {
                        "predicted": figures["predicted_bytes"],
                        "allocated": [allocated.peak.get(f"worker-{i}") for i in range(ring)],
                        "taken": [peak[i] - first[i] for i in range(ring)],
                        "idle": [first[i] for i in range(ring)]}
                ring *= 2
        finally:
            self.ring.down()
            self.ring.workers = self.workers

    def fault(self, how):
        def run(result):
            check(self.workers > 1, "needs two workers")
            self.ring.ensure()
            source = self.inputs.get("fault", self.harness.remaining())
            faults.lose_a_worker(self.harness, self.ring, source, self.output("fault"), [], how,
                                 result)
        return run

    # ------------------------------------------------------------------ all of it

    def order_inputs(self):
        shape = self.profile["shape"]
        self.inputs.want("smoke", **self.profile["smoke"])
        for name, tokens in self.profile["long"].items():
            self.inputs.want(f"tokens-{tokens // self.workers}", seq_len=tokens // self.workers,
                             **shape)
            self.inputs.want(f"tokens-{tokens}", seq_len=tokens, dout=name != "1m", **shape)
            if name == "64k":
                self.inputs.want("fault", dout=False, **self.profile["fault"])
                self.inputs.want("packed", dout=False, documents=self.profile["documents"],
                                 **shape)
        self.inputs.start()

    def run(self):
        only = set(filter(None, self.args.only.split(",")))
        some = {"forward": 3, "backward": 2}
        parts = [("environment", 15, self.environment),
                 ("smoke", 60, self.smoke),
                 ("sweep", 60, self.sweep),
                 ("64k", 60, self.long_request("64k", some)),
                 ("kill", 60, self.fault("kill")),
                 ("stop", 60, self.fault("stop")),
                 ("masks", 30, self.masks),
                 ("32k", 30, self.long_request("32k", some)),
                 ("256k", 80, self.long_request("256k", {"forward": 2, "backward": 2})),
                 ("memory", 60, self.memory),
                 ("tests", 100, self.tests),
                 ("1m", 150, self.long_request("1m", {"forward": 1}))]
        known = {"environment", "smoke", "sweep", "kill", "stop", "masks", "memory", "tests",
                 *self.profile["long"]}
        parts = [part for part in parts
                 if part[0] in known and (not only or part[0] in only | {"environment"})]
        all_ok = True
        while parts:
            name, seconds, function = parts.pop(0)
            if name == "tests" and self.gpu:
                self.ring.down()  # the programs measure, and want the memory
            ok = self.harness.part(name, seconds, function)
            all_ok = all_ok and ok
            if name == "smoke" and not ok:
                # Then the smaller programs tell most.
                parts.sort(key=lambda part: part[0] != "tests")
        return all_ok

    def report(self):
        """The figures that matter, a line each, for whoever sees only the end of the output."""
        for name, part in self.harness.summary["parts"].items():
            words = [f"{name}: {'ok' if part['ok'] else 'FAILED'} in {part.get('seconds', 0)} s"]
            for command in ("forward", "backward"):
                if figures := part.get(command):
                    best = figures["best"]
                    words.append(
                        f"{command} {best['ring_tflops_per_gpu']} TFLOP/s per GPU in the ring, "
                        f"{best['kernel_tflops_per_gpu']} in kernels, "
                        f"{figures.get('of_single_gpu')} of one GPU, "
                        f"hidden {figures.get('overlap', {}).get('hidden_share')}, "
                        f"call {best['client_seconds']} s")
            for mask in ("full", "window", "packed"):
                if figures := part.get(mask):
                    words.append(
                        f"{mask} {figures['best']['ring_tflops_per_gpu']} TFLOP/s per GPU in the "
                        f"ring, {figures['best']['kernel_tflops_per_gpu']} in kernels, balance "
                        f"{figures['balance']}, kernels' part {figures['ring_over_kernels']}")
            words += [f"{key}: {figures}" for key, figures in part.items() if " on " in key]
            for key in ("up_seconds", "devices", "cases", "failed", "error_codes", "error_seconds",
                        "ring_seconds", "full_ring_seconds", "replay", "repeat_bit_equal",
                        "cuda_device_test", "nccl_ring_test", "error"):
                if key in part:
                    words.append(f"{key} {str(part[key])[:400]}")
            self.harness.log("; ".join(words))


def main():
    session = Session(parse())
    session.order_inputs()
    ok = session.run()
    session.report()
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
