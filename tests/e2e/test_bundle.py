"""deploy/bundle.sh's folder runs elsewhere, and quickstart starts from it where nothing can be
installed or built."""

import os
import re
import shutil
import subprocess
import urllib.request

import pytest

from cluster import BIN, free_port
from stubs import ROOT

# Programs that a run must not need: failing ones with these names come first in PATH.
FORBIDDEN = ["bazel", "bazel-4", "bz", "g++", "gcc", "nvcc", "apt-get", "pip", "pip3", "sudo", "curl"]

GLIBC = {"libc", "libm", "libdl", "librt", "libpthread", "libresolv", "libutil", "libanl"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    if shutil.which("patchelf") is None:
        pytest.skip("patchelf is not installed (deploy/install_deps.sh patchelf)")
    folder = tmp_path_factory.mktemp("made") / "ringattn"
    done = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}",
                           f"--output={folder}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # Not where it was made.
    moved = tmp_path_factory.mktemp("moved") / "elsewhere"
    shutil.move(folder, moved)
    return moved


@pytest.fixture
def bare_environment(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in FORBIDDEN:
        (tools / name).write_text(f"#!/bin/sh\necho {name} $* >>{tmp_path}/forbidden\nexit 97\n")
        (tools / name).chmod(0o755)
    yield {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "RINGATTN_PORT": str(free_port()),
           "RINGATTN_STATE_DIR": str(tmp_path / "state")}
    assert not (tmp_path / "forbidden").exists(), (tmp_path / "forbidden").read_text()


def test_the_bundle_needs_nothing_but_glibc(bundle):
    size = sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file())
    assert size < 60 << 20
    for program in ("ringattn", "ringattn-server", "ringattn-worker"):
        done = subprocess.run([bundle / "bin" / program, "--help"], env={}, capture_output=True,
                              text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        ldd = subprocess.run(["ldd", bundle / "bin" / program], env={"PATH": os.environ["PATH"]},
                             capture_output=True, text=True, check=True).stdout
        assert "not found" not in ldd
        outside = [line.split()[0] for line in ldd.splitlines()
                   if "=>" in line and str(bundle) not in line]
        assert all(name.split(".so")[0] in GLIBC for name in outside), outside


# Encryption is then as fast as the target machine's OpenSSL.
def test_a_bundle_without_openssl_takes_the_machines(tmp_path):
    if shutil.which("patchelf") is None:
        pytest.skip("patchelf is not installed (deploy/install_deps.sh patchelf)")
    done = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}", "--system-openssl",
                           f"--output={tmp_path}/ringattn"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "openssl: the target machine's, 3.0 or newer" in done.stdout
    ldd = subprocess.run(["ldd", tmp_path / "ringattn/bin/ringattn-worker"], capture_output=True, text=True,
                         check=True).stdout
    outside = {line.split()[0].split(".so")[0] for line in ldd.splitlines()
               if "=>" in line and str(tmp_path) not in line}
    assert {"libssl", "libcrypto"} <= outside <= GLIBC | {"libssl", "libcrypto"}, outside


def test_quickstart_from_a_bundle(bundle, bare_environment):
    quickstart = ROOT / "deploy/quickstart.sh"
    try:
        done = subprocess.run([quickstart, f"--prebuilt={bundle}"], env=bare_environment,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("\nverified\n") == 1
        assert "ringattn is up and verified" in done.stdout
        assert f"{bundle}/bin/ringattn topology" in done.stdout
        page = re.search(r"^live page at (http://\S+), metrics at /metrics", done.stdout, re.MULTILINE)[1]
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert b"<title>" in answer.read()
        with urllib.request.urlopen(f"{page}metrics", timeout=10) as answer:
            assert b"ringattn_connected_workers" in answer.read()
    finally:
        ended = subprocess.run([quickstart, "--stop"], env=bare_environment, capture_output=True,
                               text=True, timeout=60)
    assert ended.returncode == 0 and "stopped" in ended.stdout
    assert not os.path.exists(bare_environment["RINGATTN_STATE_DIR"])


def test_a_folder_that_is_no_bundle_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("kept")
    done = subprocess.run([ROOT / "deploy/bundle.sh", f"--bin={BIN.resolve()}",
                           f"--output={tmp_path}/mine"], capture_output=True, text=True)
    assert done.returncode != 0 and "is not a bundle" in done.stderr
    assert (tmp_path / "mine/file").read_text() == "kept"


def test_quickstart_refuses_what_is_no_bundle(tmp_path):
    done = subprocess.run([ROOT / "deploy/quickstart.sh", f"--prebuilt={tmp_path}"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "is not a bundle" in done.stderr


def test_install_cuda_leaves_other_folders_alone(tmp_path):
    (tmp_path / "lib").mkdir()  # such as an installation in progress
    done = subprocess.run([ROOT / "deploy/install_cuda.sh", tmp_path], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1 and "not made by this script" in done.stderr
    assert (tmp_path / "lib").is_dir()
