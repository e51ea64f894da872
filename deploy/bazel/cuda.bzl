"""CUDA targets for a machine that may have no toolkit.

local_cuda (repository rule) looks for a toolkit at CUDA_HOME, /usr/local/cuda and
.deps/cuda (filled by deploy/install_cuda.sh). Without one, its TARGET_COMPATIBLE_WITH names a
constraint that no platform has: Bazel then skips the CUDA targets and says so.

cuda_library compiles .cu files by nvcc for sm_80 and sm_90, with PTX for newer devices. ptxas
warnings about serialised matrix instructions (C75xx) fail the build.
"""

load("@local_cuda//:defs.bzl", "NVCC", "TARGET_COMPATIBLE_WITH")

_FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    "-Xcompiler=-fPIC,-Wall",
    "-UNDEBUG",
]

def _cuda_objects_impl(ctx):
    headers = depset(
        ctx.files.hdrs,
        transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps],
    )
    objects = []
    for source in ctx.files.srcs:
        object_file = ctx.actions.declare_file(source.basename[:-len(".cu")] + ".cu.pic.o")
        ctx.actions.run_shell(
            inputs = depset([source], transitive = [headers]),
            outputs = [object_file],
            command = """
set -u
output=$({nvcc} {flags} -I. -I{bin} -c {source} -o {object} 2>&1)
status=$?
[ -z "$output" ] || printf '%s\\n' "$output" >&2
[ $status -eq 0 ] || exit $status
! printf '%s' "$output" | grep -q 'C75[0-9][0-9]'
""".format(
                nvcc = NVCC,
                flags = " ".join(["'%s'" % flag for flag in _FLAGS]),
                bin = ctx.bin_dir.path,
                source = source.path,
                object = object_file.path,
            ),
            mnemonic = "CudaCompile",
            progress_message = "Compiling CUDA %s" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(object_file)
    return [DefaultInfo(files = depset(objects))]

_cuda_objects = rule(
    implementation = _cuda_objects_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu"]),
        "hdrs": attr.label_list(allow_files = [".cuh", ".h"]),
        "deps": attr.label_list(providers = [CcInfo]),
    },
)

def cuda_library(name, srcs, hdrs = [], textual_hdrs = [], deps = [], **kwargs):
    """A cc_library whose sources are .cu files.

    Args:
      name: the library.
      srcs: .cu files.
      hdrs: headers for C++ dependents; need no CUDA compiler.
      textual_hdrs: headers of the .cu files alone (.cuh).
      deps: C++ libraries whose headers the sources include.
      **kwargs: visibility, testonly.
    """
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs + textual_hdrs,
        deps = deps,
        tags = ["cuda"],
        target_compatible_with = TARGET_COMPATIBLE_WITH,
        testonly = kwargs.get("testonly", False),
        visibility = ["//visibility:private"],
    )
    native.cc_library(
        name = name,
        srcs = [name + "_objects"],
        hdrs = hdrs,
        linkstatic = True,
        tags = ["cuda"],
        target_compatible_with = TARGET_COMPATIBLE_WITH,
        deps = deps + ["@local_cuda//:cudart"],
        **kwargs
    )
