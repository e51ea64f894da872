#include "common/request/validation.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

using absl::StatusCode;

// Gathers violations up to a number of bytes. Not thread safe.
class Violations {
 public:
  explicit Violations(int64_t max_bytes) : max_bytes_(max_bytes) {}

  void Add(Violation violation) {
    invalid_ = invalid_ || violation.code == StatusCode::kInvalidArgument;
    unimplemented_ = unimplemented_ || violation.code == StatusCode::kUnimplemented;
    bytes_ += static_cast<int64_t>(violation.field.size() + violation.description.size());
    // The first one is always shown; its text is bounded by where it is made.
    if (!shown_.empty() && bytes_ > max_bytes_) {
      ++left_out_;
    } else {
      shown_.push_back(std::move(violation));
    }
  }
  void Invalid(std::string field, std::string description) {
    Add({std::move(field), std::move(description), StatusCode::kInvalidArgument});
  }
  void OverLimit(std::string field, std::string description) {
    Add({std::move(field), std::move(description), StatusCode::kResourceExhausted});
  }

  bool empty() const { return shown_.empty(); }
  Rejection ToRejection() && {
    Rejection rejection;
    rejection.code = invalid_         ? StatusCode::kInvalidArgument
                     : unimplemented_ ? StatusCode::kUnimplemented
                                      : StatusCode::kResourceExhausted;
    rejection.violations = std::move(shown_);
    rejection.violations_left_out = left_out_;
    return rejection;
  }

 private:
  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  int64_t left_out_ = 0;
  bool invalid_ = false;
  bool unimplemented_ = false;
  std::vector<Violation> shown_;
};

// Checks least <= value <= limit and returns the value, or `least` where it is wrong
// so that what follows stays bounded.
int64_t Bounded(const char* field, uint64_t value, int64_t least, int64_t limit,
                Violations& violations) {
  if (value < static_cast<uint64_t>(least)) {
    violations.Invalid(field, absl::StrCat("is ", value, ", must be at least ", least));
    return least;
  }
  if (value > static_cast<uint64_t>(limit)) {
    violations.OverLimit(field, absl::StrCat("is ", value, ", the limit is ", limit));
    return least;
  }
  return static_cast<int64_t>(value);
}

// Head dimensions above the limit are no matter of size: no kernel takes them.
int64_t HeadDim(const char* field, uint64_t value, const Limits& limits, Violations& violations) {
  if (value < 1 || value > static_cast<uint64_t>(limits.max_head_dim)) {
    violations.Invalid(field, absl::StrCat("is ", value, ", must be in 1..", limits.max_head_dim));
    return 1;
  }
  return static_cast<int64_t>(value);
}

std::vector<int64_t> CuSeqlens(const std::string& field, const std::vector<uint64_t>& raw,
                               uint64_t total, const char* total_field, const Limits& limits,
                               Violations& violations) {
  if (raw.empty()) {
    violations.Invalid(field, "must have an entry for each document and one for the end");
    return {};
  }
  if (raw.size() - 1 > static_cast<uint64_t>(limits.max_documents)) {
    violations.OverLimit(field, absl::StrCat("has ", raw.size() - 1, " documents, the limit is ",
                                             limits.max_documents));
    return {};
  }
  std::vector<int64_t> result;
  result.reserve(raw.size());
  if (raw[0] != 0) {
    violations.Invalid(absl::StrCat(field, "[0]"), absl::StrCat("is ", raw[0], ", must be 0"));
  }
  for (size_t i = 0; i < raw.size(); ++i) {
    if (i > 0 && raw[i] < raw[i - 1]) {
      violations.Invalid(absl::StrCat(field, "[", i, "]"),
                         absl::StrCat("is ", raw[i], ", less than ", raw[i - 1], " before it"));
    }
    result.push_back(static_cast<int64_t>(std::min<uint64_t>(raw[i], INT64_MAX)));
  }
  if (raw.back() != total) {
    violations.Invalid(absl::StrCat(field, "[", raw.size() - 1, "]"),
                       absl::StrCat("is ", raw.back(), ", must be ", total_field, " = ", total));
  }
  return result;
}

