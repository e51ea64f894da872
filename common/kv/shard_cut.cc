#include "common/kv/shard_cut.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/attention/dtype.h"
#include "common/attention/merge.h"
#include "common/kv/kv_error.h"

namespace ringattn {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

bool HasOut(v1::KvOutput output) { return output != v1::KV_OUTPUT_NONE; }
bool HasLse(v1::KvOutput output) {
  return output == v1::KV_OUTPUT_OUT_AND_LSE || output == v1::KV_OUTPUT_PARTIAL;
}

KvCallBytes BytesOf(const KvCacheSpec& spec, const KvLayerGroup& group, int64_t heads,
                    int64_t kv_heads, int64_t q_tokens, int64_t append_tokens,
                    v1::KvOutput output) {
  const int64_t element = ElementBytes(spec.dtype);
  const int64_t out_element =
      output == v1::KV_OUTPUT_PARTIAL ? static_cast<int64_t>(sizeof(float)) : element;
  KvCallBytes bytes;
  bytes.q = q_tokens * heads * group.head_dim * element;
  bytes.k = append_tokens * kv_heads * group.head_dim * element;
  bytes.v = append_tokens * kv_heads * group.head_dim_v * element;
  if (HasOut(output)) bytes.out = q_tokens * heads * group.head_dim_v * out_element;
  if (HasLse(output)) bytes.lse = q_tokens * heads * static_cast<int64_t>(sizeof(float));
  return bytes;
}

v1::KvOutput OutputOfRank(const KvPlacement& placement, v1::KvOutput output) {
  return placement.position_parts > 1 && HasOut(output) ? v1::KV_OUTPUT_PARTIAL : output;
}

// Sets `target` to columns [begin, end) of each of `rows` rows of `width` bytes.
void TakeColumns(absl::string_view source, int64_t rows, int64_t width, int64_t begin, int64_t end,
                 std::string* target) {
  if (begin == 0 && end == width) {
    target->assign(source.data(), source.size());
    return;
  }
  target->clear();
  target->reserve(static_cast<size_t>(rows * (end - begin)));
  for (int64_t r = 0; r < rows; ++r) {
    target->append(source.data() + r * width + begin, end - begin);
  }
}

// Sets `target` to the rows of k or v that a rank holds, and of them its heads.
//   source  [append_tokens, kv heads, dim], row_bytes per entry, of which [begin, end) are taken
void TakeEntriesOfRank(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
                       absl::string_view source, int64_t row_bytes, int64_t begin, int64_t end,
                       int rank, std::string* target) {
  if (placement.position_parts == 1) {
    return TakeColumns(source, step.append_tokens(), row_bytes, begin, end, target);
  }
  const int64_t part = placement.position_part(rank);
  target->clear();
  int64_t at = 0;
  for (const StepRow& row : step.rows) {
    for (int64_t entry = row.keep_length; entry < row.end(); ++at, ++entry) {
      if (entry / spec.block_tokens % placement.position_parts != part) continue;
      target->append(source.data() + at * row_bytes + begin, end - begin);
    }
  }
}

int64_t SizeOf(absl::string_view bytes) { return static_cast<int64_t>(bytes.size()); }

absl::Status WrongSize(absl::string_view tensor, int64_t size, int64_t expected) {
  return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL",
                 absl::StrCat("call.", tensor, " has ", size, " bytes; the step needs ", expected));
}

// Four floats at a time, also where the compiler does not vectorise loops.
typedef float Floats __attribute__((vector_size(16)));
constexpr int64_t kFloats = sizeof(Floats) / sizeof(float);

// Merges a row of a partial result, `dim` floats at `out` in any alignment and its lse, into the
// accumulator.
void MergeRow(const char* out, float lse, int64_t dim, float* acc, float* acc_lse) {
  const MergeWeights weights = MergeLse(*acc_lse, lse);
  int64_t d = 0;
  for (; d + kFloats <= dim; d += kFloats) {
    Floats merged, added;
    std::memcpy(&merged, acc + d, sizeof(merged));
    std::memcpy(&added, out + d * sizeof(float), sizeof(added));
    merged = weights.first * merged + weights.second * added;
    std::memcpy(acc + d, &merged, sizeof(merged));
  }
  for (; d < dim; ++d) {
    float added;
    std::memcpy(&added, out + d * sizeof(float), sizeof(added));
    acc[d] = weights.first * acc[d] + weights.second * added;
  }
  *acc_lse = weights.lse;
}

// The results of all ranks of one call, joined.
class Joiner {
 public:
  Joiner(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
         const v1::LayerCall& call, const KvLayerLocation& location,
         const std::vector<v1::LayerResult>& results)
      : spec_(spec),
        placement_(placement),
        call_(call),
        location_(location),
        group_(spec.groups[location.group]),
        results_(results),
        q_tokens_(step.q_tokens()) {}

