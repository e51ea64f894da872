"""The repository @local_python: headers of the CPython that the Python package is built for.

$RINGATTN_PYTHON names the interpreter, /usr/bin/python3 unless set. $RINGATTN_PYBIND11 names the folder that holds
pybind11/pybind11.h, /usr/include unless set. deploy/wheel.sh sets both. Without Python's headers (python3-dev) or
pybind11's (pybind11-dev), Bazel skips the targets that need them, as it skips CUDA's without a toolkit.
"""

_PRINT_INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"

def _include_of(ctx, python):
    result = ctx.execute([python, "-c", _PRINT_INCLUDE])
    if result.return_code != 0:
        return None
    folder = ctx.path(result.stdout.strip())
    return folder if folder.get_child("Python.h").exists else None

def _local_python_impl(ctx):
    python = ctx.os.environ.get("RINGATTN_PYTHON") or "/usr/bin/python3"
    include = _include_of(ctx, python)
    pybind11 = ctx.path(ctx.os.environ.get("RINGATTN_PYBIND11") or "/usr/include")
    if include == None or not pybind11.get_child("pybind11").get_child("pybind11.h").exists:
        ctx.file("defs.bzl", "TARGET_COMPATIBLE_WITH = [\"@local_python//:headers\"]\n")
        ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

constraint_setting(name = "python")

# No platform has it: install python3-dev and pybind11-dev (deploy/install_deps.sh) to build these targets.
constraint_value(name = "headers", constraint_setting = ":python")

cc_library(name = "pybind11", target_compatible_with = [":headers"])
""")
        return
    ctx.symlink(include, "include")
    ctx.symlink(pybind11.get_child("pybind11"), "pybind11/pybind11")
    ctx.file("defs.bzl", "TARGET_COMPATIBLE_WITH = []\n")
    ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

# Headers of CPython and of pybind11. The interpreter that loads an extension brings the library.
cc_library(
    name = "pybind11",
    hdrs = glob(["include/**/*.h", "pybind11/**/*.h"]),
    includes = ["include", "pybind11"],
)
""")

local_python = repository_rule(
    implementation = _local_python_impl,
    environ = ["RINGATTN_PYTHON", "RINGATTN_PYBIND11"],
    local = True,
)