void CheckDocuments(const RawRequest& raw, const Limits& limits, AttentionShape& shape,
                    Violations& violations) {
  if (!raw.packed) {
    if (!raw.cu_seqlens_q.empty() || !raw.cu_seqlens_k.empty()) {
      violations.Invalid("shape.packed", "is not set, but there are cu_seqlens");
    }
    shape.cu_seqlens_q = {0, shape.seq_len_q};
    shape.cu_seqlens_k = {0, shape.seq_len_kv};
    return;
  }
  if (raw.batch != 1) {
    violations.Invalid("shape.batch", absl::StrCat("is ", raw.batch, ", must be 1 when packed"));
  }
  shape.cu_seqlens_q = CuSeqlens("shape.packed.cu_seqlens_q", raw.cu_seqlens_q, raw.seq_len_q,
                                 "shape.seq_len_q", limits, violations);
  shape.cu_seqlens_k = CuSeqlens("shape.packed.cu_seqlens_k", raw.cu_seqlens_k, raw.seq_len_kv,
                                 "shape.seq_len_kv", limits, violations);
  if (raw.cu_seqlens_q.size() != raw.cu_seqlens_k.size()) {
    violations.Invalid("shape.packed.cu_seqlens_k",
                       absl::StrCat("has ", raw.cu_seqlens_k.size(), " entries, cu_seqlens_q ",
                                    raw.cu_seqlens_q.size()));
  }
}

AttentionShape CheckShape(const RawRequest& raw, const Limits& limits, Violations& violations) {
  AttentionShape shape;
  shape.packed = raw.packed;
  shape.batch = Bounded("shape.batch", raw.batch, 1, limits.max_batch, violations);
  shape.seq_len_q = Bounded("shape.seq_len_q", raw.seq_len_q, 0, limits.max_tokens, violations);
  shape.seq_len_kv = Bounded("shape.seq_len_kv", raw.seq_len_kv, 0, limits.max_tokens, violations);
  shape.num_heads = Bounded("shape.num_heads", raw.num_heads, 1, limits.max_heads, violations);
  shape.num_kv_heads = shape.num_heads;
  if (raw.num_kv_heads != 0) {
    shape.num_kv_heads =
        Bounded("shape.num_kv_heads", raw.num_kv_heads, 1, limits.max_heads, violations);
    if (raw.num_heads % raw.num_kv_heads != 0) {
      violations.Invalid(
          "shape.num_kv_heads",
          absl::StrCat("is ", raw.num_kv_heads, ", must divide shape.num_heads = ", raw.num_heads));
    }
  }
  shape.head_dim = HeadDim("shape.head_dim", raw.head_dim, limits, violations);
  shape.head_dim_v = raw.head_dim_v == 0
                         ? shape.head_dim
                         : HeadDim("shape.head_dim_v", raw.head_dim_v, limits, violations);
  CheckDocuments(raw, limits, shape, violations);
  return shape;
}

AttentionOptions CheckOptions(const RawRequest& raw, int64_t head_dim, Violations& violations) {
  AttentionOptions options;
  options.causal = raw.causal;
  options.softmax_scale =
      raw.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  // Kernels work in fp32: what overflows or vanishes there is out of range. The
  // comparisons are written so that NaN fails.
  if (!(std::abs(options.softmax_scale) <= FLT_MAX)) {
    violations.Invalid("options.softmax_scale", "must be finite in fp32");
  }
  if (raw.softcap.has_value()) {
    options.softcap = *raw.softcap;
    if (!(options.softcap >= FLT_MIN && options.softcap <= FLT_MAX)) {
      violations.Invalid("options.softcap", "must be finite and greater than 0 in fp32");
    }
  }
  if (raw.window.has_value()) {
    options.window_left = raw.window->left;
    options.window_right = raw.window->right;
    if (options.window_left < -1) {
      violations.Invalid("options.window.left",
                         absl::StrCat("is ", options.window_left, ", must be at least -1"));
    }
    if (options.window_right < -1) {
      violations.Invalid("options.window.right",
                         absl::StrCat("is ", options.window_right, ", must be at least -1"));
    }
  }
  return options;
}

