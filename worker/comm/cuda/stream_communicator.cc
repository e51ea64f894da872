#include "worker/comm/cuda/stream_communicator.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

// Polling interval for pending groups: short compared with any step timeout, long compared with the
// cost of a poll (microseconds).
constexpr absl::Duration kWatchPause = absl::Milliseconds(5);
constexpr absl::Duration kInterruptPause = absl::Microseconds(200);

bool Between(const PeerTransfer& transfer, Kind kind, int peer) {
  return transfer.kind == kind && transfer.peer == peer && transfer.bytes > 0;
}

// Returns the events of `after` that a stream must wait for.
std::vector<EventRef> Unfinished(const std::vector<EventRef>& after) {
  std::vector<EventRef> unfinished;
  for (const EventRef& event : after) {
    if (!event->Done()) unfinished.push_back(event);
  }
  return unfinished;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StreamCommunicator>> StreamCommunicator::Create(
    std::unique_ptr<TransferEngine> engine, std::string alone, CudaEventPool* events, int rank,
    int world_size, absl::Duration step_timeout) {
  if (absl::Status status = events->UseDevice(); !status.ok()) return status;
  int lowest = 0, highest = 0;
  absl::Status status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                                   "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  // High priority: if an engine needs SMs, its CTAs precede the waiting CTAs of a compute kernel. A
  // transfer then starts when the first CTAs of that kernel retire.
  const bool has_lanes = engine != nullptr && engine->has_lanes();
  Streams streams{};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (lane > 0 && !has_lanes) {
      streams[lane] = streams[0];
      continue;
    }
    status =
        CudaStatus(cudaStreamCreateWithPriority(&streams[lane], cudaStreamNonBlocking, highest),
                   "cudaStreamCreateWithPriority");
    if (status.ok()) continue;
    if (lane > 0) (void)cudaStreamDestroy(streams[0]);
    return status;
  }
  return std::unique_ptr<StreamCommunicator>(new StreamCommunicator(
      std::move(engine), std::move(alone), events, streams, rank, world_size, step_timeout));
}

StreamCommunicator::StreamCommunicator(std::unique_ptr<TransferEngine> engine, std::string alone,
                                       CudaEventPool* events, Streams streams, int rank,
                                       int world_size, absl::Duration step_timeout)
    : engine_(std::move(engine)),
      alone_(std::move(alone)),
      events_(events),
      streams_(streams),
      rank_(rank),
      world_size_(world_size),
      step_timeout_(step_timeout),
      steps_{StepDeadlines(step_timeout), StepDeadlines(step_timeout)},
      watcher_([this] { Watch(); }) {
  pthread_setname_np(watcher_.native_handle(), "ring_watcher");
}

StreamCommunicator::~StreamCommunicator() {
  Abort("the communicator was closed");
  watcher_.join();
  if (!events_->UseDevice().ok()) return;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (lane == 0 || streams_[lane] != streams_[0]) (void)cudaStreamDestroy(streams_[lane]);
  }
}

EventRef StreamCommunicator::StartInLane(Lane lane, std::vector<PeerTransfer> group,
                                         std::vector<EventRef> after, RunControl* control) {
  auto event = std::make_shared<CudaEvent>(events_, control, group.size());
  absl::MutexLock issuing(&issuing_);
  {
    absl::MutexLock lock(&mutex_);
    if (aborted_) {
      event->Fail(AbortedStatus());
      return event;
    }
  }
  bool half_enqueued = false;
  const size_t index = IndexOf(has_lanes() ? lane : Lane::kInside);
  const absl::Status status = Enqueue(streams_[index], group, after, event, &half_enqueued);
  // Peers would wait for the missing transfers.
  if (!status.ok()) Abort(absl::StrCat(DescribeGroup(group), ": ", status.message()));
  absl::MutexLock lock(&mutex_);
  if (half_enqueued) {
    half_enqueued_ = event;  // EndWork completes it
  } else if (aborted_) {
    event->FailAndHold(AbortedStatus());
    pending_.push_back(event);
  } else {
    steps_[index].Add(std::move(after), event, DescribeGroup(group));
    pending_.push_back(event);
  }
  return event;
}

absl::Status StreamCommunicator::Enqueue(cudaStream_t stream,
                                         const std::vector<PeerTransfer>& group,
                                         const std::vector<EventRef>& after,
                                         const std::shared_ptr<CudaEvent>& event,
                                         bool* half_enqueued) {
  absl::Status status = events_->UseDevice();
  if (status.ok()) status = WaitOnStream(stream, Unfinished(after));
  if (status.ok()) status = event->RecordBegin(stream);
  if (!status.ok()) return status;
  *half_enqueued = true;
  status = CopyToSelf(stream, group);
  const auto failure = std::make_shared<GroupFailure>();
  if (status.ok()) status = ExchangeWithPeers(stream, group, failure);
  if (status.ok()) status = event->RecordEnd(stream);
  if (status.ok()) failure->Attach(event);
  *half_enqueued = !status.ok();
  return status;
}

