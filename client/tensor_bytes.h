// How many bytes each tensor of a request has, from the request alone.
#ifndef RINGATTN_CLIENT_TENSOR_BYTES_H_
#define RINGATTN_CLIENT_TENSOR_BYTES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
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

// The dimensions of proto/ringattn/v1/tensor.proto, without a batch axis when packed.
std::vector<uint64_t> TensorDimensions(const v1::AttentionShape& shape, v1::TensorId tensor);

// Only what is needed to know the size of a buffer is checked here; whether the
// request makes sense is the server's to say.
// Errors: INVALID_ARGUMENT for an unknown dtype or a product that overflows.
absl::StatusOr<uint64_t> TensorBytes(const v1::AttentionShape& shape, v1::DataType dtype,
                                     v1::TensorId tensor);

// "q", "lse", ...
const char* TensorIdName(v1::TensorId tensor);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TENSOR_BYTES_H_
