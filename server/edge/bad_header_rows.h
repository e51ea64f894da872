// The table of bad_requests_test: headers that are wrong in one way each.
#ifndef RINGATTN_SERVER_EDGE_BAD_HEADER_ROWS_H_
#define RINGATTN_SERVER_EDGE_BAD_HEADER_ROWS_H_

#include <grpcpp/support/status.h>

namespace ringattn::server {

inline constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
inline constexpr grpc::StatusCode kOver = grpc::StatusCode::RESOURCE_EXHAUSTED;
inline constexpr grpc::StatusCode kLater = grpc::StatusCode::UNIMPLEMENTED;

// q, dout and out have 2*8*4*16*4 = 4096 bytes, k and v 2*8*2*16*4 = 2048.
inline constexpr char kBase[] = R"(
  shape { batch: 2 seq_len_q: 8 seq_len_kv: 8 num_heads: 4 num_kv_heads: 2 head_dim: 16 }
  dtype: DATA_TYPE_FLOAT32
  plan { schedule: SCHEDULE_RING world_size: 2 })";

inline constexpr char kPackedBase[] = R"(
  shape { batch: 1 seq_len_q: 8 seq_len_kv: 9 num_heads: 1 head_dim: 4 packed {} }
  dtype: DATA_TYPE_BFLOAT16)";

struct BadHeader {
  const char* text;  // merged over the base
  grpc::StatusCode code;
  const char* field;
};