  v1::LayerResult Join() {
    const KvCallBytes bytes =
        BytesOf(spec_, group_, group_.num_heads, group_.num_kv_heads, q_tokens_, 0, call_.output());
    joined_.set_step(call_.step());
    joined_.set_layer(call_.layer());
    joined_.mutable_out()->resize(bytes.out);
    joined_.mutable_lse()->resize(bytes.lse);
    for (int part = 0; part < placement_.head_parts; ++part) {
      if (placement_.position_parts == 1) {
        CopyPart(part);
      } else if (HasOut(call_.output())) {
        MergePart(part);
      }
    }
    SetDeviceTime();
    return std::move(joined_);
  }

 private:
  // [q, heads of the part, dim] into [q, heads, dim].
  void CopyPart(int rank) {
    const KvHeadRange heads = KvHeadsOf(group_, placement_, rank);
    const int64_t own = heads.end - heads.begin;
    if (q_tokens_ == 0) return;
    const v1::LayerResult& result = results_[rank];
    const int64_t head_bytes = SizeOf(result.out()) / (q_tokens_ * own);
    for (int64_t i = 0; i < q_tokens_; ++i) {
      std::memcpy(joined_.mutable_out()->data() + (i * group_.num_heads + heads.begin) * head_bytes,
                  result.out().data() + i * own * head_bytes, own * head_bytes);
    }
    std::memcpy(joined_.mutable_lse()->data() + heads.begin * LseRow(), result.lse().data(),
                result.lse().size());
  }

  void MergePart(int head_part) {
    const int first_rank = head_part * placement_.position_parts;
    const KvHeadRange heads = KvHeadsOf(group_, placement_, first_rank);
    const int64_t own = heads.end - heads.begin;
    const int64_t dim = group_.head_dim_v;
    std::vector<float> acc(dim);
    for (int64_t i = 0; i < q_tokens_; ++i) {
      for (int64_t h = 0; h < own; ++h) {
        float lse = kNegativeInfinity;
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (int p = 0; p < placement_.position_parts; ++p) {
          const v1::LayerResult& result = results_[first_rank + p];
          float part_lse;
          std::memcpy(&part_lse, result.lse().data() + (h * q_tokens_ + i) * sizeof(float),
                      sizeof(float));
          MergeRow(result.out().data() + (i * own + h) * dim * sizeof(float), part_lse, dim,
                   acc.data(), &lse);
        }
        Store(i, heads.begin + h, acc, lse);
      }
    }
  }

  void Store(int64_t query, int64_t head, std::vector<float>& out, float lse) {
    const bool partial = call_.output() == v1::KV_OUTPUT_PARTIAL;
    if (!partial && !group_.sinks.empty()) {
      const float sink = group_.sinks[location_.plane * group_.num_heads + head];
      const MergeWeights weights = MergeLse(lse, sink);
      if (sink != kNegativeInfinity) {
        for (float& value : out) value *= weights.first;
        lse = weights.lse;
      }
    }
    const DType dtype = partial ? DType::kFloat32 : spec_.dtype;
    const int64_t dim = static_cast<int64_t>(out.size());
    ConvertFromFloat(dtype, out.data(),
                     joined_.mutable_out()->data() +
                         (query * group_.num_heads + head) * dim * ElementBytes(dtype),
                     dim);
    if (joined_.lse().empty()) return;
    std::memcpy(joined_.mutable_lse()->data() + head * LseRow() + query * sizeof(float), &lse,
                sizeof(float));
  }

  void SetDeviceTime() {
    const google::protobuf::Duration* longest = nullptr;
    for (const v1::LayerResult& result : results_) {
      if (!result.has_device_time()) continue;
      const google::protobuf::Duration& time = result.device_time();
      if (longest == nullptr || time.seconds() > longest->seconds() ||
          (time.seconds() == longest->seconds() && time.nanos() > longest->nanos())) {
        longest = &time;
      }
    }
    if (longest != nullptr) *joined_.mutable_device_time() = *longest;
  }

  // Bytes of one head's lse.
  int64_t LseRow() const { return q_tokens_ * static_cast<int64_t>(sizeof(float)); }

  const KvCacheSpec& spec_;
  const KvPlacement& placement_;
  const v1::LayerCall& call_;
  const KvLayerLocation location_;
  const KvLayerGroup& group_;
  const std::vector<v1::LayerResult>& results_;
  const int64_t q_tokens_;
  v1::LayerResult joined_;
};

}  // namespace

KvCallBytes CallBytes(const KvCacheSpec& spec, const KvStep& step, int group, v1::KvOutput output) {
  const KvLayerGroup& of = spec.groups[group];
  return BytesOf(spec, of, of.num_heads, of.num_kv_heads, step.q_tokens(), step.append_tokens(),
                 output);
}

