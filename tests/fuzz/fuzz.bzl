"""A libFuzzer target and the test that replays its corpus."""

def fuzz_target(name, deps):
    """Declares NAME_fuzz, which links only with --config=fuzz, and NAME_corpus_test.

    Args:
      name: NAME_fuzz.cc is the source and corpus/NAME the corpus.
      deps: as cc_binary's.
    """
    source = name + "_fuzz.cc"
    native.cc_binary(
        name = name + "_fuzz",
        testonly = True,
        srcs = [
            source,
            "quiet_protobuf.cc",
        ],
        linkopts = ["-fsanitize=fuzzer"],
        tags = ["manual"],
        deps = deps + ["//deploy/bazel:protobuf"],
    )
    native.cc_test(
        name = name + "_corpus_test",
        srcs = [
            source,
            "replay.cc",
        ],
        args = ["tests/fuzz/corpus/" + name],
        data = native.glob(["corpus/%s/*" % name]),
        deps = deps,
    )