inline const BadHeader kHeaderRows[] = {
    // --- shape
    {"shape { batch: 0 }", kInvalid, "shape.batch"},
    {"shape { batch: 4097 }", kOver, "shape.batch"},
    {"shape { batch: 9223372036854775808 }", kOver, "shape.batch"},
    {"shape { batch: 18446744073709551615 }", kOver, "shape.batch"},
    {"shape { seq_len_q: 134217729 }", kOver, "shape.seq_len_q"},
    {"shape { seq_len_q: 1099511627776 }", kOver, "shape.seq_len_q"},
    {"shape { seq_len_q: 9223372036854775807 }", kOver, "shape.seq_len_q"},
    {"shape { seq_len_q: 18446744073709551615 }", kOver, "shape.seq_len_q"},
    {"shape { seq_len_kv: 134217729 }", kOver, "shape.seq_len_kv"},
    {"shape { seq_len_kv: 9223372036854775808 }", kOver, "shape.seq_len_kv"},
    {"shape { seq_len_kv: 18446744073709551615 }", kOver, "shape.seq_len_kv"},
    {"shape { num_heads: 0 }", kInvalid, "shape.num_heads"},
    {"shape { num_heads: 1026 }", kOver, "shape.num_heads"},
    {"shape { num_heads: 4294967294 }", kOver, "shape.num_heads"},
    {"shape { num_kv_heads: 3 }", kInvalid, "shape.num_kv_heads"},
    {"shape { num_kv_heads: 8 }", kInvalid, "shape.num_kv_heads"},
    {"shape { num_kv_heads: 1025 }", kInvalid, "shape.num_kv_heads"},
    {"shape { num_kv_heads: 4294967295 }", kInvalid, "shape.num_kv_heads"},
    {"shape { head_dim: 0 }", kInvalid, "shape.head_dim"},
    {"shape { head_dim: 257 }", kInvalid, "shape.head_dim"},
    {"shape { head_dim: 4294967295 }", kInvalid, "shape.head_dim"},
    {"shape { head_dim_v: 257 }", kInvalid, "shape.head_dim_v"},
    {"shape { head_dim_v: 4294967295 }", kInvalid, "shape.head_dim_v"},
    {"shape { packing: 3 }", kInvalid, "shape.packing"},
    {"shape { packing: -1 }", kInvalid, "shape.packing"},
    {"shape { packing: 2147483647 }", kInvalid, "shape.packing"},
    {"shape { packing: PACKING_QKV }", kInvalid, "shape.num_kv_heads"},
    {"shape { packing: PACKING_QKV num_kv_heads: 1 }", kInvalid, "shape.num_kv_heads"},
    {"shape { packing: PACKING_QKV num_kv_heads: 4 seq_len_kv: 9 }", kInvalid, "shape.seq_len_kv"},
    {"shape { packing: PACKING_QKV num_kv_heads: 4 seq_len_kv: 0 }", kInvalid, "shape.seq_len_kv"},
    {"shape { packing: PACKING_QKV num_kv_heads: 4 head_dim_v: 8 }", kInvalid, "shape.head_dim_v"},
    {"shape { packing: PACKING_KV head_dim_v: 8 }", kInvalid, "shape.head_dim_v"},
    {"shape { packing: PACKING_KV head_dim_v: 256 }", kInvalid, "shape.head_dim_v"},
    // Though q, k and v by themselves are not too large.
    {"shape { packing: PACKING_QKV seq_len_q: 134217728 seq_len_kv: 134217728 num_heads: 16 "
     "num_kv_heads: 16 head_dim: 64 batch: 1 }",
     kOver, "shape"},
    {"shape { batch: 4096 seq_len_q: 134217728 seq_len_kv: 134217728 num_heads: 1024 "
     "num_kv_heads: 1024 head_dim: 256 }",
     kOver, "shape"},
    {"shape { seq_len_q: 134217728 num_heads: 1024 num_kv_heads: 1 head_dim: 256 }", kOver,
     "shape"},
    {"shape { seq_len_kv: 134217728 num_heads: 1024 num_kv_heads: 1024 head_dim: 256 }", kOver,
     "shape"},
    {"shape { batch: 0 seq_len_q: 18446744073709551615 }", kInvalid, "shape.batch"},
    // --- dtype
    {"dtype: DATA_TYPE_UNSPECIFIED", kInvalid, "dtype"},
    {"dtype: 4", kInvalid, "dtype"},
    {"dtype: 2147483647", kInvalid, "dtype"},
    {"dtype: -1", kInvalid, "dtype"},
    // --- options
    {"options { softmax_scale: nan }", kInvalid, "options.softmax_scale"},
    {"options { softmax_scale: inf }", kInvalid, "options.softmax_scale"},
    {"options { softmax_scale: -inf }", kInvalid, "options.softmax_scale"},
    {"options { softmax_scale: 1e39 }", kInvalid, "options.softmax_scale"},
    {"options { softcap: 0 }", kInvalid, "options.softcap"},
    {"options { softcap: -1 }", kInvalid, "options.softcap"},
    {"options { softcap: nan }", kInvalid, "options.softcap"},
    {"options { softcap: inf }", kInvalid, "options.softcap"},
    {"options { softcap: 1e-46 }", kInvalid, "options.softcap"},
    {"options { softcap: 1e39 }", kInvalid, "options.softcap"},
    {"options { window { left: -2 } }", kInvalid, "options.window.left"},
    {"options { window { left: -9223372036854775808 } }", kInvalid, "options.window.left"},
    {"options { window { left: -1 right: -2 } }", kInvalid, "options.window.right"},
    {"options { window { right: -9223372036854775808 } }", kInvalid, "options.window.right"},
    {"options { dropout { rate: 1 seed: 1 } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: 1.5 } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: -0.1 } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: -1e-300 } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: nan } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: inf } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: -inf } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: 0.999999 } }", kInvalid, "options.dropout.rate"},
    {"options { dropout { rate: 0.5 first_batch: 4294967295 } }", kInvalid,
     "options.dropout.first_batch"},
    {"options { dropout { rate: 0.5 first_batch: 18446744073709551615 } }", kInvalid,
     "options.dropout.first_batch"},
    {"options { dropout { rate: 0.5 first_head: 4294967293 } }", kInvalid,
     "options.dropout.first_head"},
    {"options { dropout { rate: 0.5 first_query: 4294967289 } }", kInvalid,
     "options.dropout.first_query"},
    {"options { dropout { rate: 0.5 first_query: 9223372036854775808 } }", kInvalid,
     "options.dropout.first_query"},
    {"options { dropout { rate: 0.5 first_key: 4294967296 } }", kInvalid,
     "options.dropout.first_key"},
    {"options { dropout { first_key: 18446744073709551608 } }", kInvalid,
     "options.dropout.first_key"},
    {"options { alibi { slopes: 0.5 } }", kInvalid, "options.alibi.slopes"},
    {"options { alibi {} }", kInvalid, "options.alibi.slopes"},
    {"options { alibi { slopes: [1, 2, 3] } }", kInvalid, "options.alibi.slopes"},
    {"options { alibi { slopes: [1, 2, 3, 4, 5] } }", kInvalid, "options.alibi.slopes"},
    {"options { alibi { slopes: [1, 2, 3, 4, 5, 6, 7] } }", kInvalid, "options.alibi.slopes"},
    {"options { alibi { slopes: [1, 2, 3, 4, 5, 6, 7, 8, 9] } }", kInvalid, "options.alibi.slopes"},
    {"options { alibi { slopes: [1, nan, 3, 4] } }", kInvalid, "options.alibi.slopes[1]"},
    {"options { alibi { slopes: [1, 2, 3, inf] } }", kInvalid, "options.alibi.slopes[3]"},
    {"options { alibi { slopes: [-inf, 2, 3, 4] } }", kInvalid, "options.alibi.slopes[0]"},
    {"options { bias { dtype: DATA_TYPE_BFLOAT16 } }", kInvalid, "options.bias.dtype"},
    {"options { bias { dtype: DATA_TYPE_FLOAT16 } }", kInvalid, "options.bias.dtype"},
    {"options { bias { dtype: DATA_TYPE_UNSPECIFIED } }", kInvalid, "options.bias.dtype"},
    {"options { bias { dtype: DATA_TYPE_UINT8 } }", kInvalid, "options.bias.dtype"},
    {"options { bias { dtype: 77 } }", kInvalid, "options.bias.dtype"},
    {"dtype: DATA_TYPE_FLOAT16 options { bias { dtype: DATA_TYPE_BFLOAT16 } }", kInvalid,
     "options.bias.dtype"},
    // Too large though q, k and v are not: 2^40 pairs, for every head.
    {"shape { seq_len_q: 1048576 seq_len_kv: 1048576 } options { bias { per_head: true } }", kOver,
     "shape"},
    {"shape { batch: 4096 seq_len_q: 134217728 seq_len_kv: 134217728 num_heads: 1024 "
     "num_kv_heads: 1 head_dim: 1 } options { bias { per_head: true per_batch: true } }",
     kOver, "shape"},
    {"shape { seq_len_q: 134217728 seq_len_kv: 134217728 num_heads: 1 num_kv_heads: 1 head_dim: 1 "
     "} "
     "options { mask { encoding: MASK_ENCODING_BITS } }",
     kOver, "shape"},
    {"options { mask { encoding: 3 } }", kInvalid, "options.mask.encoding"},
    {"options { mask { encoding: -1 } }", kInvalid, "options.mask.encoding"},
    {"options { segment_ids {} softcap: 0 }", kInvalid, "options.softcap"},
    {"options { bias {} mask {} window { left: -2 } }", kInvalid, "options.window.left"},
    {"inline_tensors { tensor: TENSOR_ID_BIAS data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_MASK data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_Q_SEGMENT_IDS data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_KV_SEGMENT_IDS data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"options { bias {} } inline_tensors { tensor: TENSOR_ID_BIAS data: 'x' }", kInvalid,
     "inline_tensors[0].data"},
    {"options { bias { gradient: true } } inline_tensors { tensor: TENSOR_ID_DBIAS data: 'x' }",
     kInvalid, "inline_tensors[0].tensor"},
    {"options { bias {} } inline_tensors { tensor: TENSOR_ID_MASK data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    // 8 x 8 bytes, and 8 rows of one byte.
    {"options { mask {} } inline_tensors { tensor: TENSOR_ID_MASK data: '12345678' }", kInvalid,
     "inline_tensors[0].data"},
    {"options { mask { encoding: MASK_ENCODING_BITS } } "
     "inline_tensors { tensor: TENSOR_ID_MASK data: '1234567' }",
     kInvalid, "inline_tensors[0].data"},
    {"options { mask { encoding: MASK_ENCODING_BITS per_head: true } } "
     "inline_tensors { tensor: TENSOR_ID_MASK data: '12345678' }",
     kInvalid, "inline_tensors[0].data"},
    {"options { segment_ids {} } inline_tensors { tensor: TENSOR_ID_Q_SEGMENT_IDS data: '1234' }",
     kInvalid, "inline_tensors[0].data"},
    {"options { segment_ids {} } inline_tensors { tensor: TENSOR_ID_KV_SEGMENT_IDS }", kInvalid,
     "inline_tensors[0].data"},
    {"options { segment_ids {} } inline_tensors { tensor: TENSOR_ID_MASK data: '1' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"options { sinks {} softcap: 0 }", kInvalid, "options.softcap"},
    {"options { dilation_levels { segment_length: 8 } }", kLater, "options.dilation_levels"},
    {"options { dilation_levels {} dilation_levels {} }", kLater, "options.dilation_levels"},
    {"options { deterministic: 2 }", kInvalid, "options.deterministic"},
    {"options { deterministic: -1 }", kInvalid, "options.deterministic"},
    {"options { deterministic: DETERMINISM_SAME_RING softcap: -1 }", kInvalid, "options.softcap"},
    // --- plan
    {"plan { layout: 5 }", kInvalid, "plan.layout"},
    {"plan { layout: -7 }", kInvalid, "plan.layout"},
    {"plan { layout: 2147483647 }", kInvalid, "plan.layout"},
    {"plan { schedule: 9 }", kInvalid, "plan.schedule"},
    {"plan { schedule: -1 }", kInvalid, "plan.schedule"},
    {"plan { world_size: 0 }", kInvalid, "plan.world_size"},
    {"plan { world_size: 65 }", kOver, "plan.world_size"},
    {"plan { world_size: 4294967295 }", kOver, "plan.world_size"},
    {"plan { schedule: SCHEDULE_SINGLE world_size: 2 }", kInvalid, "plan.world_size"},
    {"plan { stripe: 1 }", kInvalid, "plan.stripe"},
    {"plan { layout: LAYOUT_ZIGZAG stripe: 4 }", kInvalid, "plan.stripe"},
    {"plan { layout: LAYOUT_STRIPED stripe: 0 }", kInvalid, "plan.stripe"},
    {"plan { layout: LAYOUT_STRIPED stripe: 18446744073709551615 }", kOver, "plan.stripe"},
    // --- reply
    {"reply { max_chunk_bytes: 0 }", kInvalid, "reply.max_chunk_bytes"},
    {"reply { max_chunk_bytes: 1023 }", kInvalid, "reply.max_chunk_bytes"},
    {"reply { max_chunk_bytes: 16777217 }", kOver, "reply.max_chunk_bytes"},
    {"reply { max_chunk_bytes: 4294967295 }", kOver, "reply.max_chunk_bytes"},
    {"reply { output_dtype: 9 }", kInvalid, "reply.output_dtype"},
    {"reply { output_dtype: DATA_TYPE_FLOAT16 }", kInvalid, "reply.output_dtype"},
    {"reply { lse_format: 2 }", kInvalid, "reply.lse_format"},
    {"reply { lse_format: -1 }", kInvalid, "reply.lse_format"},
    {"reply { lse_format: LSE_FORMAT_PER_DOCUMENT }", kInvalid, "reply.lse_format"},
    {"reply { progress_interval {} }", kInvalid, "reply.progress_interval"},
    {"reply { progress_interval { nanos: 9000000 } }", kInvalid, "reply.progress_interval"},
    {"reply { progress_interval { seconds: -1 } }", kInvalid, "reply.progress_interval"},
    {"reply { progress_interval { seconds: -9223372036854775808 } }", kInvalid,
     "reply.progress_interval"},
    // --- request_id
    {"request_id: 'tab\\there'", kInvalid, "request_id"},
    {"request_id: 'line\\n'", kInvalid, "request_id"},
    {"request_id: 'zero\\000'", kInvalid, "request_id"},
    {"request_id: 'delete\\177'", kInvalid, "request_id"},
    {"request_id: '\\303\\251'", kInvalid, "request_id"},
    // --- inline tensors
    {"inline_tensors { data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: 77 data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: -1 }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_DQ data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_LSE data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_Q }", kInvalid, "inline_tensors[0].data"},
    {"inline_tensors { tensor: TENSOR_ID_SINKS data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_DLSE data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"options { sinks {} } inline_tensors { tensor: TENSOR_ID_DSINKS data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"options { sinks {} } inline_tensors { tensor: TENSOR_ID_SINKS }", kInvalid,
     "inline_tensors[0].data"},
    {"options { sinks {} } inline_tensors { tensor: TENSOR_ID_SINKS data: '123456789' }", kInvalid,
     "inline_tensors[0].data"},
    {"inline_tensors { tensor: TENSOR_ID_K data: 'short' }", kInvalid, "inline_tensors[0].data"},
    {"inline_tensors { tensor: TENSOR_ID_QKV data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_KV data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_DQKV data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"inline_tensors { tensor: TENSOR_ID_DKV data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"shape { packing: PACKING_KV } inline_tensors { tensor: TENSOR_ID_K data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"shape { packing: PACKING_KV } inline_tensors { tensor: TENSOR_ID_QKV data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"shape { packing: PACKING_KV } inline_tensors { tensor: TENSOR_ID_KV data: 'x' }", kInvalid,
     "inline_tensors[0].data"},
    {"shape { packing: PACKING_KV } inline_tensors { tensor: TENSOR_ID_DKV data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"shape { packing: PACKING_QKV num_kv_heads: 4 } "
     "inline_tensors { tensor: TENSOR_ID_Q data: 'x' }",
     kInvalid, "inline_tensors[0].tensor"},
    {"shape { packing: PACKING_QKV num_kv_heads: 4 } inline_tensors { tensor: TENSOR_ID_QKV }",
     kInvalid, "inline_tensors[0].data"},
};

inline const BadHeader kBackwardRows[] = {
    {"keep_residual: true", kInvalid, "keep_residual"},
    {"has_dlse: true inline_tensors { tensor: TENSOR_ID_DLSE data: 'x' }", kInvalid,
     "inline_tensors[0].data"},
    {"has_dlse: true inline_tensors { tensor: TENSOR_ID_LSE data: 'x' }", kInvalid,
     "inline_tensors[0].tensor"},
    {"has_dlse: true reply { lse_format: LSE_FORMAT_PER_DOCUMENT }", kInvalid, "reply.lse_format"},
    {"inline_tensors { tensor: TENSOR_ID_OUT data: 'x' }", kInvalid, "inline_tensors[0].tensor"},
    {"has_forward_result: true inline_tensors { tensor: TENSOR_ID_OUT data: 'x' }", kInvalid,
     "inline_tensors[0].data"},
};

#define CU(q, k) "shape { packed { " q " " k " } }"
inline const BadHeader kPackedRows[] = {
    {CU("", ""), kInvalid, "shape.packed.cu_seqlens_q"},
    {CU("cu_seqlens_q: [0, 8]", ""), kInvalid, "shape.packed.cu_seqlens_k"},
    {CU("", "cu_seqlens_k: [0, 9]"), kInvalid, "shape.packed.cu_seqlens_q"},
    {CU("cu_seqlens_q: [1, 8]", "cu_seqlens_k: [0, 9]"), kInvalid, "shape.packed.cu_seqlens_q[0]"},
    {CU("cu_seqlens_q: [0, 8]", "cu_seqlens_k: [2, 9]"), kInvalid, "shape.packed.cu_seqlens_k[0]"},
    {CU("cu_seqlens_q: [0, 7]", "cu_seqlens_k: [0, 9]"), kInvalid, "shape.packed.cu_seqlens_q[1]"},
    {CU("cu_seqlens_q: [0, 9]", "cu_seqlens_k: [0, 9]"), kInvalid, "shape.packed.cu_seqlens_q[1]"},
    {CU("cu_seqlens_q: [0, 8]", "cu_seqlens_k: [0, 8]"), kInvalid, "shape.packed.cu_seqlens_k[1]"},
    {CU("cu_seqlens_q: [0, 5, 3, 8]", "cu_seqlens_k: [0, 3, 6, 9]"), kInvalid,
     "shape.packed.cu_seqlens_q[2]"},
    {CU("cu_seqlens_q: [0, 3, 5, 8]", "cu_seqlens_k: [0, 7, 6, 9]"), kInvalid,
     "shape.packed.cu_seqlens_k[2]"},
    {CU("cu_seqlens_q: [0, 4, 8]", "cu_seqlens_k: [0, 9]"), kInvalid, "shape.packed.cu_seqlens_k"},
    {CU("cu_seqlens_q: [0, 18446744073709551615, 8]", "cu_seqlens_k: [0, 4, 9]"), kInvalid,
     "shape.packed.cu_seqlens_q[2]"},
    {CU("cu_seqlens_q: [0, 8]", "cu_seqlens_k: [0, 18446744073709551615]"), kInvalid,
     "shape.packed.cu_seqlens_k[1]"},
    {CU("cu_seqlens_q: [0, 8] options {} options {}", "cu_seqlens_k: [0, 9]"), kInvalid,
     "shape.packed.options"},
    {CU("cu_seqlens_q: [0, 4, 8] options {}", "cu_seqlens_k: [0, 4, 9]"), kInvalid,
     "shape.packed.options"},
    {CU("cu_seqlens_q: [0, 8] options { window { left: -2 } }", "cu_seqlens_k: [0, 9]"), kInvalid,
     "shape.packed.options[0].window.left"},
    {CU("cu_seqlens_q: [0, 8] options { window { right: -9 } }", "cu_seqlens_k: [0, 9]"), kInvalid,
     "shape.packed.options[0].window.right"},
    {CU("cu_seqlens_q: [0, 8] options {}", "cu_seqlens_k: [0, 9]") " options { causal: true }",
     kInvalid, "options.causal"},
    {CU("cu_seqlens_q: [0, 8] options {}", "cu_seqlens_k: [0, 9]") " options { window {} }",
     kInvalid, "options.window"},
    {CU("cu_seqlens_q: [0, 5, 8]",
        "cu_seqlens_k: [0, 4, 9]") " options { alibi { slopes: [1, 2, 3] "
                                   "} }",
     kInvalid, "options.alibi.slopes"},
    {CU("cu_seqlens_q: [0, 5, 8]", "cu_seqlens_k: [0, 4, 9]") " options { dropout { rate: 0.5 "
                                                              "first_batch: 4294967295 } }",
     kInvalid, "options.dropout.first_batch"},
    {CU("cu_seqlens_q: [0, 5, 8]",
        "cu_seqlens_k: [0, 4, 9]") " options { bias {} } inline_tensors { "
                                   "tensor: TENSOR_ID_BIAS data: 'x' }",
     kInvalid, "inline_tensors[0].data"},
    {"shape { seq_len_kv: 8 packing: PACKING_QKV packed { cu_seqlens_q: [0, 4, 8] cu_seqlens_k: "
     "[0, 5, 8] } }",
     kInvalid, "shape.packed.cu_seqlens_k"},
    {"shape { packing: PACKING_QKV packed { cu_seqlens_q: [0, 8] cu_seqlens_k: [0, 9] } }",
     kInvalid, "shape.seq_len_kv"},
    {CU("cu_seqlens_q: [0, 8]", "cu_seqlens_k: [0, 9]") " reply { lse_format: 7 }", kInvalid,
     "reply.lse_format"},
    {CU("cu_seqlens_q: [8]", "cu_seqlens_k: [9]"), kInvalid, "shape.packed.cu_seqlens_q[0]"},
    {"shape { batch: 2 packed { cu_seqlens_q: [0, 8] cu_seqlens_k: [0, 9] } }", kInvalid,
     "shape.batch"},
};
#undef CU

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_BAD_HEADER_ROWS_H_