PlanChoice CheckPlan(const RawRequest& raw, const Limits& limits, Violations& violations) {
  PlanChoice choice;
  choice.layout = raw.layout;
  choice.schedule = raw.schedule;
  if (raw.world_size.has_value()) {
    choice.world_size = static_cast<int>(
        Bounded("plan.world_size", *raw.world_size, 1, limits.max_world_size, violations));
    if (raw.schedule == ScheduleKind::kSingle && *raw.world_size > 1) {
      violations.Invalid("plan.world_size",
                         absl::StrCat("is ", *raw.world_size, ", but plan.schedule is single"));
    }
  }
  if (raw.stripe.has_value()) {
    choice.stripe = Bounded("plan.stripe", *raw.stripe, 1, limits.max_tokens, violations);
    if (raw.layout != Layout::kStriped) {
      violations.Invalid("plan.stripe", "is set, but plan.layout is not striped");
    }
  }
  return choice;
}

void CheckReply(const RawRequest& raw, const Limits& limits, Violations& violations) {
  if (raw.reply_max_chunk_bytes.has_value()) {
    Bounded("reply.max_chunk_bytes", *raw.reply_max_chunk_bytes, limits.min_chunk_bytes_down,
            limits.max_chunk_bytes_up, violations);
  }
  const double least = absl::ToDoubleSeconds(limits.min_progress_interval);
  if (raw.reply_progress_interval_seconds.has_value() &&
      !(*raw.reply_progress_interval_seconds >= least)) {
    violations.Invalid("reply.progress_interval", absl::StrCat("must be at least ", least, " s"));
  }
}

void CheckRequestId(const std::string& id, const Limits& limits, Violations& violations) {
  if (id.size() > static_cast<uint64_t>(limits.max_request_id_bytes)) {
    violations.Invalid("request_id", absl::StrCat("has ", id.size(), " bytes, at most ",
                                                  limits.max_request_id_bytes, " are allowed"));
  }
  if (!std::all_of(id.begin(), id.end(), [](char c) { return c >= 0x20 && c <= 0x7e; })) {
    violations.Invalid("request_id", "must be printable ASCII");
  }
}

// REQUIRES: every dimension is within its limit, so products fit (limits.h).
void CheckBytes(const AttentionSpec& spec, const std::vector<TensorId>& tensors,
                const Limits& limits, Violations& violations) {
  int64_t total = 0;
  for (TensorId id : tensors) {
    const int64_t bytes = LayoutOf(spec, id).bytes();
    total += std::min(bytes, limits.max_request_bytes);
    if (bytes > limits.max_tensor_bytes) {
      violations.OverLimit("shape", absl::StrCat(TensorName(id), " takes ", bytes,
                                                 " bytes, the limit is ", limits.max_tensor_bytes));
    }
  }
  if (total > limits.max_request_bytes) {
    violations.OverLimit("shape", absl::StrCat("inputs and outputs take more than ",
                                               limits.max_request_bytes, " bytes"));
  }
}

// REQUIRES: as CheckBytes.
void CheckInlineTensors(const RawRequest& raw, const AttentionSpec& spec,
                        const std::vector<TensorId>& inputs, const Limits& limits,
                        Violations& violations) {
  std::vector<TensorId> seen;
  for (size_t i = 0; i < raw.inline_tensors.size(); ++i) {
    const RawInlineTensor& tensor = raw.inline_tensors[i];
    const std::string field = absl::StrCat("inline_tensors[", i, "]");
    // An unset one was reported while decoding or is plainly missing.
    if (!tensor.tensor.has_value()) {
      violations.Invalid(field + ".tensor", "names no tensor");
      continue;
    }
    const TensorId id = *tensor.tensor;
    if (std::find(inputs.begin(), inputs.end(), id) == inputs.end()) {
      violations.Invalid(field + ".tensor",
                         absl::StrCat(TensorName(id), " is no input of this request"));
      continue;
    }
    if (std::find(seen.begin(), seen.end(), id) != seen.end()) {
      violations.Invalid(field + ".tensor", absl::StrCat(TensorName(id), " is given twice"));
      continue;
    }
    seen.push_back(id);
    const int64_t expected = LayoutOf(spec, id).bytes();
    if (tensor.bytes != static_cast<uint64_t>(expected)) {
      violations.Invalid(field + ".data", absl::StrCat("has ", tensor.bytes, " bytes, ",
                                                       TensorName(id), " takes ", expected));
    }
  }
}

