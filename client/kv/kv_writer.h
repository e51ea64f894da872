// KvWriter: the steps of one writer of a cache. Opens an epoch, keeps its streams, and sends the
// current step again after a stream has broken.
//
//   BeginStep   -> described
//   first call  -> sent -> accepted, or refused: no step
//   last call   -> complete: every layer appended, or no row appends
//   BeginStep or CommitStep of a complete step -> committed
#ifndef RINGATTN_CLIENT_KV_KV_WRITER_H_
#define RINGATTN_CLIENT_KV_KV_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/api/kv_cache.h"
#include "client/kv/kv_service.h"
#include "client/kv/step_rings.h"
#include "client/kv/step_streams.h"
#include "client/memory/shared_region.h"
#include "client/transfer/worker_channels.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/step.h"

namespace ringattn::client {

// Not thread safe.
class KvWriter {
 public:
  // `service` and `workers` may be shared with other writers. `attach`: LocalMemoryService.Attach.
  KvWriter(std::shared_ptr<const KvServiceCalls> service, std::shared_ptr<WorkerChannels> workers,
           SharedRegion::AttachCall attach, std::string cache_id, KvCacheSpec spec,
           const v1::KvPlacement& placement, KvOpenOptions options);

  // Opens an epoch and its streams. Called once, first.
  absl::Status Open();

  absl::Status BeginStep(const v1::StepBegin& begin);
  absl::StatusOr<KvLayerReport> CallLayer(const KvLayerArgs& args, const KvLayerResults& results,
                                          const KvCallOptions& options);
  absl::Status CommitStep(const KvCallOptions& options);
  absl::Status RoundTrip(const KvCallOptions& options);
  void CloseStreams();

  const KvCacheSpec& spec() const { return spec_; }
  const v1::KvPlacement& placement() const { return placement_proto_; }
  uint64_t epoch() const { return epoch_; }
  v1::Transport transport() const { return transport_; }
  const std::string& transport_reason() const { return transport_reason_; }
  const std::map<uint64_t, uint64_t>& sequences() const { return sequences_; }
  uint64_t step() const { return step_.has_value() ? step_->step.number : committed_; }
  uint64_t blocks_free() const { return blocks_free_; }
  bool leaving() const { return leaving_; }
  const v1::StepRefused& refusal() const { return refusal_; }

 private:
  // Between two attempts.
  static constexpr absl::Duration kMinBackoff = absl::Milliseconds(20);
  static constexpr absl::Duration kMaxBackoff = absl::Milliseconds(500);
  // The coordinator answers GetCache and DeleteCache without I/O.
  static constexpr absl::Duration kStateDeadline = absl::Seconds(2);

  struct CurrentStep {
    KvStep step;
    v1::StepRequest begin;        // of `step`
    bool sent = false;            // a worker may have begun it
    bool accepted = false;        // all workers have begun it
    std::set<uint32_t> answered;  // layers
  };
  // Answers to the messages of one exchange, by peer and message.
  using Answers = std::vector<std::vector<v1::StepResponse>>;

  // Makes step rings unless the writer has them.
  absl::Status MakeRings();
  // Opens an epoch with the transports in `accept`, and its streams.
  absl::Status OpenEpoch(const std::vector<v1::Transport>& accept, uint64_t answered_step,
                         absl::Duration deadline);
  absl::Status OpenStreams(const StepStreams::Limits& limits);
  // Takes over what the service reports after a new epoch began during `step_`.
  absl::Status ResumeStep(uint64_t next_step);

  // Sends a message to all peers, after the description of the step where that is necessary:
  // requests[i] goes to peer i, and its answer has up to `result_bytes` of tensors. Reopens broken
  // streams. Returns the answers to `requests`.
  absl::StatusOr<std::vector<v1::StepResponse>> Send(const std::vector<v1::StepRequest>& requests,
                                                     int64_t result_bytes, bool with_step,
                                                     const KvCallOptions& options);
  absl::StatusOr<std::vector<v1::StepResponse>> SendOnce(
      const std::vector<v1::StepRequest>& requests, int64_t result_bytes, bool with_step,
      const StepStreams::Limits& limits);
  // Maps a broken stream's status: OK to try again, or the error for the caller.
  absl::Status Recover(const absl::Status& broken, const StepStreams::Limits& limits);
  // Takes the peers' answers to StepBegin.
  absl::Status TakeBegun(const Answers& answers);
  absl::Status Refused(const v1::StepRefused& refused);
  void ApplyStep();
  absl::Status RanksDiffer(const std::string& what);
  bool is_complete() const;
  // Streams go to the workers, each with the tensors of its rank.
  bool uses_workers() const { return transport_ != v1::TRANSPORT_RELAY; }
  // Remembers errors after which the writer must be destroyed.
  absl::Status Noted(absl::Status status);

  const std::shared_ptr<const KvServiceCalls> service_;
  const std::shared_ptr<WorkerChannels> workers_;
  const SharedRegion::AttachCall attach_;
  const std::string cache_id_;
  const KvCacheSpec spec_;
  const KvOpenOptions options_;
  size_t num_layers_ = 0;

  absl::Status ended_;  // fenced or gone
  uint64_t epoch_ = 0;
  std::shared_ptr<StepRings> rings_;  // null: none
  std::string ring_region_id_;        // of this epoch, with TRANSPORT_HOST_MEMORY
  v1::KvPlacement placement_proto_;
  KvPlacement placement_;
  v1::Transport transport_ = v1::TRANSPORT_UNSPECIFIED;
  std::string transport_reason_;
  std::unique_ptr<StepStreams> streams_;
  bool begun_on_streams_ = false;  // the description was accepted on the open streams

  uint64_t committed_ = 0;  // the last step that is not step_
  std::optional<CurrentStep> step_;
  // The last layer call's requests, whose memory the next call reuses.
  std::vector<v1::StepRequest> requests_;
  v1::StepRefused refusal_;
  std::map<uint64_t, uint64_t> sequences_;
  uint64_t blocks_free_ = 0;
  bool leaving_ = false;  // a worker of the cache was ordered to end
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_KV_WRITER_H_
