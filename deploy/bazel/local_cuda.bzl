"""The repository @local_cuda: the CUDA toolkit of this machine, if there is one (see cuda.bzl)."""

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
        if candidate.get_child("bin").get_child("nvcc").exists:
            return candidate
    return None

def _local_cuda_impl(ctx):
    toolkit = _find_toolkit(ctx)
    if toolkit == None:
        ctx.file("defs.bzl", """NVCC = ""
TARGET_COMPATIBLE_WITH = ["@local_cuda//:toolkit"]
""")
        ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

constraint_setting(name = "cuda")

# No platform has it: install a toolkit (deploy/install_cuda.sh) to build these targets.
constraint_value(name = "toolkit", constraint_setting = ":cuda")

cc_library(name = "cudart", target_compatible_with = [":toolkit"])
""")
        return
    ctx.symlink(toolkit.get_child("include"), "include")
    for folder in ["lib64", "lib"]:
        library = toolkit.get_child(folder).get_child("libcudart_static.a")
        if library.exists:
            ctx.symlink(library, "libcudart_static.a")
            break
    ctx.file("defs.bzl", """NVCC = "%s"
TARGET_COMPATIBLE_WITH = []
""" % toolkit.get_child("bin").get_child("nvcc"))
    ctx.file("BUILD", """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
)
""")

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