void CheckInlineSize(const RawRequest& raw, const Limits& limits, Violations& violations) {
  const auto limit = static_cast<uint64_t>(limits.max_inline_bytes);
  uint64_t total = 0;
  for (const RawInlineTensor& tensor : raw.inline_tensors) {
    total += std::min(tensor.bytes, limit + 1);  // no overflow: far fewer than 2^32 entries
  }
  if (total > limit) {
    violations.OverLimit("inline_tensors",
                         absl::StrCat("have more than ", limit, " bytes together: send chunks"));
  }
}

}  // namespace

Violation UnsupportedField(std::string field) {
  return {std::move(field), "is not served by this version", StatusCode::kUnimplemented};
}

Violation UnknownField(std::string field) {
  return {std::move(field), "is not a known field", StatusCode::kInvalidArgument};
}

std::vector<TensorId> InputsOf(Direction direction, bool recompute_forward) {
  std::vector<TensorId> inputs = {TensorId::kQ, TensorId::kK, TensorId::kV};
  if (direction == Direction::kForward) return inputs;
  if (!recompute_forward) {
    inputs.push_back(TensorId::kOut);
    inputs.push_back(TensorId::kLse);
  }
  inputs.push_back(TensorId::kDout);
  return inputs;
}

std::vector<TensorId> OutputsOf(Direction direction) {
  if (direction == Direction::kForward) return {TensorId::kOut, TensorId::kLse};
  return {TensorId::kDq, TensorId::kDk, TensorId::kDv};
}

absl::Status Rejection::ToStatus() const {
  if (violations.empty()) return absl::Status(code, "invalid request");
  std::string message = absl::StrCat(violations[0].field, ": ", violations[0].description);
  const int64_t others = static_cast<int64_t>(violations.size()) - 1 + violations_left_out;
  if (others > 0) absl::StrAppend(&message, " (and ", others, " more)");
  return absl::Status(code, message);
}

std::variant<ValidRequest, Rejection> ValidateRequest(const RawRequest& raw, const Limits& limits) {
  Violations violations(limits.max_error_detail_bytes);
  for (const Violation& violation : raw.found_in_decoding) violations.Add(violation);

  ValidRequest request;
  request.direction = raw.direction;
  request.recompute_forward = raw.direction == Direction::kBackward && !raw.has_forward_result;
  request.inputs = InputsOf(request.direction, request.recompute_forward);
  request.outputs = OutputsOf(request.direction);

  CheckRequestId(raw.request_id, limits, violations);
  if (raw.dtype.has_value()) {
    request.spec.dtype = *raw.dtype;
  } else {
    violations.Invalid("dtype", "must be given");
  }
  request.spec.shape = CheckShape(raw, limits, violations);
  request.spec.options = CheckOptions(raw, request.spec.shape.head_dim, violations);
  request.choice = CheckPlan(raw, limits, violations);
  request.choice.recompute_forward = request.recompute_forward;
  CheckReply(raw, limits, violations);
  if (raw.direction == Direction::kForward && raw.has_forward_result) {
    violations.Invalid("has_forward_result", "belongs to backward");
  }
  CheckInlineSize(raw, limits, violations);
  // Sizes mean something only for a shape that is right.
  if (violations.empty()) {
    std::vector<TensorId> all = request.inputs;
    all.insert(all.end(), request.outputs.begin(), request.outputs.end());
    CheckBytes(request.spec, all, limits, violations);
    CheckInlineTensors(raw, request.spec, request.inputs, limits, violations);
  }
  if (!violations.empty()) return std::move(violations).ToRejection();
  return request;
}

}  // namespace ringattn
