// Validation at the edge: from what a client wrote to an AttentionSpec that
// everything behind may trust. The only place that checks requests. Pure, and safe
// for any input: no product is formed before its factors are bounded.
#ifndef RINGATTN_COMMON_REQUEST_VALIDATION_H_
#define RINGATTN_COMMON_REQUEST_VALIDATION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/plan/planner.h"
#include "common/plan/schedule.h"

namespace ringattn {

// One thing that is wrong, at a field in dotted proto style relative to the header:
// "shape.head_dim", "shape.packed.cu_seqlens_q[3]", "options.window.left".
struct Violation {
  std::string field;
  std::string description;
  // INVALID_ARGUMENT, UNIMPLEMENTED (a field that this version does not serve) or
  // RESOURCE_EXHAUSTED (over a limit).
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};
Violation UnsupportedField(std::string field);  // reserved for later: UNIMPLEMENTED
Violation UnknownField(std::string field);      // nothing is ignored: INVALID_ARGUMENT

// A tensor that rides in the header.
struct RawInlineTensor {
  std::optional<TensorId> tensor;  // unset: unspecified or unknown
  uint64_t bytes = 0;
};

struct RawWindow {
  int64_t left = -1;
  int64_t right = -1;
};

// A header as it came. Unset enums stand for "unspecified"; a number that is no
// value of the enum, unknown fields and reserved fields go to `found_in_decoding`.
struct RawRequest {
  Direction direction = Direction::kForward;
  std::string request_id;  // empty: the server makes one up

  uint64_t batch = 0;
  uint64_t seq_len_q = 0;
  uint64_t seq_len_kv = 0;
  uint64_t num_heads = 0;
  uint64_t num_kv_heads = 0;  // 0: num_heads
  uint64_t head_dim = 0;
  uint64_t head_dim_v = 0;  // 0: head_dim
  bool packed = false;
  std::vector<uint64_t> cu_seqlens_q;
  std::vector<uint64_t> cu_seqlens_k;
  std::optional<DType> dtype;

  std::optional<double> softmax_scale;
  std::optional<double> softcap;
  bool causal = false;
  std::optional<RawWindow> window;

  std::optional<Layout> layout;
  std::optional<ScheduleKind> schedule;
  std::optional<uint64_t> world_size;
  std::optional<uint64_t> stripe;

  std::optional<uint64_t> reply_max_chunk_bytes;
  std::optional<double> reply_progress_interval_seconds;

  bool has_forward_result = false;  // backward: out and lse are sent
  std::vector<RawInlineTensor> inline_tensors;

  std::vector<Violation> found_in_decoding;
};

struct ValidRequest {
  AttentionSpec spec;
  Direction direction = Direction::kForward;
  bool recompute_forward = false;
  PlanChoice choice;              // recompute_forward included
  std::vector<TensorId> inputs;   // in the order in which they are streamed
  std::vector<TensorId> outputs;  // likewise
};

struct Rejection {
  // INVALID_ARGUMENT if any violation has it, else UNIMPLEMENTED, else
  // RESOURCE_EXHAUSTED.
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  // All that is wrong, as far as Limits::max_error_detail_bytes allows.
  std::vector<Violation> violations;
  int64_t violations_left_out = 0;

  absl::Status ToStatus() const;  // the first violation and the number of others
};

std::variant<ValidRequest, Rejection> ValidateRequest(const RawRequest& raw, const Limits& limits);

// The tensors of a request, in the order in which they are streamed.
std::vector<TensorId> InputsOf(Direction direction, bool recompute_forward);
std::vector<TensorId> OutputsOf(Direction direction);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_VALIDATION_H_
