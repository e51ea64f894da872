// SmallForward: a forward of 16 tokens whose tensors lie in memory of the test, one after another.
#ifndef RINGATTN_CLIENT_TESTING_SMALL_FORWARD_H_
#define RINGATTN_CLIENT_TESTING_SMALL_FORWARD_H_

#include <cstdint>

#include "client/api/call.h"

namespace ringattn::client {

struct SmallForward {
  ForwardArgs args;
  ForwardResults results;

  // `memory`: 16 KiB, for instance of a region.
  void PlaceIn(uint8_t* memory) {
    args.shape.set_batch(1);
    args.shape.set_seq_len_q(16);
    args.shape.set_seq_len_kv(16);
    args.shape.set_num_heads(1);
    args.shape.set_num_kv_heads(1);
    args.shape.set_head_dim(8);
    args.dtype = v1::DATA_TYPE_FLOAT32;
    const auto place = [&](v1::TensorId id) {
      const auto bytes = *TensorBytes(args.shape, args.dtype, id);
      memory += bytes;
      return MutableBytes(memory - bytes, bytes);
    };
    args.q = place(v1::TENSOR_ID_Q);
    args.k = place(v1::TENSOR_ID_K);
    args.v = place(v1::TENSOR_ID_V);
    results.out = place(v1::TENSOR_ID_OUT);
    results.lse = place(v1::TENSOR_ID_LSE);
  }
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TESTING_SMALL_FORWARD_H_