absl::Status StreamCommunicator::CopyToSelf(cudaStream_t stream,
                                            const std::vector<PeerTransfer>& group) {
  std::vector<const PeerTransfer*> sends, receives;
  for (const PeerTransfer& transfer : group) {
    if (Between(transfer, Kind::kSend, rank_)) sends.push_back(&transfer);
    if (Between(transfer, Kind::kReceive, rank_)) receives.push_back(&transfer);
  }
  const auto fits = [](const PeerTransfer* a, const PeerTransfer* b) {
    return a->bytes == b->bytes;
  };
  if (!std::equal(sends.begin(), sends.end(), receives.begin(), receives.end(), fits)) {
    return absl::InternalError(
        "a rank's sends to itself and receives from itself do not match within a group");
  }
  absl::Status status;
  for (size_t i = 0; i < sends.size() && status.ok(); ++i) {
    status = CudaStatus(cudaMemcpyAsync(receives[i]->data, sends[i]->data, sends[i]->bytes,
                                        cudaMemcpyDeviceToDevice, stream),
                        "cudaMemcpyAsync");
  }
  return status;
}

absl::Status StreamCommunicator::ExchangeWithPeers(cudaStream_t stream,
                                                   const std::vector<PeerTransfer>& group,
                                                   const std::shared_ptr<GroupFailure>& failure) {
  std::vector<PeerTransfer> transfers;
  for (const PeerTransfer& transfer : group) {
    if (transfer.peer != rank_ && transfer.bytes > 0) transfers.push_back(transfer);
  }
  if (transfers.empty()) return absl::OkStatus();
  if (engine_ == nullptr) return absl::InternalError("a ring of one has no peers");
  return engine_->Enqueue(transfers, stream, failure);
}

void StreamCommunicator::LosePeer(int peer, const std::string& reason) {
  if (engine_ == nullptr || !engine_->LosePeer(peer, reason)) Abort(reason);
}

void StreamCommunicator::Abort(const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (aborted_) return;
  aborted_ = true;
  reason_ = reason;
  // Before anything is ended: work that ends because of the abort has failed.
  for (const auto& event : pending_) event->FailAndHold(AbortedStatus());
  if (engine_ != nullptr) engine_->Interrupt();
}

void StreamCommunicator::Watch() {
  (void)events_->UseDevice();
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return aborted_ || !steps_[0].empty() || !steps_[1].empty();
  };
  const auto is_aborted = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return aborted_; };
  const absl::Duration pause = std::min(kWatchPause, step_timeout_ / 10);
  while (true) {
    std::string failure;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (mutex_.AwaitWithTimeout(absl::Condition(&is_aborted), pause)) break;
      for (StepDeadlines& steps : steps_) {
        if (failure.empty()) failure = steps.Poll(MonotonicNow());
      }
      pending_.erase(std::remove_if(pending_.begin(), pending_.end(),
                                    [](const auto& event) { return event->Done(); }),
                     pending_.end());
    }
    if (failure.empty() && engine_ != nullptr) {
      failure = std::string(engine_->AsyncError().message());
    }
    if (!failure.empty()) Abort(failure);
  }
  EndWork();
}

void StreamCommunicator::EndWork() {
  // Waits for a thread that is enqueuing a group. One interrupt may not be enough, because copies
  // that peers have begun still write words that the stream waits for.
  while (!issuing_.TryLock()) {
    if (engine_ != nullptr) engine_->Interrupt();
    absl::SleepFor(kInterruptPause);
  }
  if (engine_ != nullptr) engine_->Abort();
  EndGroups();
  issuing_.Unlock();
}

void StreamCommunicator::EndGroups() {
  std::shared_ptr<CudaEvent> half_enqueued;
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& event : std::exchange(pending_, {})) event->ReleaseHold();
    half_enqueued = std::move(half_enqueued_);
    status = AbortedStatus();
  }
  if (half_enqueued == nullptr) return;
  // Nothing more can be enqueued, so everything is on the streams now. The event's end was not
  // recorded: a recorded one could be observed before the failure is set.
  for (cudaStream_t stream : streams_) (void)cudaStreamSynchronize(stream);
  half_enqueued->Fail(status);
}

absl::Status StreamCommunicator::AbortedStatus() const {
  return absl::UnavailableError(absl::StrCat("ring aborted: ", reason_));
}

}  // namespace ringattn::worker
