#!/usr/bin/env python3
"""Disturbs a service in every way that we can think of while verifying loaders use it.

    tests/chaos/chaos.py --minutes=10 --seed=7

Three loaders call again and again, and each judges every result in fp64 (verifying_loader.cc).
Beside them processes die, stop and lose their network (process_faults.py), and clients misbehave
(client_faults.py), each kind as often as any other, drawn from a seed that is printed. Between
rounds the service is left alone, and then:
  no result was wrong and no call ended otherwise than it may (loaders.py);
  the coordinator's counters agree with what its clients saw;
  nothing is queued, active or reserved, and the ring is whole;
  memory, descriptors and threads of every process are what they were after the first minute.
Exits 1 if any of that does not hold. Needs the binaries of tests/lib/e2e_tests.sh.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time

import grpc

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e/support"), str(ROOT / "tests/chaos")]

import client_faults  # noqa: E402
import process_faults  # noqa: E402
from attention import assert_close, make_inputs, reference, run  # noqa: E402
from cluster import Cluster, free_port, open_descriptors, resident_bytes, wait_until  # noqa: E402
from loaders import Loader, compare_counts, metric, metrics_of  # noqa: E402
from proxy import Proxy  # noqa: E402

WORKERS = 3
LOADERS = 3
MB = 1 << 20
QUICK_KINDS = [*process_faults.QUICK, *client_faults.QUICK]
ALL_KINDS = [*QUICK_KINDS, *process_faults.SLOW, *client_faults.SLOW]
# Growth from the first calm moment on that is none: malloc and gRPC keep some, connections that
# were cut linger, and of plans and finished operations 72 MiB may be kept (limits.h).
SLACK = {"resident": 160 * MB, "descriptors": 24, "threads": 16}


def usage(pid):
    return {"resident": resident_bytes(pid), "descriptors": open_descriptors(pid),
            "threads": len(os.listdir(f"/proc/{pid}/task"))}


class ChaosCluster(Cluster):
    """Workers reach the coordinator through a relay that can be cut."""

    control = None

    def start_server(self):
        if self.ports is None:
            self.ports = {name: f"127.0.0.1:{free_port()}"
                          for name in ("listen", "control", "metrics")}
        super().start_server()

    @property
    def control_address(self):
        if self.control is None:
            self.control = Proxy(self.ports["control"])
        return self.control.address


class Chaos:
    HEARTBEAT_TIMEOUT = 3
    SERVER_FLAGS = [f"--heartbeat_timeout={HEARTBEAT_TIMEOUT}s", "--progress_timeout=4s",
                    "--transfer_timeout=4s", "--upload_idle_timeout=4s",
                    "--download_idle_timeout=2s", "--upload_grace=3s",
                    "--upload_grace_contended=1s", "--header_timeout=3s", "--drain_timeout=10s",
                    "--control_timeout=10s",
                    # Workers that start or come back take their time on a busy machine.
                    "--assembly_time_max=60s", "--replacement_time_max=60s"]

    def __init__(self, directory, seed):
        self.directory = pathlib.Path(directory)
        self.seed = seed
        self.rng = random.Random(seed)
        self.worker_indices = list(range(WORKERS))
        self.cluster = ChaosCluster(directory, workers=WORKERS, server_flags=self.SERVER_FLAGS,
                                    worker_flags=["--memory_limit=1073741824"])
        self.control = self.cluster.control
        self.public = Proxy(self.cluster.address)
        self.server_since = 0.0  # of the clock: calls that ended before are another's
        self.ended_lives = []    # of coordinators: see check_counts()
        self.abuses = []         # when misbehaving clients made their calls
        self.lock = threading.Lock()
        # A coordinator that starts needs descriptors (client_faults.no_descriptors).
        self.restarting = threading.Lock()
        self.happened = collections.Counter()
        self.calls = []
        self.baseline = {}
        self.wrong = []
        self.loader_count = 0

    def close(self):
        for proxy in (self.control, self.public):
            proxy.close()
        self.cluster.close()

    # ----------------------------------------------------- what the faults need

    def abuse(self):
        with self.lock:
            self.abuses.append(time.time())

    @contextlib.contextmanager
    def stopped(self, process):
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def restart_worker(self, index, pause=0.0):
        self.cluster.kill_worker(index)
        time.sleep(pause)
        self.replace_worker(index)

    def replace_worker(self, index, flags=()):
        self.cluster.start_worker(index, flags)

    def restart_coordinator(self, gently):
        with contextlib.suppress(OSError):  # it may have no descriptors just now
            asked = time.time()
            text = metrics_of(self.cluster.ports["metrics"])
            self.ended_lives.append((self.server_since, asked, time.time(), text))
        if gently:
            self.cluster.server.terminate()
            self.cluster.server.wait(timeout=60)
            self.cluster.channel.close()
        else:
            self.cluster.kill_server()
        time.sleep(0.3)  # the ends of its calls have been seen
        self.server_since = time.time()
        with self.restarting:
            self.cluster.start_server()
        self.cluster.wait_ready(WORKERS, seconds=60)

    # ------------------------------------------------------------------- rounds

    def disturb(self, faults, deck, until, rng):
        """One fault after another, each once before any comes again."""
        try:
            while time.monotonic() < until:
                if not deck:
                    deck += rng.sample(faults, len(faults))
                fault = deck.pop()
                begin = time.monotonic()
                self.inflict(fault, rng)
                with self.lock:
                    self.happened[fault.__name__] += 1
                print(f"  {begin - self.begin:6.1f} s {fault.__name__}, {time.monotonic() - begin:.1f} s", flush=True)
                time.sleep(0.3 * rng.random())
        except Exception as error:  # a fault that cannot be done is a failure of the run
            self.check(f"{fault.__name__}: {type(error).__name__}: {error}", False)

    def inflict(self, fault, rng):
        try:
            fault(self, rng)
        except (OSError, grpc.RpcError):
            # The coordinator may just be away, which only a misbehaving client may meet.
            if fault.__module__ != "client_faults":
                raise

    def round(self, seconds, lanes):
        loaders = []
        for index in range(LOADERS):
            address = self.public.address if index == 0 else self.cluster.address
            self.loader_count += 1
            loaders.append(Loader(self.directory, f"loader-{self.loader_count}", address,
                                  self.rng.randrange(1 << 30),
                                  [f"--max_world_size={WORKERS}"]))
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self.disturb,
                                    args=(faults, deck, until, random.Random(self.rng.random())))
                   for faults, deck in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(0, until - time.monotonic()))
        ended = [loader.end(seconds=120) for loader in loaders]
        for calls in ended:
            self.calls += calls
        return ended

    # --------------------------------------------------------------------- calm

    def check(self, what, holds):
        if not holds:
            print(f"WRONG: {what}", flush=True)
            self.wrong.append(what)

    def calm(self, ended):
        """Verifies the invariants that hold once no fault disturbs the service."""
        self.cluster.wait_ready(WORKERS, seconds=60)
        address = self.cluster.ports["metrics"]

        def at_rest():
            text = metrics_of(address)
            idle = all(metric(text, f"ringattn_{name}") == 0
                       for name in ("queue_depth", "active_requests", "reserved_bytes"))
            return text if idle else None

        text = wait_until(at_rest, 60, "nothing is queued, active or reserved")
        for call in (call for calls in ended for call in calls if not call.is_allowed):
            self.check(f"a call ended in {call}", False)
        now = time.time()
        for life in (*self.ended_lives, (self.server_since, now, now, text)):
            self.check_counts(*life)
        self.ended_lives.clear()
        self.check("a loader got no result", all(any(c.code == "OK" for c in calls)
                                                 for calls in ended))
        self.check_service()
        self.check_usage()

    def check_counts(self, since, asked, answered, text):
        """A coordinator since then, and its counters from between `asked` and `answered`."""
        calls = [c for c in self.calls if since < c.end <= asked]
        # Its end may have been counted already, or not yet.
        between = collections.Counter(c.method for c in self.calls
                                      if c.end > asked and c.begin < answered)
        # Some may have been on their way to the coordinator before.
        between["Backward"] += sum(since - 10 < when <= answered for when in self.abuses)
        for line in compare_counts(calls, text, between):
            self.check(line, False)

    def check_service(self):
        inputs = make_inputs(sq=300, heads=4, kv_heads=2, dim=32, seed=self.rng.randrange(1000))
        result = run(self.cluster.attention, inputs, backward=True, causal=True, timeout=60)
        self.abuse()  # no loader's
        exact = reference(inputs, causal=True)
        for name in ("dq", "dk", "dv"):
            assert_close(result.array(name), exact[name], 1e-4)

    def check_usage(self):
        processes = {"coordinator": self.cluster.server.pid}
        processes.update((f"worker-{i}", w.pid) for i, w in self.cluster.workers.items())
        for name, pid in processes.items():
            role = name.split("-")[0]
            first = self.baseline.setdefault(role, usage(pid))

            def grown():
                now = usage(pid)
                return {what: (first[what], now[what]) for what, slack in SLACK.items()
                        if now[what] > first[what] + slack}

            with contextlib.suppress(AssertionError):
                wait_until(lambda: not grown(), 20, "memory and descriptors given back")
            self.check(f"{name} has grown: {grown()}", not grown())
            print(f"  {name}: {usage(pid)}", flush=True)

    # ---------------------------------------------------------------------- run

    def main(self, seconds, round_seconds, kinds):
        self.begin = time.monotonic()
        lanes = [([f for f in kinds if f.__module__ == module], [])
                 for module in ("process_faults", "client_faults")]
        lanes = [lane for lane in lanes if lane[0]]
        print(f"seed {self.seed}: undisturbed", flush=True)
        self.calm(self.round(3, []))
        def missing():
            return [f.__name__ for f in kinds if not self.happened[f.__name__]]

        # On a slow machine longer, so that everything happens.
        while not self.wrong and (self.elapsed() < seconds or (
                missing() and self.elapsed() < 4 * seconds)):
            print(f"seed {self.seed}: round at {self.elapsed():.0f} s", flush=True)
            self.calm(self.round(round_seconds, lanes))
        self.check(f"never happened: {missing()}", self.wrong or not missing())

    def elapsed(self):
        return time.monotonic() - self.begin

    def summary(self):
        codes = collections.Counter((c.code, c.reason, c.judgement) for c in self.calls)
        for key, count in sorted(codes.items()):
            print(f"  {count:6d} {' '.join(key)}")
        faults = ", ".join(f"{name} {n}" for name, n in sorted(self.happened.items()))
        judged = sum(c.code == "OK" for c in self.calls)
        print(f"  faults: {faults}")
        print(f"chaos: seed {self.seed}, {sum(self.happened.values())} faults of "
              f"{len(self.happened)} kinds, {len(self.calls)} calls, {judged} results judged, "
              f"{len(self.wrong)} wrong", flush=True)


def run_chaos(directory, seed, seconds, round_seconds=30.0, kinds=None):
    """Everything that was wrong, in words."""
    kinds = kinds or ALL_KINDS
    chaos = Chaos(directory, seed)
    try:
        chaos.main(seconds, round_seconds, kinds)
    except AssertionError as error:
        chaos.check(str(error), False)
    finally:
        chaos.summary()
        chaos.close()
    return chaos.wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--round_seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--only", nargs="*", default=[], help="kinds of faults, by name")
    parser.add_argument("--keep", action="store_true", help="the logs, also of a good run")
    flags = parser.parse_args()
    kinds = [f for f in ALL_KINDS if f.__name__ in flags.only]
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ringattn-chaos-"))
    wrong = run_chaos(directory, flags.seed, 60 * flags.minutes, flags.round_seconds, kinds)
    if wrong or flags.keep:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
