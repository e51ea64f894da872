// Sizes of a request's tensors, computed from the request alone.
#ifndef RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_
#define RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/tensors.h"
#include "common/layout/writer_rows.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client {

// The shape's value, or the default if it is 0.
inline uint64_t KvHeads(const v1::AttentionShape& shape) {
  return shape.num_kv_heads() != 0 ? shape.num_kv_heads() : shape.num_heads();
}
inline uint64_t HeadDimV(const v1::AttentionShape& shape) {
  return shape.head_dim_v() != 0 ? shape.head_dim_v() : shape.head_dim();
}

// The request's dtype, and what ReplyOptions determines about its tensors: output type, format of
// lse and dlse, and the rows whose probabilities are returned.
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

// Returns the problem in the form of the tensor table (common/attention/tensors.h). Checks only
// what the sizes depend on; the server validates the request. Errors: INVALID_ARGUMENT for an
// unknown dtype or a size above 2^60.
absl::StatusOr<AttentionSpec> SpecForSizes(const v1::AttentionShape& shape,
                                           const TensorTypes& types);
// The same with the options, which determine which tensors exist (InputsOf, OutputsOf).
//   has_dlse  backward: the gradient of lse is an input
absl::StatusOr<AttentionSpec> SpecForTensors(const v1::AttentionShape& shape,
                                             const TensorTypes& types,
                                             const v1::AttentionOptions& options, bool has_dlse);

// Dimensions of a tensor as in proto/ringattn/v1/tensor.proto, without a batch axis when packed,
// and its bytes.
//   options  determine the shapes of bias and mask
// Errors: as SpecForSizes, and INVALID_ARGUMENT for a tensor that the request does not have.
absl::StatusOr<std::vector<int64_t>> TensorDimensions(const v1::AttentionShape& shape,
                                                      const TensorTypes& types, v1::TensorId tensor,
                                                      const v1::AttentionOptions& options = {});
absl::StatusOr<uint64_t> TensorBytes(const v1::AttentionShape& shape, const TensorTypes& types,
                                     v1::TensorId tensor, const v1::AttentionOptions& options = {});

// Errors: INVALID_ARGUMENT for a span out of range.
absl::StatusOr<WriterChoice> ReadWriter(const v1::Writer& writer);

// Returns "q", "lse", ...; "?" for a number that is not a tensor id.
const char* TensorIdName(v1::TensorId tensor);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_TENSOR_BYTES_H_
