#include "client/transfer/tensor_bytes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/request/enum_values.h"
#include "common/request/option_fields.h"
#include "common/request/violations.h"
#include "common/wire/proto_values.h"
#include "common/wire/token_spans.h"

namespace ringattn::client {
namespace {

// Far above every limit, and the product of two of them does not overflow int64.
constexpr uint64_t kMaxDimension = uint64_t{1} << 60;

absl::StatusOr<TensorId> Known(v1::TensorId tensor) {
  const std::optional<TensorId> id = TensorFromNumber(tensor);
  if (id.has_value()) return *id;
  return absl::InvalidArgumentError(absl::StrCat("tensor: ", OtherThan<v1::TensorId>(tensor)));
}

}  // namespace

absl::StatusOr<WriterChoice> ReadWriter(const v1::Writer& writer) {
  WriterChoice read{static_cast<int>(writer.index()), static_cast<int>(writer.count()), {}};
  for (const auto& [spans, axis, shard] : {std::tuple(&writer.q(), "q", &read.rows.q),
                                           std::tuple(&writer.kv(), "kv", &read.rows.kv)}) {
    absl::StatusOr<Shard> tokens = FromProto(*spans);
    if (!tokens.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("writer.", axis, ": ", tokens.status().message()));
    }
    *shard = *std::move(tokens);
  }
  return read;
}

const char* TensorIdName(v1::TensorId tensor) {
  const std::optional<TensorId> id = TensorFromNumber(tensor);
  return id.has_value() ? TensorName(*id) : "?";
}

absl::StatusOr<AttentionSpec> SpecForSizes(const v1::AttentionShape& shape,
                                           const TensorTypes& types) {
  const std::optional<DType> type = FromProto(types.dtype);
  if (!type.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype: ", OtherThan(types.dtype, *v1::DataType_descriptor(), [](int number) {
                       return FromProto(static_cast<v1::DataType>(number)).has_value();
                     })));
  }
  for (uint64_t dimension : {shape.batch(), shape.seq_len_q(), shape.seq_len_kv()}) {
    if (dimension > kMaxDimension) {
      return absl::InvalidArgumentError("shape: the size of a tensor overflows");
    }
  }
  AttentionSpec spec;
  spec.dtype = *type;
  spec.fp32_results = *type != DType::kFloat32 && types.output_dtype == v1::DATA_TYPE_FLOAT32;
  spec.shape.packed = shape.has_packed();
  spec.shape.batch = static_cast<int64_t>(shape.batch());
  spec.shape.seq_len_q = static_cast<int64_t>(shape.seq_len_q());
  spec.shape.seq_len_kv = static_cast<int64_t>(shape.seq_len_kv());
  spec.shape.num_heads = shape.num_heads();
  spec.shape.num_kv_heads = static_cast<int64_t>(KvHeads(shape));
  spec.shape.head_dim = shape.head_dim();
  spec.shape.head_dim_v = static_cast<int64_t>(HeadDimV(shape));
  const auto& cu_q = shape.packed().cu_seqlens_q();
  const auto& cu_k = shape.packed().cu_seqlens_k();
  spec.shape.cu_seqlens_q.assign(cu_q.begin(), cu_q.end());
  spec.shape.cu_seqlens_k.assign(cu_k.begin(), cu_k.end());
  for (const auto& [name, list] : {std::make_pair("cu_seqlens_q", &spec.shape.cu_seqlens_q),
                                   std::make_pair("cu_seqlens_k", &spec.shape.cu_seqlens_k)}) {
    const auto end = std::is_sorted_until(list->begin(), list->end());
    if (end == list->end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("shape.packed.", name, "[", end - list->begin(), "]: is ", *end,
                     ", must be at least the offset before it, ", *(end - 1)));
  }
  // The server rejects any other number.
  spec.shape.packing = FromProto(shape.packing()).value_or(Packing::kNone);
  spec.lse_per_document = types.lse_format == v1::LSE_FORMAT_PER_DOCUMENT;
  if (spec.lse_per_document && spec.shape.cu_seqlens_q.empty()) {
    return absl::InvalidArgumentError(
        "reply.lse_format is per document, which requires shape.packed");
  }
  const uint64_t documents = cu_k.empty() ? 0 : cu_k.size() - 1;
  for (const v1::ProbabilityRow& row : types.probability_rows) {
    if (spec.shape.packed && row.batch() >= documents) {
      return absl::InvalidArgumentError(
          absl::StrCat("probability_rows: batch is ", row.batch(),
                       ", must be less than the number of documents, ", documents));
    }
    spec.probability_rows.push_back(
        {static_cast<int64_t>(row.batch()), static_cast<int64_t>(row.position())});
  }
  return spec;
}

absl::StatusOr<AttentionSpec> SpecForTensors(const v1::AttentionShape& shape,
                                             const TensorTypes& types,
                                             const v1::AttentionOptions& options, bool has_dlse) {
  absl::StatusOr<AttentionSpec> spec = SpecForSizes(shape, types);
  if (!spec.ok()) return spec;
  Violations wrong(/*max_bytes=*/0);  // the server reports the details
  spec->options = ReadOptions(options, spec->shape, wrong);
  spec->has_dlse = has_dlse;
  return spec;
}

absl::StatusOr<std::vector<int64_t>> TensorDimensions(const v1::AttentionShape& shape,
                                                      const TensorTypes& types, v1::TensorId tensor,
                                                      const v1::AttentionOptions& options) {
  const absl::StatusOr<TensorId> id = Known(tensor);
  if (!id.ok()) return id.status();
  const absl::StatusOr<AttentionSpec> spec = SpecForTensors(shape, types, options, false);
  if (!spec.ok()) return spec.status();
  return DimensionsOf(*spec, *id);
}

absl::StatusOr<uint64_t> TensorBytes(const v1::AttentionShape& shape, const TensorTypes& types,
                                     v1::TensorId tensor, const v1::AttentionOptions& options) {
  const absl::StatusOr<TensorId> id = Known(tensor);
  if (!id.ok()) return id.status();
  const absl::StatusOr<AttentionSpec> spec = SpecForTensors(shape, types, options, false);
  if (!spec.ok()) return spec.status();
  const int64_t bytes = BytesOf(*spec, *id);
  if (bytes >= kSaturatedBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("shape: the size of ", TensorName(*id), " overflows"));
  }
  return static_cast<uint64_t>(bytes);
}

}  // namespace ringattn::client
