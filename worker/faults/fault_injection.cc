#include "worker/faults/fault_injection.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/communicator_wrapper.h"
#include "worker/device/device_wrapper.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(5);

void WaitForTheRingsEnd(const FaultState& state) {
  while (!state.aborted.load()) absl::SleepFor(kPoll);
}

// Returns nothing from one chunk on, without ever finishing.
class FaultyDownload : public Download {
 public:
  FaultyDownload(std::unique_ptr<Download> inner, std::shared_ptr<FaultState> state)
      : inner_(std::move(inner)), state_(std::move(state)) {}

  absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) override {
    if (stopped_) return std::nullopt;
    absl::StatusOr<std::optional<HostRange>> piece = inner_->Next(max_bytes);
    if (!piece.ok() || !piece->has_value()) return piece;
    stopped_ = state_->chunks_sent.fetch_add(1) == state_->plan.stop_sending;
    if (stopped_) return std::nullopt;
    return piece;
  }
  // The withheld ranges have not been sent, so the download has not finished, even at its end.
  bool finished() const override { return !stopped_ && inner_->finished(); }
  absl::Duration copy_time() const override { return inner_->copy_time(); }

 private:
  const std::unique_ptr<Download> inner_;
  const std::shared_ptr<FaultState> state_;
  bool stopped_ = false;
};

class FaultyDevice : public DeviceWrapper {
 public:
  FaultyDevice(std::unique_ptr<Device> inner, std::shared_ptr<FaultState> state)
      : DeviceWrapper(inner.get()),
        owned_(std::move(inner)),
        state_(std::move(state)),
        delay_("fault_delay") {}

  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override {
    absl::StatusOr<int64_t> bytes = inner().WorkspaceBytes(calls);
    if (bytes.ok()) *bytes += state_->plan.workspace_bytes;
    return bytes;
  }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    state_->counts = true;
    return inner().Prepare(std::move(calls));
  }

  // Inserts the delay between the call and what it waits for. While it runs, waits_for_transfer()
  // is false, so the rank appears to compute.
  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override {
    const FaultPlan& plan = state_->plan;
    // The faults of steps are those of a ring.
    if (control->preempts) return inner().Start(call, std::move(after), control);
    const bool stalls = plan.stall_step >= 0 && state_->groups_started.load() > plan.stall_step &&
                        !state_->stalled.exchange(true);
    if (!stalls && plan.slow_step_ms == 0) {
      return inner().Start(call, std::move(after), control);
    }
    if (state_->holds_start) {
      Delay(stalls, control);
      return inner().Start(call, std::move(after), control);
    }
    std::vector<EventRef> events = std::move(after).Joined();
    EventRef delayed = delay_.Start(
        [this, control, stalls] {
          Delay(stalls, control);
          return absl::OkStatus();
        },
        events, HostQueue::OnFailure::kRun);
    events.push_back(std::move(delayed));
    return inner().Start(call, std::move(events), control);
  }

  bool waits_for_transfer() const override { return !delaying_ && inner().waits_for_transfer(); }
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) override {
    // The thread that reads the stream stalls, so no further message is read.
    const int64_t chunk = state_->chunks_read.fetch_add(1);
    if (chunk == state_->plan.stop_reading) WaitForTheRingsEnd(*state_);
    return inner().BeginUpload(std::move(targets));
  }
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) override {
    return std::make_unique<FaultyDownload>(
        inner().BeginDownload(std::move(ranges), std::move(on_ready)), state_);
  }
  std::string description() const override {
    return absl::StrCat(inner().description(), " with injected faults");
  }

 private:
  void Delay(bool stalls, RunControl* control) {
    delaying_ = true;
    stalls ? WaitForTheRingsEnd(*state_) : SlowDown(control);
    delaying_ = false;
  }

  void SlowDown(RunControl* control) {
    const absl::Time end = MonotonicNow() + absl::Milliseconds(state_->plan.slow_step_ms);
    while (MonotonicNow() < end && !state_->aborted.load() && !control->stop.load()) {
      control->progress.fetch_add(1);
      absl::SleepFor(kPoll);
    }
  }

  const std::unique_ptr<Device> owned_;
  const std::shared_ptr<FaultState> state_;
  std::atomic<bool> delaying_{false};
  HostQueue delay_;
};

