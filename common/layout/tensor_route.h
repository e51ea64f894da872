// TensorRoute maps the bytes of a client's tensor to the workers' tensors.
//
// Most tensors are sharded as they are (ShardMap). Two kinds are not:
//   packed        qkv, kv and their gradients: each token's parts are adjacent; workers hold
//                 the parts as separate tensors
//   per document  lse and dlse as [documents, heads, longest document's queries]; workers hold
//                 the flat ones, and the bytes after a shorter document belong to no rank
#ifndef RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_
#define RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/layout/shard_plan.h"

namespace ringattn {

// Returns whether each rank owns the same tokens of all parts of a packed tensor. False only if the
// plan shards q and k differently. True for a tensor without parts.
bool IsCutAsOne(const ShardPlan& plan, TensorId tensor);

// A range of bytes of one of the local tensors.
struct LocalRange {
  size_t part = 0;
  int64_t offset = 0;
  int64_t bytes = 0;

  bool operator==(const LocalRange&) const = default;
};

// Maps one tensor of one request. Immutable and thread safe. Cheap to copy, except for a list of
// documents.
class TensorRoute {
 public:
  // REQUIRES: `tensor` is one of the client's tensors (InputsOf, OutputsOf).
  TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);
  // The route of an upload. A packed tensor stays whole if IsCutAsOne; parts() then holds only the
  // tensor itself, and its shards are [outer, local rows, parts, heads, dim].
  static TensorRoute ForUpload(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);

  // The workers' tensors. ByteRun::part and LocalRange::part are indices into this list.
  const std::vector<TensorId>& parts() const { return parts_; }
  // Whether every rank's local tensor is the global one.
  bool replicated() const { return maps_[0].replicated(); }
  // Whether runs that are adjacent for the client, of one rank and part, may be apart in its local
  // tensor.
  bool scattered() const { return per_document_; }

  // As in ShardMap. Runs of bytes that no rank has are of kNoRank.
  std::vector<ByteRun> FromGlobal(int64_t offset, int64_t bytes) const;
  std::vector<ByteRun> FromLocal(size_t part, int rank, int64_t offset, int64_t bytes) const;
  // Calls visit(offset, bytes) for every run of kNoRank in the whole tensor.
  template <typename Visit>
  void ForEachHole(const Visit& visit) const {
    if (!per_document_ || longest_ == 0) return;
    const int64_t row_bytes = longest_ * element_bytes_;
    for (size_t d = 0; d + 1 < documents_.size(); ++d) {
      const int64_t used = (documents_[d + 1] - documents_[d]) * element_bytes_;
      if (used == row_bytes) continue;
      for (int64_t h = 0; h < heads_; ++h) {
        const int64_t row = (static_cast<int64_t>(d) * heads_ + h) * row_bytes;
        visit(row + used, row_bytes - used);
      }
    }
  }

  int64_t local_bytes(size_t part, int rank) const { return maps_[part].local_bytes(rank); }
  int64_t global_bytes() const { return global_bytes_; }

  // Returns the order in which a rank sends its shard of the tensor; each byte appears once. A
  // receiver that assembles the whole tensor from the ranks' streams in ascending order buffers at
  // most kStreamBlockBytes per rank and part (for a tensor per document at most kStreamGroupTokens
  // of each head, if that is more).
  std::vector<LocalRange> StreamOrder(int rank) const;

 private:
  TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor,
              std::vector<TensorId> parts);

  std::vector<ByteRun> PackedRuns(int64_t offset, int64_t bytes) const;
  std::vector<ByteRun> DocumentRuns(int64_t offset, int64_t bytes) const;
  // Appends the runs of the client's tensor for `bytes` bytes at byte `offset` of a part's global
  // tensor.
  void ToGlobal(size_t part, int64_t offset, int64_t bytes, const ByteRun& run,
                std::vector<ByteRun>& runs) const;
  std::vector<LocalRange> DocumentOrder(int rank) const;

  std::vector<TensorId> parts_;
  std::vector<ShardMap> maps_;  // by part
  int64_t global_bytes_ = 0;
  bool per_document_ = false;
  // Set for per-document tensors.
  std::vector<int64_t> documents_;
  int64_t heads_ = 0;
  int64_t longest_ = 0;
  int64_t element_bytes_ = 0;
};

inline constexpr int64_t kStreamBlockBytes = 256 * 1024;
inline constexpr int64_t kStreamGroupTokens = 512;

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_
