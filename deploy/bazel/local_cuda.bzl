"""The repository @local_cuda: the CUDA toolkit of this machine, if there is one (see cuda.bzl).

Looked for at $CUDA_HOME, /usr/local/cuda and .deps/cuda (filled by deploy/install_cuda.sh). A toolkit
counts if it has nvcc and nccl.h can be found: inside it, beside it (as NVIDIA's wheels lay them out)
or in /usr/include. NCCL's library is no part of a build: workers load it when they start.

$RINGATTN_CUDA_ARCHS, "80;90" unless set, names the devices to compile for; the last one's PTX goes
along, for newer devices. One architecture halves the time.

A running Bazel asks this once. What makes it ask again: another CUDA_HOME, and a toolkit that
deploy/install_cuda.sh has installed since ($RINGATTN_CUDA_INSTALLED, in a file that .bazelrc imports).
One put into /usr/local/cuda meanwhile is seen after `bazel shutdown`.
"""

_DEFAULT_ARCHITECTURES = "80;90"

def _nccl_include(ctx, toolkit):
    for folder in [
        toolkit.get_child("include"),
        toolkit.dirname.get_child("nccl").get_child("include"),
        ctx.path("/usr/include"),
    ]:
        if folder.get_child("nccl.h").exists:
            return folder
    return None

def _find_toolkit(ctx):
    candidates = []
    if ctx.os.environ.get("CUDA_HOME"):
        candidates.append(ctx.path(ctx.os.environ["CUDA_HOME"]))
    candidates.append(ctx.path("/usr/local/cuda"))
    environment = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".deps").get_child("cuda")
    if environment.get_child("lib").exists:
        for python in environment.get_child("lib").readdir():
            candidates.append(ctx.path(str(python) + "/site-packages/nvidia/cu13"))
    for candidate in candidates:
        if candidate.get_child("bin").get_child("nvcc").exists and _nccl_include(ctx, candidate):
            return candidate
    return None

def _architectures(ctx):
    text = ctx.os.environ.get("RINGATTN_CUDA_ARCHS") or _DEFAULT_ARCHITECTURES
    architectures = [word for word in text.replace(",", ";").split(";") if word]
    for word in architectures:
        number = word[:-1] if word[-1] == "a" else word
        if not number.isdigit() or int(number) < 80:
            fail("RINGATTN_CUDA_ARCHS=%s: %s is no architecture from 80 on" % (text, word))
    return architectures

def _local_cuda_impl(ctx):
    toolkit = _find_toolkit(ctx)
    if toolkit == None:
        ctx.file("defs.bzl", """NVCC = ""
ARCHITECTURES = []
HAVE_CUDA = False
TARGET_COMPATIBLE_WITH = ["@local_cuda//:toolkit"]
""")
        ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

constraint_setting(name = "cuda")

# No platform has it: install a toolkit (deploy/install_cuda.sh) to build these targets.
constraint_value(name = "toolkit", constraint_setting = ":cuda")

cc_library(name = "cudart", target_compatible_with = [":toolkit"])

cc_library(name = "nccl_headers", target_compatible_with = [":toolkit"])
""")
        return
    ctx.symlink(toolkit.get_child("include"), "include")
    ctx.symlink(_nccl_include(ctx, toolkit).get_child("nccl.h"), "nccl/nccl.h")
    for folder in ["lib64", "lib"]:
        library = toolkit.get_child(folder).get_child("libcudart_static.a")
        if library.exists:
            ctx.symlink(library, "libcudart_static.a")
            break
    ctx.file("defs.bzl", """NVCC = "%s"
ARCHITECTURES = %s
HAVE_CUDA = True
TARGET_COMPATIBLE_WITH = []
""" % (toolkit.get_child("bin").get_child("nvcc"), repr(_architectures(ctx))))
    ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
)

# Declarations alone: worker/comm/nccl loads libnccl.so.2 at run time.
cc_library(
    name = "nccl_headers",
    hdrs = ["nccl/nccl.h"],
    includes = ["nccl"],
    deps = [":cudart"],
)
""")

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME", "RINGATTN_CUDA_ARCHS", "RINGATTN_CUDA_INSTALLED"],
    local = True,
)
