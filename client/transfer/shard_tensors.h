// ShardTensors: a call's tensors as its members have them. What the members take is cut out of
// the caller's buffers, what they give is put into place there. Without I/O; the places are those
// that the tickets name, so no planner is needed.
#ifndef RINGATTN_CLIENT_TRANSFER_SHARD_TENSORS_H_
#define RINGATTN_CLIENT_TRANSFER_SHARD_TENSORS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/transfer/transfer.h"
#include "common/base/byte_range_set.h"
#include "common/layout/shard_plan.h"
#include "common/wire/chunk_codec.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Thread safe.
class ShardTensors {
 public:
  // `inputs` and `outputs`: with their layouts. INTERNAL if the tickets are not of members
  // 0..n-1 that have each of these tensors' tokens once, and the same of all parts of a packed
  // input, which travels whole.
  // `pairs_by_keys`: members have a bias, its gradient and a mask by their keys, as ShardTicket
  // says, where the layouts have them by queries.
  static absl::StatusOr<std::unique_ptr<ShardTensors>> Make(
      const google::protobuf::RepeatedPtrField<v1::ShardTicket>& tickets,
      std::vector<InputTensor> inputs, std::vector<OutputTensor> outputs, uint64_t max_chunk_bytes,
      bool pairs_by_keys = false);

  int ranks() const { return static_cast<int>(sources_.size()); }

  // --- inputs
  // Consecutive bytes of a member's tensor, in pieces of the caller's memory or gathered.
  struct Chunk {
    v1::TensorId tensor;
    uint64_t offset = 0;  // in the member's tensor
    uint64_t bytes = 0;
    std::vector<ConstBytes> pieces = {};
    // What they lie in if they are gathered, one piece; null if they are the caller's.
    std::unique_ptr<uint8_t[]> gathered = nullptr;
  };
  // The next of a member's; nothing when all are dealt out. By any thread: each is dealt once.
  std::optional<Chunk> Next(int rank);
  uint64_t bytes_up() const { return bytes_up_; }  // to all members together
  uint64_t bytes_up(int rank) const { return sources_[rank]->bytes; }
  uint64_t dealt_bytes() const { return dealt_bytes_.load(); }

  // --- outputs
  // A member's chunk. Errors: as OutputAssembler::Add.
  absl::Status Add(int rank, const wire::ChunkHeader& header,
                   absl::Span<const wire::Fragment> payload, uint64_t payload_bytes);
  uint64_t bytes_down() const { return bytes_down_; }
  uint64_t bytes_down(int rank) const;
  uint64_t received_bytes() const { return received_bytes_.load(); }
  bool complete() const { return received_bytes() == bytes_down_; }

 private:
  struct Input {
    InputTensor tensor;
    ShardMap map;
  };
  struct Output {
    OutputTensor tensor;
    ShardMap map;
  };
  // What of the inputs is dealt out to a member.
  struct Source {
    absl::Mutex mutex;
    size_t tensor ABSL_GUARDED_BY(mutex) = 0;
    int64_t offset ABSL_GUARDED_BY(mutex) = 0;
    uint64_t bytes = 0;  // in all
  };
  // What of the outputs has come from a member, by output.
  struct Sink {
    absl::Mutex mutex;
    std::vector<ByteRangeSet> arrived ABSL_GUARDED_BY(mutex);
  };

  ShardTensors() = default;

  Chunk Cut(const Input& input, int rank, int64_t offset, int64_t bytes) const;

  std::vector<Input> inputs_;
  std::vector<Output> outputs_;
  int64_t max_chunk_bytes_ = 0;
  uint64_t bytes_up_ = 0;
  uint64_t bytes_down_ = 0;
  std::vector<std::unique_ptr<Source>> sources_;  // by rank
  std::vector<std::unique_ptr<Sink>> sinks_;      // likewise
  std::atomic<uint64_t> dealt_bytes_{0};
  std::atomic<uint64_t> received_bytes_{0};
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_SHARD_TENSORS_H_
