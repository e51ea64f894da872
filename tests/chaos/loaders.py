"""Verifying loaders (verifying_loader.cc), what they saw, and whether the coordinator saw it."""

import collections
import dataclasses
import re
import subprocess
import urllib.request

from cluster import BIN

LOADER = BIN / "tests/chaos/verifying_loader"

# The legal failures of a call while workers, coordinator and network are disturbed. Every other
# outcome, above all a wrong result, fails the run.
TYPED = {"ABORTED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
TYPED_REASONS = {"COMPUTE_FAILED"}  # INTERNAL: a rank's exchange failed
UNTYPED = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}  # the connection went away


@dataclasses.dataclass
class Call:
    begin: float
    end: float
    method: str
    code: str
    reason: str
    judgement: str

    @property
    def is_the_servers(self):
        """Whether the server ended it: a result or a typed error."""
        return self.code == "OK" or self.reason != "-"

    @property
    def is_allowed(self):
        if self.code == "OK":
            return self.judgement == "right"
        if self.is_the_servers:
            return self.code in TYPED or self.reason in TYPED_REASONS
        return self.code in UNTYPED


class Loader:
    def __init__(self, directory, name, address, seed, flags=()):
        self.errors = open(directory / f"{name}.log", "ab")
        self.output = open(directory / f"{name}.calls", "w+b")
        self.process = subprocess.Popen(
            [LOADER, f"--server={address}", f"--seed={seed}", *flags], stdin=subprocess.PIPE,
            stdout=self.output, stderr=self.errors)

    def end(self, seconds):
        """After the call in flight; all its calls."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"a call did not end within {seconds} s") from None
        finally:
            self.output.seek(0)
            lines = self.output.read().decode().splitlines()
            self.output.close()
            self.errors.close()
        if self.process.returncode not in (0, 1):
            raise AssertionError(f"a loader ended with {self.process.returncode}")
        return [Call(float(begin), float(end), *words)
                for begin, end, *words in (line.split() for line in lines)]


def metrics_of(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return reply.read().decode()


def metric(text, name):
    """The sum of its series; 0 if there is none."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
               if re.match(name + r"[{ ]", line))


def ended_requests(text):
    """(method, code) -> count, of ringattn_requests_total."""
    counts = collections.Counter()
    for line in text.splitlines():
        if line.startswith("ringattn_requests_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            counts[labels["method"], labels["code"]] = int(float(line.rsplit(" ", 1)[1]))
    return counts


def compare_counts(calls, text, extra_calls):
    """Compares the counters with the clients' observations. Every call that the server ended is
    counted with the status that its client saw. The only other counted calls are those without an
    observed end: calls on a cut connection, and `extra_calls` by method, of clients that
    disconnected. One line per contradiction."""
    seen = collections.Counter((c.method, c.code) for c in calls if c.is_the_servers)
    unseen = collections.Counter(c.method for c in calls if not c.is_the_servers)
    unseen.update(extra_calls)
    counted = ended_requests(text)
    wrong = []
    for key in sorted(seen | counted):
        if counted[key] < seen[key]:
            wrong.append(f"{key}: clients saw {seen[key]}, the coordinator counted {counted[key]}")
    for method in ("Forward", "Backward"):
        more = sum(counted[key] - seen[key] for key in counted if key[0] == method)
        if more > unseen[method]:
            wrong.append(f"{method}: the coordinator counted {more} more than clients saw, of "
                         f"which {unseen[method]} can be explained")
    return wrong
