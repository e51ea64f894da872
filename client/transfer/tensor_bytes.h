// How many bytes each tensor of a request has, from the request alone.
#ifndef RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_
#define RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/tensors.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client {

// What the shape says, or the default where it says nothing.
inline uint64_t KvHeads(const v1::AttentionShape& shape) {
  return shape.num_kv_heads() != 0 ? shape.num_kv_heads() : shape.num_heads();
}
inline uint64_t HeadDimV(const v1::AttentionShape& shape) {
  return shape.head_dim_v() != 0 ? shape.head_dim_v() : shape.head_dim();
}

// The request's dtype and what ReplyOptions says of its tensors: what results are rounded to, the
// form of lse and dlse, whose probabilities are asked for.
struct TensorTypes {
  TensorTypes(v1::DataType dtype, v1::DataType output_dtype = v1::DATA_TYPE_UNSPECIFIED,
              v1::LseFormat lse_format = v1::LSE_FORMAT_UNSPECIFIED,
              std::vector<v1::ProbabilityRow> probability_rows = {})
      : dtype(dtype),
        output_dtype(output_dtype),
        lse_format(lse_format),
        probability_rows(std::move(probability_rows)) {}
  v1::DataType dtype;
  v1::DataType output_dtype;
  v1::LseFormat lse_format;
  std::vector<v1::ProbabilityRow> probability_rows;  // forward
};

// The problem as the table of tensors sees it (common/attention/tensors.h). Only what is
// needed to know the size of a buffer is checked; whether the request makes sense is the
// server's to say.
// Errors: INVALID_ARGUMENT for an unknown dtype or a size beyond 2^60.
absl::StatusOr<AttentionSpec> SpecForSizes(const v1::AttentionShape& shape,
                                           const TensorTypes& types);
// The same with the options, which say what tensors there are (InputsOf, OutputsOf).
//   has_dlse  backward: the gradient of lse is among them
absl::StatusOr<AttentionSpec> SpecForTensors(const v1::AttentionShape& shape,
                                             const TensorTypes& types,
                                             const v1::AttentionOptions& options, bool has_dlse);

// Of one tensor: the dimensions of proto/ringattn/v1/tensor.proto, without a batch axis
// when packed; bytes. Errors: as SpecForSizes, and for a tensor that does not exist.
//   options  say the forms of a bias and a mask
absl::StatusOr<std::vector<int64_t>> TensorDimensions(const v1::AttentionShape& shape,
                                                      const TensorTypes& types, v1::TensorId tensor,
                                                      const v1::AttentionOptions& options = {});
absl::StatusOr<uint64_t> TensorBytes(const v1::AttentionShape& shape, const TensorTypes& types,
                                     v1::TensorId tensor, const v1::AttentionOptions& options = {});

// "q", "lse", ...; "?" for a number that is no tensor.
const char* TensorIdName(v1::TensorId tensor);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_
