// ShardTensors: a call's tensors split into its members' shards. It cuts inputs out of the caller's
// buffers and puts outputs into place there. Without I/O. The shards are those of the tickets, so
// no planner is needed. The caller has the whole tensors or, as a writer, its own rows of them.
// Tests: shard_tensors_test.cc.
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
#include "common/layout/writer_rows.h"
#include "common/wire/chunk_codec.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// Thread safe.
class ShardTensors {
 public:
  // `inputs` and `outputs` have their layouts. Returns INTERNAL unless the tickets are of members
  // 0..n-1 that together have each token of each tensor once. All components of a packed input,
  // which is sent whole, must have the same shards. `pairs_by_keys`: members have a bias, its
  // gradient and a mask by keys, as ShardTicket says, although the layouts have them by queries.
  // `writer`: the caller's rows; the layouts are those of the whole tensors.
  static absl::StatusOr<std::unique_ptr<ShardTensors>> Make(
      const google::protobuf::RepeatedPtrField<v1::ShardTicket>& tickets,
      std::vector<InputTensor> inputs, std::vector<OutputTensor> outputs, uint64_t max_chunk_bytes,
      bool pairs_by_keys = false, const std::optional<WriterChoice>& writer = std::nullopt);

  int ranks() const { return static_cast<int>(sources_.size()); }

  // --- Inputs: consecutive bytes of a member's tensor, as pieces of the caller's memory or
  // gathered.
  struct Chunk {
    v1::TensorId tensor;
    uint64_t offset = 0;  // in the member's tensor
    uint64_t bytes = 0;
    std::vector<ConstBytes> pieces = {};
    // The buffer of a gathered chunk, which is one piece; null if the pieces are the caller's
    // memory.
    std::unique_ptr<uint8_t[]> gathered = nullptr;
  };
  // Returns the next chunk of a member, or nothing after the last. Any thread may call it; each
  // chunk is returned once.
  std::optional<Chunk> Next(int rank);
  uint64_t bytes_up() const { return bytes_up_; }  // to all members together
  uint64_t bytes_up(int rank) const { return sources_[rank]->bytes; }
  uint64_t dealt_bytes() const { return dealt_bytes_.load(); }

  // --- Outputs: puts a member's chunk into place. Errors: as OutputAssembler::Add.
  absl::Status Add(int rank, const wire::ChunkHeader& header,
                   absl::Span<const wire::Fragment> payload, uint64_t payload_bytes);
  uint64_t bytes_down() const { return bytes_down_; }
  uint64_t bytes_down(int rank) const;
  uint64_t received_bytes() const { return received_bytes_.load(); }
  bool complete() const { return received_bytes() == bytes_down_; }

 private:
  // Between a tensor's shards and the caller's buffer.
  struct Route {
    ShardMap map;  // of the whole tensor
    // From the whole tensor to the caller's rows, as rank 0, and all others. None: the caller has
    // the whole tensor.
    std::optional<ShardMap> writer;
    // The ranges of each rank's tensor that the caller has, ascending.
    std::vector<std::vector<WriterRange>> ranges;

    uint64_t bytes(int rank) const;  // of the ranges
    // Calls visit(buffer_offset, bytes) for each run of the rank's bytes; buffer_offset is -1 for
    // bytes that the caller does not have.
    template <typename Visit>
    void ForEachRun(int rank, int64_t offset, int64_t bytes, const Visit& visit) const;
  };
  struct Input {
    InputTensor tensor;
    Route route;
  };
  struct Output {
    OutputTensor tensor;
    Route route;
  };
  // Progress of the inputs of one member.
  struct Source {
    absl::Mutex mutex;
    size_t tensor ABSL_GUARDED_BY(mutex) = 0;
    size_t range ABSL_GUARDED_BY(mutex) = 0;    // index in Route::ranges
    int64_t offset ABSL_GUARDED_BY(mutex) = 0;  // in the range
    uint64_t bytes = 0;                         // in total
  };
  // Progress of the outputs of one member, by output.
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
  std::vector<std::unique_ptr<Sink>> sinks_;      // by rank
  std::atomic<uint64_t> dealt_bytes_{0};
  std::atomic<uint64_t> received_bytes_{0};
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_SHARD_TENSORS_H_
