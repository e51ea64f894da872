// CoordinatorRelay: the data plane through this process. It forwards the client's chunks to the
// members' shard streams, and the members' chunks to the client.
//
// Memory use is bounded, independent of the tensor size:
//   up    kUploadWindowBytes + one chunk: the client's next message is read only
//         while less than the window waits for the members
//   down  kDownloadWindowBytes + two chunks for the client (one in flight, one
//         queued), and kReadAheadBytes + one chunk for each member
// A slow client or member therefore delays only this request.
//
// Tests: coordinator_relay_test.cc, flow_control_test.cc
#ifndef RINGATTN_SERVER_EDGE_DATA_COORDINATOR_RELAY_H_
#define RINGATTN_SERVER_EDGE_DATA_COORDINATOR_RELAY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/data/download_merger.h"
#include "server/edge/data/shard_client.h"
#include "server/edge/data/stall_watch.h"
#include "server/edge/data/upload_router.h"

namespace ringattn::server {

// There are two locks. merge_mutex_ is held while outputs are assembled and their crc is computed
// (unless the member's own applies). Only gRPC's threads take it, never the core's thread. It is
// not held while the listener takes outputs, which lasts as long as writing a chunk: one thread at
// a time does that, and other threads leave and continue reading. state_mutex_ guards counters, is
// held briefly and is taken last. Inputs need neither lock, because one thread at a time feeds
// them.
class CoordinatorRelay final : public DataPlane,
                               public ShardStreamOwner,
                               public std::enable_shared_from_this<CoordinatorRelay> {
 public:
  static constexpr int64_t kUploadWindowBytes = 2 * kMiB;
  static constexpr int64_t kDownloadWindowBytes = 2 * kMiB;
  static constexpr int64_t kReadAheadBytes = 1 * kMiB;
  static constexpr int kChunksAtATime = 8;

  // `channels` is used by Open only.
  CoordinatorRelay(TransferSpec spec, std::shared_ptr<TransferListener> listener,
                   const Limits& limits, ShardChannels* channels, std::string secret);

  // DataPlane
  std::optional<Failure> Open() override;
  std::optional<Failure> Feed(const grpc::ByteBuffer& message) override;
  bool HasRoom() const override ABSL_LOCKS_EXCLUDED(state_mutex_);
  bool complete() const override ABSL_LOCKS_EXCLUDED(state_mutex_);
  Failure Incomplete() const override { return router_.Incomplete(); }
  void Drain() override ABSL_LOCKS_EXCLUDED(merge_mutex_, state_mutex_);
  void Delivered(int64_t payload_bytes) override ABSL_LOCKS_EXCLUDED(merge_mutex_, state_mutex_);
  TransferStalls Look() override ABSL_LOCKS_EXCLUDED(state_mutex_);
  TransferTotals totals() const override ABSL_LOCKS_EXCLUDED(state_mutex_);
  void Stop() override ABSL_LOCKS_EXCLUDED(state_mutex_);

  // ShardStreamOwner
  void OnShardMessage(int rank, grpc::ByteBuffer message) override
      ABSL_LOCKS_EXCLUDED(merge_mutex_, state_mutex_);
  void OnShardWritten(int rank, int64_t payload_bytes) override ABSL_LOCKS_EXCLUDED(state_mutex_);
  void OnShardEnded(int rank, const grpc::Status& status) override
      ABSL_LOCKS_EXCLUDED(state_mutex_);

 private:
  struct Member {
    bool reading = true;        // a message was requested
    bool done = false;          // it has sent everything
    int64_t waiting_bytes = 0;  // payload queued for it
    StallWatch watch;
  };

  std::optional<Failure> Route(const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload)
      ABSL_LOCKS_EXCLUDED(state_mutex_);
  // Moves outputs as far as possible, unless another thread already does; then that thread
  // continues. After kChunksAtATime the work moves to another thread, so that this one can serve
  // other calls.
  void Pump() ABSL_LOCKS_EXCLUDED(merge_mutex_, state_mutex_);
  std::optional<DownloadMerger::Chunk> NextForClient() ABSL_EXCLUSIVE_LOCKS_REQUIRED(merge_mutex_)
      ABSL_LOCKS_EXCLUDED(state_mutex_);
  // Returns the members that have room for another message, and marks them as reading.
  std::vector<int> TakeReaders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(merge_mutex_)
      ABSL_LOCKS_EXCLUDED(state_mutex_);
  // Returns true once, when everything is delivered.
  bool TakeDrained() ABSL_EXCLUSIVE_LOCKS_REQUIRED(merge_mutex_) ABSL_LOCKS_EXCLUDED(state_mutex_);
  bool WaitsFor(const Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_);
  bool WindowHasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_mutex_) {
    return upload_waiting_bytes_ < kUploadWindowBytes;
  }
  void MemberFailed(int rank, const std::string& reason);

  const std::shared_ptr<TransferListener> listener_;
  const std::string secret_;
  ShardChannels* const channels_;
  const wire::StreamMessage request_type_;
  const std::string request_id_;
  const std::string traceparent_;
  const std::string operation_id_;
  const uint64_t generation_;
  const std::vector<RingMember> targets_;  // by rank
  const int64_t shard_chunk_bytes_;
  const bool with_crc32c_;
  std::shared_ptr<const InlineTensors> inline_tensors_;  // consumed by Open
  std::vector<std::shared_ptr<ShardStream>> streams_;    // by rank; fixed by Open
  UploadRouter router_;                                  // used by the feeding thread

  absl::Mutex merge_mutex_ ABSL_ACQUIRED_BEFORE(state_mutex_);
  DownloadMerger merger_ ABSL_GUARDED_BY(merge_mutex_);
  bool pumping_ ABSL_GUARDED_BY(merge_mutex_) = false;

  mutable absl::Mutex state_mutex_;
  std::vector<Member> members_ ABSL_GUARDED_BY(state_mutex_);  // by rank
  StallWatch client_ ABSL_GUARDED_BY(state_mutex_);
  TransferTotals totals_ ABSL_GUARDED_BY(state_mutex_);
  int64_t upload_waiting_bytes_ ABSL_GUARDED_BY(state_mutex_) = 0;  // for the members
  int64_t undelivered_bytes_ ABSL_GUARDED_BY(state_mutex_) = 0;     // to the client
  bool complete_ ABSL_GUARDED_BY(state_mutex_) = false;             // all inputs have arrived
  bool draining_ ABSL_GUARDED_BY(state_mutex_) = false;
  bool drained_ ABSL_GUARDED_BY(state_mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(state_mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_COORDINATOR_RELAY_H_
