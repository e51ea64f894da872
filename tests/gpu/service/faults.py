"""Workers that die or stop in the middle of a ring pass."""

import hashlib
import os
import pty
import re
import select
import signal
import subprocess
import time

from harness import check
from calls import plan_flags


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


def forward_command(ring, source, output, mask):
    return [ring.cli, "forward", f"--server={ring.address}", f"--input={source}",
            f"--output={output}", "--deadline=60s", "--json", *mask, *plan_flags(ring.workers)]


def lose_a_worker(harness, ring, source, output, mask, how, result):
    """Kills or stops worker-1 while the ring computes. Bounds: 10 s to a typed error, 10 s to a
    ring again; then the same request gives the same bits as before."""
    harness.run_ok(forward_command(ring, source, output, mask))
    before = digest(output)
    generation = ring.state()[2]
    failed_before = ring.failed_requests()
    # The loss should hit the pass, not its end: wait a little into it, but less than it takes.
    watched = Watched(forward_command(ring, source, output, mask))
    check(watched.wait_for("computing", 30), f"the request never computed: {watched.seen[-200:]}")
    time.sleep(0.1)
    victim = ring.pids()["worker-1"]
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    result["mid_pass"] = watched.process.poll() is None and "downloading" not in watched.seen

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
    code, text = watched.result(seconds=min(45, harness.remaining()))
    attempts = re.search(r'"attempts": (\d+)', text)
    result["replay"] = {"exit_code": code, "attempts": int(attempts[1]) if attempts else None,
                        "bit_equal": code == 0 and digest(output) == before}
    ring.wait_members(ring.workers, seconds=20, after_generation=generation)
    harness.run_ok(forward_command(ring, source, output, mask))
    result["repeat_bit_equal"] = digest(output) == before

    check(result["mid_pass"], "the worker was lost too late to hit the pass")
    check(error_at is not None and error_at < 10, f"typed error after {error_at} s")
    check(set(result["error_codes"]) <= {"ABORTED", "UNAVAILABLE"}, str(result["error_codes"]))
    check(ring_at is not None and ring_at < 10, f"a ring again after {ring_at} s")
    check(result["repeat_bit_equal"], "the same request gives other bits after the loss")
    check(code != 0 or result["replay"]["bit_equal"], "the replay gave other bits")