class FaultyCommunicator : public CommunicatorWrapper {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<FaultState> state)
      : CommunicatorWrapper(std::move(inner)), state_(std::move(state)) {
    state_->aborted = false;
    state_->counts = false;
  }
  ~FaultyCommunicator() override { Abort("the communicator was closed"); }

  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    if (!state_->counts.load())
      return CommunicatorWrapper::StartInLane(lane, std::move(group), std::move(after), control);
    const int64_t index = state_->groups_started.fetch_add(1);
    const bool skips = index == state_->plan.skip_send;
    if (index == state_->plan.fail_send) Abort("injected failure of a transfer group");
    if (skips && state_->holds_start) WaitForTheRingsEnd(*state_);
    if (!skips || state_->holds_start) {
      return CommunicatorWrapper::StartInLane(lane, std::move(group), std::move(after), control);
    }
    auto never = std::make_shared<HostEvent>();
    absl::MutexLock lock(&mutex_);
    if (aborted_) {
      never->Finish(absl::UnavailableError("ring aborted"));
    } else {
      skipped_.push_back(never);
    }
    return never;
  }

  void Abort(const std::string& reason) override {
    state_->aborted = true;
    CommunicatorWrapper::Abort(reason);
    absl::MutexLock lock(&mutex_);
    aborted_ = true;
    for (const auto& event : skipped_) event->Finish(absl::UnavailableError(reason));
    skipped_.clear();
  }

 private:
  const std::shared_ptr<FaultState> state_;
  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<HostEvent>> skipped_ ABSL_GUARDED_BY(mutex_);
};

class FaultyTransport : public RingTransport {
 public:
  FaultyTransport(std::unique_ptr<RingTransport> inner, std::shared_ptr<FaultState> state)
      : inner_(std::move(inner)), state_(std::move(state)) {}

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    return inner_->Prepare(generation, rank, world_size);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override {
    absl::StatusOr<std::unique_ptr<Communicator>> communicator =
        inner_->Connect(generation, blobs, deadline);
    if (!communicator.ok()) return communicator.status();
    return std::make_unique<FaultyCommunicator>(*std::move(communicator), state_);
  }
  void Cancel() override { inner_->Cancel(); }

 private:
  const std::unique_ptr<RingTransport> inner_;
  const std::shared_ptr<FaultState> state_;
};

}  // namespace

absl::StatusOr<FaultPlan> ParseFaultPlan(const std::string& text) {
  // The number is the index at which the fault occurs, or its amount.
  static constexpr struct {
    const char* name;
    int64_t FaultPlan::*number;
    int64_t least;
  } kFaults[] = {
      {"stall_step", &FaultPlan::stall_step, 0},     {"skip_send", &FaultPlan::skip_send, 0},
      {"fail_send", &FaultPlan::fail_send, 0},       {"stop_reading", &FaultPlan::stop_reading, 0},
      {"stop_sending", &FaultPlan::stop_sending, 0}, {"slow_step_ms", &FaultPlan::slow_step_ms, 1},
      {"workspace", &FaultPlan::workspace_bytes, 1},
  };
  const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits(':', 1));
  FaultPlan plan;
  for (const auto& fault : kFaults) {
    int64_t number = 0;
    if (parts.first != fault.name || !absl::SimpleAtoi(parts.second, &number)) continue;
    if (number < fault.least) continue;
    plan.*fault.number = number;
    return plan;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text,
                   "\" is not a fault; use one of stall_step:N, skip_send:N, fail_send:N, "
                   "stop_reading:N, stop_sending:N, "
                   "slow_step_ms:M or workspace:M with N >= 0, M > 0"));
}

std::unique_ptr<Device> MakeFaultyDevice(std::unique_ptr<Device> inner,
                                         std::shared_ptr<FaultState> state) {
  return std::make_unique<FaultyDevice>(std::move(inner), std::move(state));
}

std::unique_ptr<RingTransport> MakeFaultyTransport(std::unique_ptr<RingTransport> inner,
                                                   std::shared_ptr<FaultState> state) {
  return std::make_unique<FaultyTransport>(std::move(inner), std::move(state));
}

}  // namespace ringattn::worker
