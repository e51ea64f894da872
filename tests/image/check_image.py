"""Checks an OCI archive of ringattn (deploy/image.sh) and prints a tally line for each check.

  python3 tests/image/check_image.py ARCHIVE ROOT      ROOT: a folder to unpack it into; needs root
"""
import json
import pathlib
import shutil
import stat
import subprocess
import sys
import tarfile
import traceback

PROJECT = pathlib.Path(__file__).resolve().parents[2]
USER = 65532
PROGRAMS = ("ringattn", "ringattn-server", "ringattn-worker")
MAX_BYTES = 70 << 20  # 60 MiB is what a bundle with CUDA may have
# Where the root may hold files, and nowhere else.
FOLDERS = ("opt/ringattn/", "usr/lib/", "usr/share/doc/", "var/lib/dpkg/status.d/", "lib64/", "etc/")


class Image:
    def __init__(self, archive, root):
        self.root = pathlib.Path(root)
        with tarfile.open(archive) as tar:
            def blob(digest):
                return tar.extractfile("blobs/" + digest.replace(":", "/")).read()

            self.index = json.loads(tar.extractfile("index.json").read())
            manifest = json.loads(blob(self.index["manifests"][0]["digest"]))
            self.config = json.loads(blob(manifest["config"]["digest"]))
            for layer in manifest["layers"]:
                self.root.mkdir(parents=True, exist_ok=True)
                subprocess.run(["tar", "-x", "-z", "-C", self.root], input=blob(layer["digest"]), check=True)

    def files(self):
        for path in sorted(self.root.rglob("*")):
            if not path.is_dir() or path.is_symlink():
                yield path.relative_to(self.root).as_posix(), path

    def run(self, *words):
        """A program in the image's root alone, as its user, without an environment."""
        root = str(self.root)
        # Programs find their libraries by /proc/self/exe.
        script = 'mount -t proc proc "$0/proc" && exec chroot --userspec="$1" "$0" "${@:2}"'
        return subprocess.run(
            [shutil.which("unshare"), "--mount", "--pid", "--fork", shutil.which("bash"), "-c", script,
             root, f"{USER}:{USER}", *words], capture_output=True, text=True, timeout=30,
            env={"PATH": self.environment()["PATH"] + ":/usr/sbin:/usr/bin:/sbin:/bin"})

    def environment(self):
        return dict(entry.split("=", 1) for entry in self.config["config"]["Env"])


def version():
    text = (PROJECT / "common/base/version.h").read_text()
    return text.split('kVersion[] = "')[1].split('"')[0]


def check_description(image):
    config = image.config["config"]
    assert config["User"] == f"{USER}:{USER}", config
    assert config["Labels"]["org.opencontainers.image.version"] == version()
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert set(config["ExposedPorts"]) >= {"7700/tcp", "7703/tcp"}
    assert image.config["architecture"] == "amd64"


def check_contents(image):
    for name, path in image.files():
        assert name.startswith(FOLDERS) or name == "lib", name
        mode = path.lstat().st_mode
        assert not mode & (stat.S_ISUID | stat.S_ISGID), name
        assert stat.S_ISLNK(mode) or not mode & stat.S_IWOTH, name
        assert path.lstat().st_uid == 0, name
    programs = {p.name for p in (image.root / "opt/ringattn/bin").iterdir()}
    assert programs == set(PROGRAMS), programs
    assert not list(image.root.rglob("sh")) and not list(image.root.rglob("busybox"))
    assert list((image.root / "var/lib/dpkg/status.d").iterdir())
    for package in (image.root / "var/lib/dpkg/status.d").iterdir():
        assert (image.root / "usr/share/doc" / package.name / "copyright").stat().st_size > 0
    assert (image.root / "opt/ringattn/LICENSE").exists()


def check_size(image):
    total = sum(path.lstat().st_size for _, path in image.files())
    assert total <= MAX_BYTES, f"{total >> 20} MiB"


def check_programs(image):
    for program in PROGRAMS:
        done = image.run(program, "--version")
        assert done.returncode == 0 and version() in done.stdout, done.stderr
    # A whole computation: files are made, names of hosts are looked up, nothing is missing.
    plan = image.run("ringattn", "plan", "--seq_len=4096", "--world_size=2")
    assert plan.returncode == 0, plan.stderr
    info = image.run("ringattn", "info", "--server=localhost:1", "--deadline=2s")
    assert info.returncode == 3 and "UNAVAILABLE" in info.stderr, info.stderr


def main():
    image = Image(*sys.argv[1:3])
    failed = False
    for check in (check_description, check_contents, check_size, check_programs):
        name = "image " + check.__name__.removeprefix("check_")
        try:
            check(image)
            print("pass", name)
        except (AssertionError, OSError, KeyError):
            traceback.print_exc()
            print("fail", name)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
