// DirectTransfer: the direct streams of one attempt, to each of its members. Inputs go up, outputs
// come down.
// Tests: tests/e2e/test_direct.py, test_direct_faults.py.
#ifndef RINGATTN_CLIENT_TRANSFER_DIRECT_TRANSFER_H_
#define RINGATTN_CLIENT_TRANSFER_DIRECT_TRANSFER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/alarm.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/transfer/shard_tensors.h"
#include "client/transfer/worker_channels.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// How long a call waits for the connection to a worker: a call that may use the relay instead, and
// one that requires direct streams. A busy machine accepts connections late.
inline constexpr absl::Duration kDirectConnectTime = absl::Seconds(1);
inline constexpr absl::Duration kRequiredConnectTime = absl::Seconds(10);

struct DirectTransferOptions {
  std::chrono::system_clock::time_point deadline;
  uint32_t max_chunk_bytes_down = 0;
  bool with_crc32c = true;
  uint32_t writer = 0;  // OpenShard.writer
  // A connection that takes longer counts as failed.
  absl::Duration connect_timeout = kDirectConnectTime;
};

// Callbacks for the attempt, on gRPC's threads.
struct DirectTransferEvents {
  // Reports how many bytes of all tensors were sent or received. Calls may overlap.
  std::function<void(uint64_t dealt, uint64_t received)> on_moved;
  // The transfer cannot succeed any more. Called at most once and before on_ended. `unreachable`: a
  // member did not accept the connection or did not answer.
  std::function<void(const absl::Status& why, bool unreachable)> on_broken;
  // All streams have ended. Called once, as the last callback.
  std::function<void()> on_ended;
};

// Thread safe. Keeps itself alive until on_ended.
class DirectTransfer : public std::enable_shared_from_this<DirectTransfer> {
 public:
  // Returns how many streams move a shard of this many bytes.
  static int StreamsFor(uint64_t bytes, int channels);

  // `borrowed` counts the slices of the caller's memory that gRPC holds, and outlives them.
  DirectTransfer(const v1::Accepted& accepted, std::unique_ptr<ShardTensors> tensors,
                 WorkerChannels* workers, DirectTransferOptions options,
                 DirectTransferEvents events, std::atomic<int64_t>* borrowed);
  ~DirectTransfer();

  void Start();
  // Ends all streams soon. Idempotent; may be called before Start.
  void Cancel();

  const ShardTensors& tensors() const { return *tensors_; }
  // Seconds since `start`; 0 if the upload did not complete.
  double uploaded_seconds(std::chrono::steady_clock::time_point start) const;
  double first_output_seconds(std::chrono::steady_clock::time_point start) const;

 private:
  class Stream;

  void OnMoved();
  void OnStreamOpened();
  void OnStreamEnded(const absl::Status& status, bool opened, const std::string& worker);
  void Break(const absl::Status& why, bool unreachable);
  void WatchOpening(std::chrono::milliseconds wait, bool only_connection);
  void CheckOpening(bool only_connection);
  // Cancels the alarm.
  void StopWatching();

  const DirectTransferOptions options_;
  const DirectTransferEvents events_;
  const std::unique_ptr<ShardTensors> tensors_;
  std::atomic<int64_t>* const borrowed_;
  std::vector<std::shared_ptr<Stream>> streams_;  // constant after construction
  std::atomic<size_t> unopened_;
  std::atomic<size_t> unended_;
  std::atomic<bool> broken_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<int64_t> uploaded_at_{0};  // count of the steady clock
  std::atomic<int64_t> first_output_at_{0};

  std::mutex watch_mutex_;
  bool watched_ = true;               // false: the alarm is not set again
  std::optional<grpc::Alarm> watch_;  // of the streams' opening
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_DIRECT_TRANSFER_H_
