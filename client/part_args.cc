#include "client/part_args.h"

#include <cstring>
#include <memory>

#include "client/transfer/tensor_bytes.h"

namespace ringattn::client {
namespace {

// Where a part's rows lie in the tensors of a call.
class Slicer {
 public:
  Slicer(const v1::AttentionShape& shape, const TensorTypes& types, const CallPart& part)
      : shape_(shape), types_(types), part_(part) {}

  // REQUIRES: the tensor is not lse.
  template <typename Byte>
  ByteRuns<Byte> Of(v1::TensorId tensor, absl::Span<Byte> bytes) const {
    if (IsWhole()) return bytes;
    const bool of_keys = IsOfKeys(tensor);
    const RowSpan& rows = of_keys ? part_.kv : part_.q;
    const RowSpan& heads = of_keys ? part_.kv_heads : part_.heads;
    const uint64_t all_rows = of_keys ? shape_.seq_len_kv() : shape_.seq_len_q();
    const uint64_t head_bytes = HeadBytes(tensor);
    const uint64_t row_bytes = head_bytes * (of_keys ? KvHeads(shape_) : shape_.num_heads());
    // Nothing may be where nothing is asked for.
    const uint64_t runs = part_.batch.size() * rows.size();
    if (runs * heads.size() * head_bytes == 0) return {};
    return {bytes.data() + (part_.batch.begin * all_rows + rows.begin) * row_bytes +
                heads.begin * head_bytes,
            runs, heads.size() * head_bytes, row_bytes};
  }

  // REQUIRES: all queries are in the part, and all heads or a batch of one.
  template <typename Byte>
  ByteRuns<Byte> OfLse(absl::Span<Byte> bytes) const {
    if (IsWhole()) return bytes;
    const uint64_t head_bytes = shape_.seq_len_q() * sizeof(float);
    return bytes.subspan((part_.batch.begin * shape_.num_heads() + part_.heads.begin) * head_bytes,
                         part_.batch.size() * part_.heads.size() * head_bytes);
  }

 private:
  // Nothing is cut: tensors are what they are, packed ones and those left out among them.
  bool IsWhole() const {
    return part_.batch == RowSpan{0, shape_.batch()} && part_.q == RowSpan{0, shape_.seq_len_q()} &&
           part_.kv == RowSpan{0, shape_.seq_len_kv()} &&
           part_.heads == RowSpan{0, shape_.num_heads()};
  }

  static bool IsOfKeys(v1::TensorId tensor) {
    return InfoOf(static_cast<TensorId>(tensor)).axis == Axis::kKv;
  }

  // Of one row.
  uint64_t HeadBytes(v1::TensorId tensor) const {
    v1::AttentionShape head = shape_;
    head.set_batch(1);
    head.set_seq_len_q(1);
    head.set_seq_len_kv(1);
    head.set_num_heads(1);
    head.set_num_kv_heads(1);
    return *TensorBytes(head, types_, tensor);  // no larger than the call's, which was computed
  }

  const v1::AttentionShape& shape_;
  const TensorTypes types_;
  const CallPart& part_;
};

// Those of a call that is one part.
template <typename To, typename From>
TensorMap<To> Whole(const TensorMap<From>& tensors) {
  TensorMap<To> whole;
  for (const auto& [tensor, bytes] : tensors) whole.emplace(tensor, To(bytes));
  return whole;
}

bool HasAllQueries(const v1::AttentionShape& shape, const CallPart& part) {
  return part.q == RowSpan{0, shape.seq_len_q()};
}

// A part's lse [heads, rows], in the call's [heads, all rows].
class PartLse {
 public:
  PartLse(const v1::AttentionShape& shape, const CallPart& part)
      : heads_(shape.num_heads()),
        all_rows_(shape.seq_len_q()),
        rows_(part.q),
        values_(new float[heads_ * rows_.size()]) {}  // not zeroed: written before it is read

  const std::shared_ptr<float[]>& values() const { return values_; }
  MutableBytes bytes() const {
    return {reinterpret_cast<uint8_t*>(values_.get()), heads_ * RowsBytes()};
  }