int64_t AppendTokensOfRank(const KvCacheSpec& spec, const KvPlacement& placement,
                           const KvStep& step, int rank) {
  int64_t sum = 0;
  for (const StepRow& row : step.rows) {
    sum += EntriesOnPart(row.keep_length, row.end(), spec.block_tokens, placement.position_parts,
                         placement.position_part(rank));
  }
  return sum;
}

KvCallBytes CallBytesOfRank(const KvCacheSpec& spec, const KvPlacement& placement,
                            const KvStep& step, int group, v1::KvOutput output, int rank) {
  const KvLayerGroup& of = spec.groups[group];
  const KvHeadRange heads = KvHeadsOf(of, placement, rank);
  return BytesOf(spec, of, heads.end - heads.begin, heads.kv_end - heads.kv_begin, step.q_tokens(),
                 AppendTokensOfRank(spec, placement, step, rank), output);
}

KvCallTensors TensorsOf(const v1::LayerCall& call) { return {call.q(), call.k(), call.v()}; }

absl::Status CheckCallBytes(const KvCallTensors& tensors, const KvCallBytes& expected) {
  if (SizeOf(tensors.q) != expected.q) {
    return WrongSize("q", SizeOf(tensors.q), expected.q);
  }
  if (tensors.k.empty() && tensors.v.empty()) return absl::OkStatus();  // reads only
  if (SizeOf(tensors.k) != expected.k) {
    return WrongSize("k", SizeOf(tensors.k), expected.k);
  }
  if (SizeOf(tensors.v) != expected.v) {
    return WrongSize("v", SizeOf(tensors.v), expected.v);
  }
  return absl::OkStatus();
}

absl::Status CheckCallBytes(const v1::LayerCall& call, const KvCallBytes& expected) {
  return CheckCallBytes(TensorsOf(call), expected);
}

void CutCall(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
             const v1::LayerCall& call, const KvCallTensors& tensors, int rank,
             v1::LayerCall* cut) {
  const std::optional<KvLayerLocation> location = FindLayer(spec, call.layer());
  cut->set_step(call.step());
  cut->set_layer(call.layer());
  cut->set_output(OutputOfRank(placement, call.output()));
  cut->mutable_k()->clear();
  cut->mutable_v()->clear();
  if (!location.has_value()) {  // the rank rejects it
    cut->mutable_q()->clear();
    return;
  }
  const KvLayerGroup& group = spec.groups[location->group];
  const KvHeadRange heads = KvHeadsOf(group, placement, rank);
  const int64_t element = ElementBytes(spec.dtype);
  const int64_t q_head = group.head_dim * element;
  TakeColumns(tensors.q, step.q_tokens(), group.num_heads * q_head, heads.begin * q_head,
              heads.end * q_head, cut->mutable_q());
  if (tensors.k.empty() && tensors.v.empty()) return;
  const int64_t v_head = group.head_dim_v * element;
  TakeEntriesOfRank(spec, placement, step, tensors.k, group.num_kv_heads * q_head,
                    heads.kv_begin * q_head, heads.kv_end * q_head, rank, cut->mutable_k());
  TakeEntriesOfRank(spec, placement, step, tensors.v, group.num_kv_heads * v_head,
                    heads.kv_begin * v_head, heads.kv_end * v_head, rank, cut->mutable_v());
}

v1::LayerCall CutCall(const KvCacheSpec& spec, const KvPlacement& placement, const KvStep& step,
                      const v1::LayerCall& call, int rank) {
  v1::LayerCall cut;
  CutCall(spec, placement, step, call, TensorsOf(call), rank, &cut);
  return cut;
}

absl::StatusOr<v1::LayerResult> JoinResults(const KvCacheSpec& spec, const KvPlacement& placement,
                                            const KvStep& step, const v1::LayerCall& call,
                                            const std::vector<v1::LayerResult>& results) {
  const std::optional<KvLayerLocation> location = FindLayer(spec, call.layer());
  if (!location.has_value() || static_cast<int>(results.size()) != placement.world_size()) {
    return absl::InternalError(absl::StrCat("layer ", call.layer(), " has ", results.size(),
                                            " results; the cache has ", placement.world_size(),
                                            " ranks"));
  }
  for (int rank = 0; rank < placement.world_size(); ++rank) {
    const KvCallBytes expected = CallBytesOfRank(spec, placement, step, location->group,
                                                 OutputOfRank(placement, call.output()), rank);
    const v1::LayerResult& result = results[rank];
    if (SizeOf(result.out()) != expected.out || SizeOf(result.lse()) != expected.lse) {
      return absl::InternalError(absl::StrCat("rank ", rank, " answered layer ", call.layer(),
                                              " with ", result.out().size(), " bytes of out and ",
                                              result.lse().size(), " of lse; the step needs ",
                                              expected.out, " and ", expected.lse));
    }
  }
  return Joiner(spec, placement, step, call, *location, results).Join();
}

}  // namespace ringattn
