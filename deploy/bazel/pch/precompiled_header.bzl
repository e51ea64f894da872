"""A header compiled once for all the sources that begin with it.

Four to five of the seven seconds that a file takes to compile are other libraries' headers. GCC reads
them precompiled where a source's first inclusion is a header with a .gch beside it: .bazelrc gives
that inclusion to every source by --per_file_copt, and precompiled_header makes the two files.

The .gch is used by compilations with the flags of its own; another reads the header instead, at its
usual price, and says so (-Winvalid-pch). Clang and a compiler of another version take the header too:
it is empty for Clang, so that a source that forgets one of its inclusions does not build there.

A precompiled header may include nothing that the build makes: GCC names none of its parts among what
an object depends on, so Bazel would not compile anew where one of them changes.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.attr.name + ".h")
    args = ctx.actions.args()
    args.add(header)
    args.add_all(ctx.files.srcs)
    ctx.actions.run_shell(
        inputs = ctx.files.srcs,
        outputs = [header],
        command = "cat \"${@:2}\" >\"$1\"",
        arguments = [args],
    )
    outputs = [header]

    toolchain = find_cpp_toolchain(ctx)
    if "clang" not in toolchain.compiler:
        features = cc_common.configure_features(
            ctx = ctx,
            cc_toolchain = toolchain,
            requested_features = ctx.features,
            unsupported_features = ctx.disabled_features,
        )
        action = "c++-compile"
        precompiled = ctx.actions.declare_file(ctx.attr.name + ".h.gch")
        variables = cc_common.create_compile_variables(
            feature_configuration = features,
            cc_toolchain = toolchain,
            source_file = header.path,
            output_file = precompiled.path,
            user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts,
            use_pic = True,
        )
        flags = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = action,
            variables = variables,
        )
        ctx.actions.run(
            executable = cc_common.get_tool_for_action(
                feature_configuration = features,
                action_name = action,
            ),
            arguments = ["-x", "c++-header"] + flags,
            env = cc_common.get_environment_variables(
                feature_configuration = features,
                action_name = action,
                variables = variables,
            ),
            inputs = depset([header], transitive = [toolchain.all_files]),
            outputs = [precompiled],
            mnemonic = "PrecompileHeader",
            progress_message = "Precompiling %s" % header.short_path,
        )
        outputs.append(precompiled)
    return [DefaultInfo(files = depset(outputs))]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        # In this order: GCC reads a single precompiled header in a compilation.
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        # What .bazelrc adds for the sources that read it.
        "copts": attr.string_list(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