  void Gather(const uint8_t* call_lse) const {
    for (uint64_t head = 0; head < heads_; ++head) {
      std::memcpy(Of(head), call_lse + OffsetOf(head), RowsBytes());
    }
  }
  void Scatter(uint8_t* call_lse) const {
    for (uint64_t head = 0; head < heads_; ++head) {
      std::memcpy(call_lse + OffsetOf(head), Of(head), RowsBytes());
    }
  }

 private:
  float* Of(uint64_t head) const { return values_.get() + head * rows_.size(); }
  uint64_t OffsetOf(uint64_t head) const {
    return (head * all_rows_ + rows_.begin) * sizeof(float);
  }
  uint64_t RowsBytes() const { return rows_.size() * sizeof(float); }

  uint64_t heads_;
  uint64_t all_rows_;
  RowSpan rows_;
  std::shared_ptr<float[]> values_;
};

}  // namespace

BasicForwardArgs<ConstRuns> PartOf(const ForwardArgs& call, const CallPart& part) {
  const Slicer slicer(call.shape, {call.dtype, call.output_dtype}, part);
  return {.shape = part.shape,
          .dtype = call.dtype,
          .output_dtype = call.output_dtype,
          .lse_format = call.lse_format,
          .options = part.options,
          .plan = call.plan,
          .probability_rows = call.probability_rows,
          .q = slicer.Of(v1::TENSOR_ID_Q, call.q),
          .k = slicer.Of(v1::TENSOR_ID_K, call.k),
          .v = slicer.Of(v1::TENSOR_ID_V, call.v),
          .more = Whole<ConstRuns>(call.more)};
}

BackwardPartArgs PartOf(const BackwardArgs& call, const CallPart& part) {
  const Slicer slicer(call.shape, {call.dtype, call.output_dtype}, part);
  BackwardPartArgs made;
  BasicBackwardArgs<ConstRuns>& args = made.args;
  args = {.shape = part.shape,
          .dtype = call.dtype,
          .output_dtype = call.output_dtype,
          .lse_format = call.lse_format,
          .options = part.options,
          .plan = call.plan,
          .q = slicer.Of(v1::TENSOR_ID_Q, call.q),
          .k = slicer.Of(v1::TENSOR_ID_K, call.k),
          .v = slicer.Of(v1::TENSOR_ID_V, call.v),
          .dout = slicer.Of(v1::TENSOR_ID_DOUT, call.dout),
          .has_forward_result = call.has_forward_result,
          .more = Whole<ConstRuns>(call.more)};
  if (!call.has_forward_result) return made;
  args.out = slicer.Of(v1::TENSOR_ID_OUT, call.out);
  if (HasAllQueries(call.shape, part)) {
    args.lse = slicer.OfLse(call.lse);
    return made;
  }
  const PartLse lse(call.shape, part);
  lse.Gather(call.lse.data());
  args.lse = ConstBytes(lse.bytes());
  made.lse = lse.values();
  return made;
}

ForwardPartResults PartOf(const ForwardArgs& call, const ForwardResults& results,
                          const CallPart& part) {
  const Slicer slicer(call.shape, {call.dtype, call.output_dtype}, part);
  ForwardPartResults made;
  made.results.out = slicer.Of(v1::TENSOR_ID_OUT, results.out);
  made.results.more = Whole<MutableRuns>(results.more);
  if (HasAllQueries(call.shape, part)) {
    made.results.lse = slicer.OfLse(results.lse);
    return made;
  }
  const PartLse lse(call.shape, part);
  made.results.lse = lse.bytes();
  made.collect = [lse, call_lse = results.lse.data()] { lse.Scatter(call_lse); };
  return made;
}

BasicBackwardResults<MutableRuns> PartOf(const BackwardArgs& call, const BackwardResults& results,
                                         const CallPart& part) {
  const Slicer slicer(call.shape, {call.dtype, call.output_dtype}, part);
  return {.dq = slicer.Of(v1::TENSOR_ID_DQ, results.dq),
          .dk = slicer.Of(v1::TENSOR_ID_DK, results.dk),
          .dv = slicer.Of(v1::TENSOR_ID_DV, results.dv),
          .more = Whole<MutableRuns>(results.more)};
}

}  // namespace ringattn::client
