"""Changes by operators while clients call: the client library loses no request."""

import json

from release import WORKERS, Load, timed

RING = ("--causal", "--schedule=ring")


def uids(release):
    return {name: pod["metadata"]["uid"] for name, pod in release.pods("worker").items()}


def test_a_rolling_upgrade_of_the_workers(release, report, short_input):
    before = uids(release)
    with Load(release, short_input, *RING) as load, timed(report, "rolling upgrade of two workers"):
        release.upgrade("--set-string", "worker.podAnnotations.example\\.test/round=1")
        release.settled(WORKERS)
    report("  meanwhile " + load.check())
    after = uids(release)
    assert after.keys() == before.keys() and not set(after.values()) & set(before.values())


def test_an_upgrade_of_the_coordinator(release, report, short_input):
    with Load(release, short_input, *RING) as load, timed(report, "upgrade of the coordinator"):
        release.upgrade("--set-string", "coordinator.podAnnotations.example\\.test/round=1")
        release.wait_ring(2)
    report("  meanwhile " + load.check())


def test_scaling_from_two_to_four_to_two(release, report, short_input):
    with Load(release, short_input, "--causal") as load:
        for replicas in (4, 2):
            with timed(report, f"scaling to {replicas} workers"):
                release.upgrade("--set", f"worker.replicas={replicas}")
                release.wait_ring(replicas)
    report("  meanwhile " + load.check())


def test_a_request_beyond_the_memory_limit_is_refused(release, report):
    """Workers take 80% of their container's limit of 512 MiB: 409 MiB. A larger request is rejected
    with the sum; one that needs nearly all succeeds. Neither ends a pod."""
    before = release.restarts()
    window = ("--causal", "--window=64,0", "--schedule=ring")
    large = release.inputs("large", "--batch=1", "--seq_len=262144", "--heads=8", "--head_dim=64",
                           "--dtype=bf16")
    refused = release.forward(large, *window, check=False)
    assert not isinstance(refused, int), "it was served"
    error = json.loads(refused.stdout)["error"]
    assert error["code"] == "RESOURCE_EXHAUSTED", error
    fits = release.inputs("fits", "--batch=1", "--seq_len=65536", "--heads=8", "--head_dim=64",
                          "--dtype=bf16")
    with timed(report, "a request that fills three quarters of the workers' memory"):
        assert release.forward(fits, *window) == 1
    assert release.restarts() == before
