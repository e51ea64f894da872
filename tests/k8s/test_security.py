"""TLS and clients on a cluster: who is refused, and what is renewed while clients call."""

import hashlib
import json
import secrets
import subprocess
import time

from node import wait_for
from release import COORDINATOR, WORKERS, Load, timed

RING = ("--causal", "--schedule=ring")


def test_nobody_without_token_or_tls_is_served(release, tmp_path):
    def info(*flags):
        done = release.cli("info", f"--server={release.address}", "--deadline=10s", *flags, check=False)
        return done.returncode, done.stderr

    tls = f"--tls_ca={release.credentials.public_ca}"
    wrong = tmp_path / "token"
    wrong.write_text("0123456789abcdef0123456789abcdef")
    assert info(*release.flags)[0] == 0
    code, words = info(tls)
    assert code == 3 and "UNAUTHENTICATED" in words, words
    code, words = info(tls, f"--token_file={wrong}")
    assert code == 3 and "UNAUTHENTICATED" in words, words
    code, words = info()
    assert code == 3 and "UNAVAILABLE" in words, words


def test_the_audit_log_names_the_client(release, short_input):
    release.forward(short_input, *RING)
    wait_for(lambda: '"client":"tests"' in release.kubectl(
        "logs", COORDINATOR, "--tail=200").stdout.replace(" ", ""), 20, "an audit line")


def shown_certificate(release, pod, port):
    """The serial number of the certificate that a listener shows."""
    address = release.get("pod", pod)["status"]["podIP"]
    done = release.kubernetes.run(
        "bash", "-c", f"openssl s_client -connect {address}:{port} -alpn h2 </dev/null 2>/dev/null"
        " | openssl x509 -noout -serial", check=False)
    return done.stdout.strip()


def test_certificates_are_renewed_without_a_restart(release, report, short_input):
    coordinator = next(iter(release.pods("coordinator")))
    listeners = {"public": [(coordinator, 7700)],
                 "cluster": [(coordinator, 7701), ("ringattn-worker-0", 7710)]}
    before = release.restarts()
    with Load(release, short_input, *RING) as load:
        for part, secret in (("public", "ringattn-public-tls"), ("cluster", "ringattn-cluster-tls")):
            shown = {where: shown_certificate(release, *where) for where in listeners[part]}
            assert all(shown.values()), shown
            release.credentials.renew(part)
            with timed(report, f"a renewed {part} certificate is in force"):
                release.apply_secret(secret)
                for where in listeners[part]:
                    wait_for(lambda w=where: shown_certificate(release, *w) not in ("", shown[w]), 120,
                             f"the new certificate at {where}")
        finished = len(load.attempts)
        wait_for(lambda: len(load.attempts) > finished + 2 or load.failures, 60, "further requests")
    report("  meanwhile " + load.check())
    assert release.restarts() == before


def test_a_token_is_replaced_without_a_gap(release, report, short_input):
    """Both digests are known for a while, as the file allows."""
    new = secrets.token_hex(32)
    old_digest, new_digest = (hashlib.sha256(t.encode()).hexdigest()
                              for t in (release.credentials.token, new))

    def know(*digests):
        text = json.dumps({"clients": [{"name": "tests", "token_sha256": list(digests)}]})
        release.kubectl("patch", "secret", "ringattn-clients", "--type=merge", "-p",
                        json.dumps({"stringData": {"clients.json": text}}))

    with Load(release, short_input, *RING) as load, timed(report, "a token replaced"):
        know(old_digest, new_digest)
        spare = release.directory / "new-token"
        spare.write_text(new)

        def is_known():
            done = release.cli("info", f"--server={release.address}", "--deadline=5s",
                               f"--tls_ca={release.credentials.public_ca}", f"--token_file={spare}",
                               check=False)
            return done.returncode == 0

        wait_for(is_known, 120, "the new token is known")
        release.credentials.token = new
        spare.replace(release.credentials.token_file)
        know(new_digest)
    report("  meanwhile " + load.check())


def test_the_cluster_secret_is_replaced(release, report, short_input):
    """It is read at the start: all pods are restarted together, and clients wait for the new ring."""
    generation = release.generation()
    with Load(release, short_input, *RING) as load, timed(report, "the cluster's secret replaced"):
        release.credentials.secret = secrets.token_hex(24)
        release.apply_secret("ringattn-cluster-secret")
        release.kubectl("rollout", "restart", COORDINATOR, WORKERS)
        release.settled(COORDINATOR)
        release.settled(WORKERS)
        release.wait_ring(2, after=generation)
        finished = len(load.attempts)
        wait_for(lambda: len(load.attempts) > finished + 2 or load.failures, 90, "further requests")
    report("  meanwhile " + load.check())


def test_the_ring_is_not_for_strangers(release):
    """A worker without the cluster's certificate does not get in."""
    address = release.get("pod", next(iter(release.pods("coordinator"))))["status"]["podIP"]
    secret = release.directory / "secret"
    secret.write_text(release.credentials.secret)
    worker = release.kubernetes.start(
        release.worker_program, "--name=stranger", f"--coordinator={address}:7701",
        f"--secret_file={secret}", "--device=cpu", "--threads=1", "--insecure",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 8
        while time.monotonic() < end:
            names = {w["name"] for w in (release.topology() or {"workers": []})["workers"]}
            assert "stranger" not in names
            time.sleep(0.5)
    finally:
        worker.kill()
        worker.wait()
