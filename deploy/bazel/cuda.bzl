"""CUDA targets for a machine that may have no toolkit.

local_cuda.bzl finds a toolkit. Without one, TARGET_COMPATIBLE_WITH names a constraint that no platform
has: Bazel then skips the CUDA targets and says so.

cuda_library compiles .cu files by nvcc for the ARCHITECTURES of local_cuda.bzl. What ptxas says about
them is kept beside the objects (NAME.cu.log) and judged by check_ptxas.py:
  - a warning that matrix instructions were serialised (C75xx) fails the build;
  - a kernel that spills registers fails the build, unless `spills` allows its source that many bytes
    per thread. The allowance is a ratchet: it stands in the BUILD file with the reason, and is the
    most that any kernel of the file spills on any architecture today.
The judging is an action of its own, so that changing an allowance compiles nothing anew.

A target may name its own architectures: kernels whose instructions one architecture alone has
(`architectures = ["90a"]`) build beside portable ones. The host decides what runs where.
"""

load("@local_cuda//:defs.bzl", "ARCHITECTURES", "NVCC", "TARGET_COMPATIBLE_WITH")

def _architecture_flags(architectures):
    flags = []
    for i in range(len(architectures)):
        architecture = architectures[i]
        code = "sm_" + architecture

        # PTX goes along for newer devices, but not of architecture-specific code, which no other
        # device takes.
        if i + 1 == len(architectures) and not architecture.endswith("a"):
            code = "[%s,compute_%s]" % (code, architecture)
        flags.append("-gencode=arch=compute_%s,code=%s" % (architecture, code))
    return flags

_FLAGS = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-Wall",
    "-Xptxas=-v",
    "-UNDEBUG",
]

def _cuda_objects_impl(ctx):
    headers = depset(
        ctx.files.hdrs,
        transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps],
    )
    flags = _FLAGS + _architecture_flags(ctx.attr.architectures)
    objects = []
    for source in ctx.files.srcs:
        name = source.basename[:-len(".cu")]
        unchecked = ctx.actions.declare_file(name + ".unchecked.o")
        log = ctx.actions.declare_file(name + ".cu.log")
        ctx.actions.run_shell(
            inputs = depset([source], transitive = [headers]),
            outputs = [unchecked, log],
            # Bazel gives each action a new session, which would leave `nice bazel` without effect where
            # the kernel shares processors out by session.
            command = """
{{ (($(nice) == 0)) || echo "$(nice)" >/proc/self/autogroup; }} 2>/dev/null
{nvcc} {flags} -I. -I{bin} -c {source} -o {object} >{log} 2>&1 && exit
status=$?
cat {log} >&2
exit $status
""".format(
                nvcc = NVCC,
                flags = " ".join(["'%s'" % flag for flag in flags]),
                bin = ctx.bin_dir.path,
                source = source.path,
                object = unchecked.path,
                log = log.path,
            ),
            mnemonic = "CudaCompile",
            progress_message = "Compiling CUDA %s" % source.short_path,
            use_default_shell_env = True,
        )
        object_file = ctx.actions.declare_file(name + ".cu.pic.o")
        ctx.actions.run_shell(
            inputs = [unchecked, log, ctx.file._check],
            outputs = [object_file],
            command = "python3 {check} {log} {spills} && cp {unchecked} {object}".format(
                check = ctx.file._check.path,
                log = log.path,
                spills = ctx.attr.spills.get(source.basename, 0),
                unchecked = unchecked.path,
                object = object_file.path,
            ),
            mnemonic = "CudaCheck",
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
        "spills": attr.string_dict(),
        "architectures": attr.string_list(),
        "_check": attr.label(
            default = "//deploy/bazel:check_ptxas.py",
            allow_single_file = True,
        ),
    },
)

def cuda_library(
        name,
        srcs,
        hdrs = [],
        textual_hdrs = [],
        deps = [],
        spills = {},
        architectures = ARCHITECTURES,
        **kwargs):
    """A cc_library whose sources are .cu files.

    Args:
      name: the library.
      srcs: .cu files.
      hdrs: headers for C++ dependents; need no CUDA compiler.
      textual_hdrs: headers of the .cu files alone (.cuh).
      deps: C++ libraries whose headers the sources include.
      spills: bytes per thread that kernels of a source may spill, by file name; 0 unless named. A
        string gives architectures their own: "0,80:16" is none but for sm_80.
      architectures: what to compile for, as "80" or "90a"; those of local_cuda.bzl unless named.
      **kwargs: visibility, testonly.
    """
    _cuda_objects(
        name = name + "_objects",
        srcs = srcs,
        hdrs = hdrs + textual_hdrs,
        deps = deps,
        spills = {source: str(bytes) for source, bytes in spills.items()},
        architectures = architectures,
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

def cuda_fake_test(name, srcs, deps, **kwargs):
    """A test of what calls CUDA, on the fake runtime of worker/testing/fake_cuda: no GPU."""
    native.cc_test(
        name = name,
        srcs = srcs,
        linkstatic = True,  # the fake runtime must come before the real one
        tags = ["cuda"],
        target_compatible_with = TARGET_COMPATIBLE_WITH,
        deps = deps + [
            "//deploy/bazel:gtest_main",
            "//worker/testing/fake_cuda",
        ],
        **kwargs
    )
