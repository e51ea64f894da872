"""google/rpc protos, from the PyPI package that deploy/install_deps.sh unpacks into .deps."""

def _googleapis_protos_impl(ctx):
    root = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".deps").get_child("googleapis")
    if not root.get_child("google").exists:
        fail("google/rpc/*.proto are missing: run deploy/install_deps.sh")
    ctx.symlink(root.get_child("google"), "google")
    ctx.file("BUILD", """
exports_files(glob(["google/rpc/*.proto"]))

genrule(
    name = "generate",
    srcs = glob(["google/rpc/status.proto", "google/rpc/error_details.proto", "google/rpc/code.proto"]),
    outs = [
        "google/rpc/%s.pb.%s" % (name, suffix)
        for name in ["status", "error_details", "code"]
        for suffix in ["h", "cc"]
    ],
    cmd = "root=$$(dirname $$(dirname $$(dirname $(location google/rpc/status.proto)))); " +
          "protoc -I$$root --cpp_out=$(RULEDIR) $(SRCS)",
)

cc_library(
    name = "google_rpc",
    srcs = ["google/rpc/%s.pb.cc" % name for name in ["status", "error_details", "code"]],
    hdrs = ["google/rpc/%s.pb.h" % name for name in ["status", "error_details", "code"]],
    copts = ["-w"],
    includes = ["."],
    linkopts = ["-lprotobuf"],
    visibility = ["//visibility:public"],
)
""")

googleapis_protos = repository_rule(implementation = _googleapis_protos_impl, local = True)
