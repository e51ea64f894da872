#include "client/part_args.h"

#include <cstring>
#include <memory>

#include "client/tensor_bytes.h"

namespace ringattn {
namespace {

// Where a part's rows lie in the tensors of a call.
class Slicer {
 public:
  Slicer(const v1::AttentionShape& shape, v1::DataType dtype, const CallPart& part)
      : shape_(shape), dtype_(dtype), part_(part) {}

  // REQUIRES: the tensor is not lse, or all queries are in the part.
  template <typename Byte>
  absl::Span<Byte> Of(v1::TensorId tensor, absl::Span<Byte> bytes) const {
    const RowSpan& rows = IsOfKeys(tensor) ? part_.kv : part_.q;
    const uint64_t all_rows = IsOfKeys(tensor) ? shape_.seq_len_kv() : shape_.seq_len_q();
    const uint64_t row_bytes = RowBytes(tensor);
    return bytes.subspan((part_.batch.begin * all_rows + rows.begin) * row_bytes,
                         part_.batch.size() * rows.size() * row_bytes);
  }

 private:
  static bool IsOfKeys(v1::TensorId tensor) {
    return tensor == v1::TENSOR_ID_K || tensor == v1::TENSOR_ID_V ||
           tensor == v1::TENSOR_ID_DK || tensor == v1::TENSOR_ID_DV;
  }

  uint64_t RowBytes(v1::TensorId tensor) const {
    v1::AttentionShape row = shape_;
    row.set_batch(1);
    row.set_seq_len_q(1);
    row.set_seq_len_kv(1);
    return *TensorBytes(row, dtype_, tensor);  // no larger than the call's, which was computed
  }

  const v1::AttentionShape& shape_;
  const v1::DataType dtype_;
  const CallPart& part_;
};

bool HasAllQueries(const v1::AttentionShape& shape, const CallPart& part) {
  return part.q == RowSpan{0, shape.seq_len_q()};
}

// The part's lse [heads, rows] into the call's [heads, all rows].
void Scatter(const float* lse, uint64_t heads, const RowSpan& rows, uint64_t all_rows,
             uint8_t* call_lse) {
  for (uint64_t head = 0; head < heads; ++head) {
    std::memcpy(call_lse + (head * all_rows + rows.begin) * sizeof(float),
                lse + head * rows.size(), rows.size() * sizeof(float));
  }
}

}  // namespace

ForwardArgs PartOf(const ForwardArgs& call, const CallPart& part) {
  const Slicer slicer(call.shape, call.dtype, part);
  return {.shape = part.shape,
          .dtype = call.dtype,
          .options = part.options,
          .plan = call.plan,
          .q = slicer.Of(v1::TENSOR_ID_Q, call.q),
          .k = slicer.Of(v1::TENSOR_ID_K, call.k),
          .v = slicer.Of(v1::TENSOR_ID_V, call.v)};
}

BackwardArgs PartOf(const BackwardArgs& call, const CallPart& part) {
  const Slicer slicer(call.shape, call.dtype, part);
  BackwardArgs args{.shape = part.shape,
                    .dtype = call.dtype,
                    .options = part.options,
                    .plan = call.plan,
                    .q = slicer.Of(v1::TENSOR_ID_Q, call.q),
                    .k = slicer.Of(v1::TENSOR_ID_K, call.k),
                    .v = slicer.Of(v1::TENSOR_ID_V, call.v),
                    .dout = slicer.Of(v1::TENSOR_ID_DOUT, call.dout),
                    .has_forward_result = call.has_forward_result};
  if (call.has_forward_result) {
    args.out = slicer.Of(v1::TENSOR_ID_OUT, call.out);
    args.lse = slicer.Of(v1::TENSOR_ID_LSE, call.lse);
  }
  return args;
}

ForwardPartResults PartOf(const ForwardArgs& call, const ForwardResults& results,
                          const CallPart& part) {
  const Slicer slicer(call.shape, call.dtype, part);
  ForwardPartResults made;
  made.results.out = slicer.Of(v1::TENSOR_ID_OUT, results.out);
  if (HasAllQueries(call.shape, part)) {
    made.results.lse = slicer.Of(v1::TENSOR_ID_LSE, results.lse);
    return made;
  }
  const uint64_t heads = call.shape.num_heads();
  const uint64_t count = heads * part.q.size();
  // Not zeroed: every byte of it arrives before it is read.
  std::shared_ptr<float[]> lse(new float[count]);
  made.results.lse = {reinterpret_cast<uint8_t*>(lse.get()), count * sizeof(float)};
  made.collect = [lse = std::move(lse), heads, rows = part.q, all_rows = call.shape.seq_len_q(),
                  call_lse = results.lse.data()] {
    Scatter(lse.get(), heads, rows, all_rows, call_lse);
  };
  return made;
}

BackwardResults PartOf(const BackwardArgs& call, const BackwardResults& results,
                       const CallPart& part) {
  const Slicer slicer(call.shape, call.dtype, part);
  return {.dq = slicer.Of(v1::TENSOR_ID_DQ, results.dq),
          .dk = slicer.Of(v1::TENSOR_ID_DK, results.dk),
          .dv = slicer.Of(v1::TENSOR_ID_DV, results.dv)};
}

}  // namespace ringattn
