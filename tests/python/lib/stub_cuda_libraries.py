"""Lets PyTorch of PyPI be imported for its CPU half without 4 GB of CUDA libraries.

  python3 stub_cuda_libraries.py SITE_PACKAGES

PyPI's wheel is linked against cuBLAS, cuDNN and others that are only called when a GPU is there. For each that is not
installed this puts a library of its name next to PyTorch's libraries, whose functions do nothing. For tests on CPUs; a GPU
needs the real ones.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

# A reference to another library's function, "UND cuptiFinalize@libcupti.so.13 (5)", and the lines that name the library
# of the version after the @: "Version: 1  File: libcupti.so.13  Cnt: 1", "Name: libcupti.so.13  Flags: none".
WANTED_FUNCTION = re.compile(r"\bUND (\w+)@([\w.]+)")
# The same for a library without versions: "UND ncclSend".
WANTED_WITHOUT_VERSION = re.compile(r"\bUND (\w+)$", re.MULTILINE)
VERSION_FILE = re.compile(r"Version: 1\s+File: (\S+)")
VERSION_NAME = re.compile(r"Name: (\S+)\s+Flags")


def readelf(option, library):
    return subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True,
                          text=True).stdout


def versions_of(library):
    """Names of versions that `library` wants, with the file that each is of."""
    versions, file = {}, None
    for line in readelf("-V", library).splitlines():
        if found := VERSION_FILE.search(line):
            file = found[1]
        elif file and (found := VERSION_NAME.search(line)):
            versions[found[1]] = file
    return versions


def write_stub(path, name, versions):
    """A library `name` with functions that do nothing; `versions`: {version: functions}, "" if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "versions"
        script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(functions))}; }};\n"
                                  for version, functions in versions.items()))
        source = "".join(f"int {function}(void) {{ return -1; }}\n"
                         for functions in versions.values() for function in sorted(functions))
        options = [] if set(versions) <= {""} else [f"-Wl,--version-script={script}"]
        subprocess.run(["cc", "-shared", "-nostdlib", "-w", "-fno-builtin", "-x", "c", "-",
                        f"-Wl,-soname,{name}", *options, "-o", path], input=source, text=True, check=True)


def main():
    folder = pathlib.Path(sys.argv[1]) / "torch/lib"
    present = {path.name for path in [*folder.iterdir(), *folder.parents[1].glob("nvidia/*/lib/*")]}
    needed, wanted, without_version = set(), {}, set()
    for library in folder.glob("*.so"):
        needed |= {line.rsplit("[", 1)[1].rstrip("]") for line in readelf("-d", library).splitlines()
                   if "(NEEDED)" in line}
        versions = versions_of(library)
        for function, version in WANTED_FUNCTION.findall(readelf("--dyn-syms", library)):
            wanted.setdefault(versions.get(version), {}).setdefault(version, set()).add(function)
        without_version |= set(WANTED_WITHOUT_VERSION.findall(readelf("--dyn-syms", library)))
    # The driver's library is left missing: without it nothing tries to use a GPU.
    missing = {name for name in needed - present
               if name.startswith(("libcu", "libnv", "libnccl")) and name != "libcuda.so.1"}
    for name in sorted(missing):
        stem = re.match(r"lib([a-zA-Z]+)", name)[1].lower()  # libcusparseLt.so.0: cusparseLtInit and others
        versions = wanted.get(name) or {"": {f for f in without_version if f.lower().startswith(stem)}}
        write_stub(folder / name, name, versions)
    print("stubbed:", *sorted(missing))


if __name__ == "__main__":
    main()
