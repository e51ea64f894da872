// TensorRoute: where the bytes of a tensor, as a client has it, lie with the workers.
//
// Most tensors are cut into shards as they are (ShardMap). Two kinds are not:
//   packed        qkv, kv and their gradients: each token's parts follow one another; workers
//                 have the parts as tensors of their own
//   per document  lse and dlse as [documents, heads, longest document's queries]; workers have
//                 the flat ones, and nobody has the bytes behind a shorter document
#ifndef RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_
#define RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/layout/shard_plan.h"

namespace ringattn {

// Whether each rank has the same tokens of all parts of a packed tensor: always, but for q and k of
// a plan that cuts them differently. True of a tensor without parts.
bool IsCutAsOne(const ShardPlan& plan, TensorId tensor);

// A range of bytes of one of the local tensors.
struct LocalRange {
  size_t part = 0;
  int64_t offset = 0;
  int64_t bytes = 0;

  bool operator==(const LocalRange&) const = default;
};

// Immutable, cheap to copy but for a list of documents, thread safe.
class TensorRoute {
 public:
  // REQUIRES: `tensor` is one that a client has (InputsOf, OutputsOf).
  TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);
  // The way up: a packed tensor stays whole where that can be (IsCutAsOne), so that parts() has
  // itself alone. Its shards are [outer, local rows, parts, heads, dim].
  static TensorRoute ForUpload(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);

  // What workers have it as. ByteRun::part and LocalRange::part are indices of it.
  const std::vector<TensorId>& parts() const { return parts_; }
  // Every rank's local tensor is the global one.
  bool replicated() const { return maps_[0].replicated(); }
  // Neighbours of one rank and part are not always neighbours in its local tensor.
  bool scattered() const { return per_document_; }

  // As ShardMap's. Runs of bytes that nobody has are of kNoRank.
  std::vector<ByteRun> FromGlobal(int64_t offset, int64_t bytes) const;
  std::vector<ByteRun> FromLocal(size_t part, int rank, int64_t offset, int64_t bytes) const;
  // Runs of kNoRank in the whole tensor, visit(offset, bytes).
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

  // The order in which a rank sends its part of the tensor, covering each of its bytes once: such
  // that whoever puts the whole tensor together from the ranks' streams, in ascending order,
  // keeps at most kStreamBlockBytes of a rank and part that it cannot use yet (of a tensor per
  // document kStreamGroupTokens of each head, if that is more).
  std::vector<LocalRange> StreamOrder(int rank) const;

 private:
  TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor,
              std::vector<TensorId> parts);

  std::vector<ByteRun> PackedRuns(int64_t offset, int64_t bytes) const;
  std::vector<ByteRun> DocumentRuns(int64_t offset, int64_t bytes) const;
  // Where byte `offset` of a part's global tensor lies in the client's, and how many follow it.
  void ToGlobal(size_t part, int64_t offset, int64_t bytes, const ByteRun& run,
                std::vector<ByteRun>& runs) const;
  std::vector<LocalRange> DocumentOrder(int rank) const;

  std::vector<TensorId> parts_;
  std::vector<ShardMap> maps_;  // of the parts
  int64_t global_bytes_ = 0;
  bool per_document_ = false;
  // Per document only.
  std::vector<int64_t> documents_;
  int64_t heads_ = 0;
  int64_t longest_ = 0;
  int64_t element_bytes_ = 0;
};

inline constexpr int64_t kStreamBlockBytes = 256 * 1024;
inline constexpr int64_t kStreamGroupTokens = 512;

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_TENSOR_ROUTE_H_
