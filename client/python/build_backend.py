"""Packs the wheel: PEP 517's hooks for pip, and the last step of deploy/wheel.sh.

  python build_backend.py FOLDER OUTPUT    packs FOLDER, site-packages as they shall be, into a wheel in OUTPUT

A backend of our own because the extension is built by Bazel and there is nothing else to do; so pip needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _version() -> str:
    header = (ROOT / "common/base/version.h").read_text()
    return re.search(r'kVersion\[\] = "([^"]+)"', header)[1]


def _tag() -> str:
    """Of this interpreter and this machine: what was built here runs on its glibc or a newer one."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    glibc = os.confstr("CS_GNU_LIBC_VERSION").split()[1].replace(".", "_")
    return f"{python}-{python}-manylinux_{glibc}_{os.uname().machine}"


def _metadata(project: dict, version: str) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version}",
             f"Summary: {project['description']}", f"Keywords: {','.join(project['keywords'])}",
             f"License-Expression: {project['license']}",
             *(f"License-File: {name}" for name in project["license-files"]),
             *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
             f"Requires-Python: {project['requires-python']}",
             *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"])]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {requirement}; extra == '{extra}'" for requirement in requirements]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", (HERE / project["readme"]).read_text()])


def _entry_points(project: dict) -> str:
    return "\n".join(line for group, entries in project["entry-points"].items()
                     for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""))


def pack(folder: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """The wheel of what lies in `folder`."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    version, tag = _version(), _tag()
    info = f"ringattn-{version}.dist-info"
    contents = {path.relative_to(folder).as_posix(): path.read_bytes()
                for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts}
    contents[f"{info}/METADATA"] = _metadata(project, version).encode()
    contents[f"{info}/entry_points.txt"] = _entry_points(project).encode()
    contents[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: ringattn\nRoot-Is-Purelib: false\nTag: {tag}\n").encode()
    contents[f"{info}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}")
    record.append(f"{info}/RECORD,,")
    contents[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()
    wheel = output / f"ringattn-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same contents are the same wheel
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    subprocess.run([ROOT / "deploy/wheel.sh", f"--python={sys.executable}", f"--output={wheel_directory}"],
                   check=True, stdout=sys.stderr)
    return f"ringattn-{_version()}-{_tag()}.whl"


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("there is no source distribution: the package is built in ringattn's source tree")


if __name__ == "__main__":
    print(pack(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
