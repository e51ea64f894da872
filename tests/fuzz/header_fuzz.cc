// For every first message of a client, reading stays inside its bytes and inside int64, and an
// accepted header keeps every invariant that the rest of the service relies on. The first byte
// chooses the direction.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <variant>

#include "common/base/limits.h"
#include "common/request/validation.h"
#include "common/schedule/schedule.h"
#include "ringattn/v1/attention.pb.h"
#include "server/edge/header/header_translation.h"

namespace {

using ringattn::Limits;
using ringattn::Rejection;
using ringattn::TensorId;
using ringattn::server::HeaderRequest;

void Require(bool condition) {
  if (!condition) std::abort();
}

void CheckRejection(const Rejection& rejection, const Limits& limits) {
  Require(!rejection.violations.empty());
  int64_t bytes = 0;
  for (const ringattn::Violation& violation : rejection.violations) {
    Require(!violation.field.empty() && !violation.description.empty());
    bytes += violation.field.size() + violation.description.size();
  }
  Require(rejection.violations.size() == 1 || bytes <= limits.max_error_detail_bytes);
  Require(!rejection.ToStatus().ok());
}

// What kernels, plans and the oracle take for granted of the options.
void CheckOptions(const ringattn::AttentionSpec& spec, const Limits& limits) {
  const ringattn::AttentionShape& shape = spec.shape;
  const ringattn::AttentionOptions& options = spec.options;
  const int64_t batch = shape.packed ? shape.num_documents() : shape.batch;
  Require(std::isfinite(options.softmax_scale) && std::isfinite(options.softcap));
  Require(options.softcap >= 0 && options.window_left >= -1 && options.window_right >= -1);
  const auto slopes = static_cast<int64_t>(options.alibi_slopes.size());
  Require(slopes == 0 || slopes == shape.num_heads || slopes == batch * shape.num_heads);
  for (const float slope : options.alibi_slopes) Require(std::isfinite(slope));
  const ringattn::DropoutForm& dropout = options.dropout;
  Require(dropout.threshold < 65536 && dropout.head_step == 1);
  if (dropout.threshold != 0) {
    constexpr int64_t kSpace = int64_t{1} << 32;
    Require(dropout.first_batch + batch <= kSpace);
    Require(dropout.first_head + shape.num_heads <= kSpace);
    Require(dropout.first_query + shape.seq_len_q <= kSpace);
    Require(dropout.first_key + shape.seq_len_kv <= kSpace);
  }
  for (const ringattn::DilationLevel& level : options.dilation_levels) {
    Require(shape.cu_seqlens_q == shape.cu_seqlens_k);
    Require(level.segment_length >= 1 && level.dilation_rate >= 1);
    Require(!level.offset || (*level.offset >= 0 && *level.offset < level.dilation_rate));
    Require(0 <= level.head_begin && level.head_begin < level.head_end &&
            level.head_end <= shape.num_heads);
  }
  if (options.compute_dtype != ringattn::ComputeDType::kAsInputs) {
    Require(spec.dtype != ringattn::DType::kFloat32 && !HasScoreTerms(options));
    Require(shape.head_dim <= 128 && shape.head_dim % 8 == 0);
  }
  Require(shape.document_rules.empty() ||
          static_cast<int64_t>(shape.document_rules.size()) == shape.num_documents());
  Require(shape.places.empty() && shape.pair_columns == 0);  // of no request
  Require(!spec.lse_per_document || shape.packed);
  Require(static_cast<int64_t>(spec.probability_rows.size()) <= limits.max_probability_rows);
}

void CheckAccepted(const HeaderRequest& request, const Limits& limits) {
  const ringattn::AttentionShape& shape = request.valid.spec.shape;
  Require(shape.batch >= 0 && shape.num_heads >= 1 && shape.num_kv_heads >= 1);
  Require(shape.num_heads % shape.num_kv_heads == 0);
  Require(shape.head_dim >= 1 && shape.head_dim <= limits.max_head_dim);
  Require(shape.head_dim_v >= 1 && shape.head_dim_v <= limits.max_head_dim);
  Require(shape.cu_seqlens_q.size() == shape.cu_seqlens_k.size());
  Require(shape.cu_seqlens_q.front() == 0 && shape.cu_seqlens_q.back() == shape.seq_len_q);
  Require(shape.cu_seqlens_k.front() == 0 && shape.cu_seqlens_k.back() == shape.seq_len_kv);
  const ringattn::AttentionSpec& spec = request.valid.spec;
  CheckOptions(spec, limits);
  const std::optional<ringattn::ScheduleKind> schedule = request.valid.choice.schedule;
  Require(!schedule.has_value() ||
          ringattn::PairAxisOf(*schedule, spec.options) == ringattn::Axis::kQ ||
          ringattn::UnshardableByKeys(spec) == nullptr);
  for (const ringattn::ProbabilityRow& row : spec.probability_rows) {
    const auto document = static_cast<size_t>(shape.packed ? row.batch : 0);
    Require(row.batch >= 0 && row.batch < (shape.packed ? shape.num_documents() : shape.batch));
    Require(row.position >= 0 &&
            row.position < shape.cu_seqlens_q[document + 1] - shape.cu_seqlens_q[document]);
  }
  Require(request.valid.choice.members.size() <= static_cast<size_t>(limits.max_world_size));
  int64_t total = 0;
  for (const auto* tensors : {&request.valid.inputs, &request.valid.outputs}) {
    for (TensorId id : *tensors) {
      const int64_t bytes = ringattn::BytesOf(request.valid.spec, id);
      Require(bytes >= 0 && bytes <= limits.max_tensor_bytes);
      total += bytes;
    }
  }
  Require(total <= limits.max_request_bytes);
  int64_t inline_bytes = 0;
  for (const ringattn::server::InlineData& data : *request.inline_tensors) {
    Require(static_cast<int64_t>(data.bytes.size()) ==
            ringattn::BytesOf(request.valid.spec, data.tensor));
    inline_bytes += data.bytes.size();
  }
  Require(inline_bytes <= limits.max_inline_bytes);
  Require(request.reply.max_chunk_bytes >= limits.min_chunk_bytes_down);
  Require(request.reply.max_chunk_bytes <= limits.max_chunk_bytes_up);
}

template <typename Message>
void ReadFirst(const std::string& bytes) {
  Message message;
  if (!message.ParseFromString(bytes)) return;
  const Limits limits;
  const auto read = ringattn::server::ReadHeader(message, limits);
  if (const auto* rejection = std::get_if<Rejection>(&read)) {
    CheckRejection(*rejection, limits);
  } else {
    CheckAccepted(std::get<HeaderRequest>(read), limits);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 0) {
    ReadFirst<ringattn::v1::ForwardRequest>(bytes);
  } else {
    ReadFirst<ringattn::v1::BackwardRequest>(bytes);
  }
  return 0;
}
