"""Instances of the Hopper kernels: one .cu file per row, so that they compile in parallel.

A row is (file, header that defines the kernels, the macro calls that instantiate them). The shapes in a
call are explained by the header's macro.
"""

INSTANCES = [
    # head_dim up to 128 with a softcap.
    ("backward_capped_d128", "backward/backward_kernels.cuh", [
        "BACKWARD(capped_d128, 128, 64, true)",
    ]),
    # head_dim up to 192 with a softcap: tiles of 64 q rows by 128 keys, by two blocks.
    ("backward_capped_d192", "backward/paired_backward_kernels.cuh", [
        "PAIRED_BACKWARD(capped_d192, 192, true)",
    ]),
    # head_dim up to 256 with a softcap: tiles of 64 q rows by 128 keys, by two blocks.
    ("backward_capped_d256", "backward/paired_backward_kernels.cuh", [
        "PAIRED_BACKWARD(capped_d256, 256, true)",
    ]),
    # head_dim up to 64 with a softcap.
    ("backward_capped_d64", "backward/backward_kernels.cuh", [
        "BACKWARD(capped_d64, 64, 128, true)",
    ]),
    # head_dim up to 96 with a softcap.
    ("backward_capped_d96", "backward/backward_kernels.cuh", [
        "BACKWARD(capped_d96, 96, 64, true)",
    ]),
    # head_dim up to 128: tiles of 64 q rows by 128 keys.
    ("backward_d128", "backward/backward_kernels.cuh", [
        "BACKWARD(d128, 128, 64, false)",
    ]),
    # head_dim up to 192: tiles of 64 q rows by 128 keys, by two blocks.
    ("backward_d192", "backward/paired_backward_kernels.cuh", [
        "PAIRED_BACKWARD(d192, 192, false)",
    ]),
    # head_dim up to 256: tiles of 64 q rows by 128 keys, by two blocks.
    ("backward_d256", "backward/paired_backward_kernels.cuh", [
        "PAIRED_BACKWARD(d256, 256, false)",
    ]),
    # head_dim up to 64: tiles of 128 q rows by 128 keys.
    ("backward_d64", "backward/backward_kernels.cuh", [
        "BACKWARD(d64, 64, 128, false)",
    ]),
    # head_dim up to 96: tiles of 64 q rows by 128 keys.
    ("backward_d96", "backward/backward_kernels.cuh", [
        "BACKWARD(d96, 96, 64, false)",
    ]),
    # head_dim up to 128 with dropout, but no bias.
    ("backward_drops_d128", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(drops_d128, 128, 64, false, true)",
    ]),
    # head_dim up to 64 with dropout, but no bias.
    ("backward_drops_d64", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(drops_d64, 64, 128, false, true)",
    ]),
    # head_dim up to 128 in a fixed order of sums, without and with a softcap: tiles of 64 q
    # rows by 128 keys.
    ("backward_ordered_d128", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_BACKWARD(ordered_d128, 128, 64, false)",
        "ORDERED_BACKWARD(ordered_capped_d128, 128, 64, true)",
    ]),
    # head_dim up to 192 in a fixed order of sums, without and with a softcap: tiles of 64 q
    # rows by 64 keys.
    ("backward_ordered_d192", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_WIDE_BACKWARD(ordered_d192, 192, false)",
        "ORDERED_WIDE_BACKWARD(ordered_capped_d192, 192, true)",
    ]),
    # head_dim up to 256 in a fixed order of sums, without and with a softcap: tiles of 64 q
    # rows by 64 keys.
    ("backward_ordered_d256", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_WIDE_BACKWARD(ordered_d256, 256, false)",
        "ORDERED_WIDE_BACKWARD(ordered_capped_d256, 256, true)",
    ]),
    # head_dim up to 64 in a fixed order of sums, without and with a softcap: tiles of 128 q
    # rows by 128 keys.
    ("backward_ordered_d64", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_BACKWARD(ordered_d64, 64, 128, false)",
        "ORDERED_BACKWARD(ordered_capped_d64, 64, 128, true)",
    ]),
    # head_dim up to 96 in a fixed order of sums, without and with a softcap: tiles of 64 q rows
    # by 128 keys.
    ("backward_ordered_d96", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_BACKWARD(ordered_d96, 96, 64, false)",
        "ORDERED_BACKWARD(ordered_capped_d96, 96, 64, true)",
    ]),
    # head_dim up to 128 with every score term and the gradient of the bias, in a fixed order of
    # sums.
    ("backward_ordered_stores_d128", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_TERM_BACKWARD(ordered_stores_d128, 128, 64, true, true, true)",
    ]),
    # head_dim up to 64 with every score term and the gradient of the bias, in a fixed order of
    # sums.
    ("backward_ordered_stores_d64", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_TERM_BACKWARD(ordered_stores_d64, 64, 128, true, true, true)",
    ]),
    # head_dim up to 128 with score terms, in a fixed order of sums: ALiBi, segment ids and a
    # mask, and every term.
    ("backward_ordered_terms_d128", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_TERM_BACKWARD(ordered_pairs_d128, 128, 64, false, false)",
        "ORDERED_TERM_BACKWARD(ordered_terms_d128, 128, 64, true, true)",
    ]),
    # head_dim up to 64 with score terms, in a fixed order of sums: ALiBi, segment ids and a
    # mask, and every term.
    ("backward_ordered_terms_d64", "instances/ordered_backward_kernels.cuh", [
        "ORDERED_TERM_BACKWARD(ordered_pairs_d64, 64, 128, false, false)",
        "ORDERED_TERM_BACKWARD(ordered_terms_d64, 64, 128, true, true)",
    ]),
    # head_dim up to 128 with ALiBi, segment ids or a mask.
    ("backward_pairs_d128", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(pairs_d128, 128, 64, false, false)",
    ]),
    # head_dim up to 64 with ALiBi, segment ids or a mask.
    ("backward_pairs_d64", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(pairs_d64, 64, 128, false, false)",
    ]),
    # head_dim up to 128 with every score term and the gradient of the bias.
    ("backward_stores_d128", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(stores_d128, 128, 64, true, true, true)",
    ]),
    # head_dim up to 64 with every score term and the gradient of the bias.
    ("backward_stores_d64", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(stores_d64, 64, 64, true, true, true)",
    ]),
    # head_dim up to 128 with every score term.
    ("backward_terms_d128", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(terms_d128, 128, 64, true, true)",
    ]),
    # head_dim up to 64 with every score term.
    ("backward_terms_d64", "terms/terms_backward_kernels.cuh", [
        "TERM_BACKWARD(terms_d64, 64, 64, true, true)",
    ]),
    # The gradient of a bias, head_dim up to 128.
    ("bias_gradient_d128", "terms/bias_gradient_kernels.cuh", [
        "BIAS_GRADIENT(d128, 128)",
    ]),
    # The gradient of a bias, head_dim up to 64.
    ("bias_gradient_d64", "terms/bias_gradient_kernels.cuh", [
        "BIAS_GRADIENT(d64, 64)",
    ]),
    # head_dim up to 128 with ALiBi, and optionally segment ids or a mask.
    ("forward_alibi_d128", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(alibi_d128, 384, 128, 128, false, false, true)",
    ]),
    # head_dim up to 64, 192 rows, with ALiBi, and optionally segment ids or a mask.
    ("forward_alibi_d64", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(alibi_d64, 512, 64, 192, false, false, true)",
    ]),
    # head_dim up to 128: 128 x 128 tiles, two consumer warpgroups.
    ("forward_d128", "forward/forward_kernels.cuh", [
        "FORWARD(d128, 384, 128, 128, 128, true)",
    ]),
    # head_dim up to 128, long key ranges: 128 x 176 tiles, two consumer warpgroups. Larger
    # tiles read q from shared memory less often, and waste more at a range's end.
    ("forward_d128_long", "forward/forward_kernels.cuh", [
        "FORWARD(d128_long, 384, 128, 128, 176, true)",
    ]),
    # head_dim up to 128, at most 64 q rows, split keys: three stages of 128 keys.
    ("forward_d128_split", "forward/split_forward_kernels.cuh", [
        "SPLIT_FORWARD(d128_split, 128, 128, 3)",
    ]),
    # head_dim up to 192: 128 x 112 tiles, two consumer warpgroups.
    ("forward_d192", "forward/forward_kernels.cuh", [
        "FORWARD(d192, 384, 192, 128, 112, true)",
    ]),
    # head_dim up to 256: 128 x 80 tiles, two consumer warpgroups.
    ("forward_d256", "forward/forward_kernels.cuh", [
        "FORWARD(d256, 384, 256, 128, 80, true)",
    ]),
    # head_dim up to 64: 192 x 128 tiles, three consumer warpgroups.
    ("forward_d64", "forward/forward_kernels.cuh", [
        "FORWARD(d64, 512, 64, 192, 128, true)",
    ]),
    # head_dim up to 96: 192 x 112 tiles, three consumer warpgroups. (With 128 keys the
    # probabilities and the scores do not fit the registers, and ptxas serialises the products.)
    ("forward_d96", "forward/forward_kernels.cuh", [
        "FORWARD(d96, 512, 96, 192, 112, true)",
    ]),
    # head_dim up to 128 with dropout, but no bias.
    ("forward_drops_d128", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(drops_d128, 384, 128, 128, false, true)",
    ]),
    # head_dim up to 64 with dropout, but no bias.
    ("forward_drops_d64", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(drops_d64, 384, 64, 128, false, true)",
    ]),
    # head_dim up to 128 with ALiBi, segment ids or a mask.
    ("forward_pairs_d128", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(pairs_d128, 384, 128, 128, false, false)",
    ]),
    # head_dim up to 64 with ALiBi, segment ids or a mask.
    ("forward_pairs_d64", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(pairs_d64, 384, 64, 128, false, false)",
    ]),
    # head_dim up to 128 with every score term.
    ("forward_terms_d128", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(terms_d128, 384, 128, 128, true, true)",
    ]),
    # head_dim up to 64 with every score term.
    ("forward_terms_d64", "terms/terms_forward_kernels.cuh", [
        "TERM_FORWARD(terms_d64, 384, 64, 128, true, true)",
    ]),
]

_TEMPLATE = """// Generated from the table in instances/instances.bzl.
#include "worker/kernels/cuda/sm90/{header}"

namespace ringattn::worker::cuda::sm90 {{
{calls}
}}  // namespace ringattn::worker::cuda::sm90
"""

def _instance_sources_impl(ctx):
    files = []
    for name, header, calls in INSTANCES:
        source = ctx.actions.declare_file("instances/" + name + ".cu")
        ctx.actions.write(source, _TEMPLATE.format(
            header = header,
            calls = "\n".join(["RINGATTN_SM90_" + call for call in calls]),
        ))
        files.append(source)
    return [DefaultInfo(files = depset(files))]

# The sources of all rows of INSTANCES.
instance_sources = rule(implementation = _instance_sources_impl)
