"""One cluster and one release for all of tests/k8s; times go to the run's output."""

import os
import tempfile
import time

import pytest

from kubernetes import Kubernetes
from release import NAMESPACE, Release

NAMESPACE_MANIFEST = f"""
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
  labels: {{pod-security.kubernetes.io/enforce: restricted}}
"""
_lines = []


@pytest.fixture(scope="session")
def report():
    """Notes a line for the end of the run."""
    return _lines.append


def pytest_terminal_summary(terminalreporter):
    if _lines:
        terminalreporter.section("what took how long")
    for line in _lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def kubernetes():
    cluster = Kubernetes(os.environ["RINGATTN_K8S_BIN"])
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def release(kubernetes, report):
    """Installed, with a ring of two workers."""
    with tempfile.TemporaryDirectory(prefix="ringattn-k8s-files-") as directory:
        kubernetes.load_image(os.environ["RINGATTN_K8S_IMAGE"])
        kubernetes.apply(NAMESPACE_MANIFEST)
        release = Release(kubernetes, directory)
        for secret in release.credentials.ALL:
            release.apply_secret(secret)
        began = time.monotonic()
        release.install()
        release.wait_ring(2)
        report(f"from helm install to a ring over both nodes: {time.monotonic() - began:.1f} s")
        yield release


@pytest.fixture(scope="session")
def long_input(release):
    """Some seconds of work for two CPU workers of one thread: more than the two that a pod still has when
    it is deleted by force, in which a coordinator that drains ends what is shorter."""
    return release.inputs("long", "--batch=1", "--seq_len=20480", "--heads=16", "--kv_heads=4",
                          "--head_dim=64", "--dtype=bf16")


@pytest.fixture(scope="session")
def short_input(release):
    return release.inputs("short", "--batch=1", "--seq_len=2048", "--heads=4", "--head_dim=64",
                          "--dtype=bf16")


@pytest.fixture(autouse=True)
def whole_afterwards(request):
    """Each test hands on what it found: all workers in a ring, on two nodes."""
    yield
    if "release" in request.fixturenames:
        release = request.getfixturevalue("release")
        release.wait_ring(release.replicas, seconds=120)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Prints the cluster's state after a failed test."""
    outcome = yield
    result = outcome.get_result()
    kubernetes = getattr(item, "funcargs", {}).get("kubernetes")
    if not result.failed or kubernetes is None:
        return
    for words in (("get", "pods", "-o", "wide"), ("get", "events", "--sort-by=.lastTimestamp"),
                  ("logs", "-l", "app.kubernetes.io/part-of=ringattn", "--tail=25", "--prefix")):
        done = kubernetes.kubectl("-n", NAMESPACE, *words, check=False)
        result.sections.append((" ".join(words), (done.stdout + done.stderr)[-6000:]))
