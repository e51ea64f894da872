"""Workers that die or stop in the middle of a ring pass."""

import dataclasses
import hashlib
import os
import pty
import re
import select
import signal
import subprocess
import time

from calls import call, plan_flags, verify
from harness import check
from inputs import Shape

RECOVERY_SECONDS = 10


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Watched:
    """A request whose progress shows, because its stderr is a terminal."""

    def __init__(self, command):
        master, slave = pty.openpty()
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=slave, text=True)
        os.close(slave)
        self.master = master
        self.seen = ""

    def wait_for(self, word, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if word in self.seen:
                return True
            if select.select([self.master], [], [], 0.005)[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError:
                    return word in self.seen  # it has ended
        return False

    def result(self, seconds):
        """(exit code, stdout); the terminal is read on, so that the process does not block."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.wait_for("\0", 0.05)
        if self.process.poll() is None:
            self.process.kill()
        stdout, _ = self.process.communicate()
        os.close(self.master)
        return self.process.returncode, stdout


def watch_recovery(ring, generation, failed_before, begin, result):
    """Notes when the first typed error, the first ring of survivors and the whole ring were there, in
    seconds from `begin`; gives up after 25."""
    error_at = ring_at = full_at = None
    while time.monotonic() - begin < 25 and (error_at is None or full_at is None):
        now = time.monotonic() - begin
        if error_at is None:
            new = {code: count - failed_before.get(code, 0)
                   for code, count in ring.failed_requests().items()}
            codes = [code for code, count in new.items() if count > 0]
            if codes:
                error_at = now
                result["error_codes"] = codes
        ready, members, current = ring.state()
        now = time.monotonic() - begin
        if ready and current > generation:
            if ring_at is None and members >= ring.workers - 1:
                ring_at = now
                result["first_ring_members"] = members
            if members == ring.workers:
                full_at = now
        time.sleep(0.02)
    result["error_seconds"] = error_at and round(error_at, 3)
    result["ring_seconds"] = ring_at and round(ring_at, 3)
    result["full_ring_seconds"] = full_at and round(full_at, 3)


def lose_a_worker(session, how, command):
    """Kills or stops worker-1 while the ring computes. Bounds: 10 s to a typed error, 10 s to a ring
    again. The client's replay of the request and the same request once more give a forward pass's bits
    as they were before, and gradients within the oracle's bound."""
    def run(result):
        if session.workers < 2:
            result["skipped"] = "needs two workers"
            return
        harness, ring = session.harness, session.ring
        ring.ensure()
        shape = Shape(**session.profile["fault"])
        if command == "backward":  # three times the work, and as long to compute
            shape = dataclasses.replace(shape, seq_len=shape.seq_len // 2)
        source = session.view(shape, command == "backward")
        output, forward = session.output("fault"), session.output("fault-forward")
        plan = plan_flags(ring.workers)

        if command == "backward":
            call(harness, ring, "forward", source, forward, plan)
        call(harness, ring, command, source, output, plan)
        before = digest(output)

        def right():
            """(bit-equal to the undisturbed result, and as right as the pass has to be)"""
            equal = digest(output) == before
            if command == "forward":
                return equal, equal
            verify(harness, ring, source, output, [], 8, forward)  # fails the part if it is wrong
            return equal, True

        verify(harness, ring, source, output, [], 8, forward if command == "backward" else None)
        generation = ring.state()[2]
        failed_before = ring.failed_requests()
        # The loss should hit the pass, not its end: wait a little into it, but less than it takes.
        watched = Watched([ring.cli, command, f"--server={ring.address}", f"--input={source}",
                           f"--output={output}", "--deadline=60s", "--json", *plan])
        check(watched.wait_for("computing", 30),
              f"the request never computed: {watched.seen[-200:]}")
        time.sleep(0.1)
        victim = ring.pids()["worker-1"]
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        result["command"], result["signal"] = command, f"SIG{how.upper()}"
        result["mid_pass"] = watched.process.poll() is None and "downloading" not in watched.seen

        watch_recovery(ring, generation, failed_before, begin, result)
        code, text = watched.result(seconds=min(60, harness.remaining()))
        attempts = re.search(r'"attempts": (\d+)', text)
        result["replay"] = {"exit_code": code, "attempts": int(attempts[1]) if attempts else None}
        if code == 0:
            result["replay"]["bit_equal"], result["replay"]["right"] = right()
        ring.wait_members(ring.workers, seconds=20, after_generation=generation)
        call(harness, ring, command, source, output, plan)
        result["repeat_bit_equal"], result["repeat_right"] = right()

        check(result["mid_pass"], "the worker was lost too late to hit the pass")
        check(result["error_seconds"] is not None and result["error_seconds"] < RECOVERY_SECONDS,
              f"typed error after {result['error_seconds']} s")
        check(set(result["error_codes"]) <= {"ABORTED", "UNAVAILABLE"}, str(result["error_codes"]))
        check(result["ring_seconds"] is not None and result["ring_seconds"] < RECOVERY_SECONDS,
              f"a ring again after {result['ring_seconds']} s")
        check(code == 0, f"the replay failed ({code}): {text[-300:]}")
        check(result["replay"]["right"], "the replay gave other bits")
        check(result["repeat_right"], "the same request gives other bits after the loss")
    return run
