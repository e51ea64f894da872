// ActivityProbe: what the worker is doing right now, seen from outside: whether it
// computes, and whether it waits for a peer. The heartbeat reports it, so that a
// rank which merely waits is not blamed for a stall.
#ifndef RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_
#define RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// Thread safe; its lock is held for moments only.
class ActivityProbe {
 public:
  void NoteCall(EventRef done);
  void NoteGroup(std::vector<EventRef> after, EventRef done);

  // True if transfers are in flight (everything they waited for is done, they are
  // not) while the device has nothing that it could compute.
  bool WaitsForPeer(const Device& device) const;

 private:
  struct Group {
    std::vector<EventRef> after;
    EventRef done;
  };

  mutable absl::Mutex mutex_;
  EventRef last_call_ ABSL_GUARDED_BY(mutex_);
  mutable std::deque<Group> groups_ ABSL_GUARDED_BY(mutex_);
};

// Passes everything on and tells the probe. As thread safe as what it wraps.
class ObservedDevice : public Device {
 public:
  ObservedDevice(Device* inner, ActivityProbe* probe) : inner_(inner), probe_(probe) {}

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    return inner_->Allocate(bytes);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override {
    return inner_->WorkspaceBytes(calls);
  }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    return inner_->Prepare(std::move(calls));
  }
  EventRef Start(const PreparedCall& call, std::vector<EventRef> after,
                 RunControl* control) override;
  bool waits_for_transfer() const override { return inner_->waits_for_transfer(); }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override {
    return inner_->CopyFromHost(device, host, bytes);
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override {
    return inner_->CopyToHost(host, device, bytes);
  }
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(void* target, int64_t bytes) override {
    return inner_->BeginUpload(target, bytes);
  }
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) override {
    return inner_->BeginDownload(std::move(ranges), std::move(on_ready));
  }
  DeviceUsage usage() const override { return inner_->usage(); }
  std::string description() const override { return inner_->description(); }

 private:
  Device* const inner_;
  ActivityProbe* const probe_;
};

class ObservedCommunicator : public Communicator {
 public:
  ObservedCommunicator(std::shared_ptr<Communicator> inner, ActivityProbe* probe)
      : inner_(std::move(inner)), probe_(probe) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string transport() const override { return inner_->transport(); }
  bool takes_compute_units() const override { return inner_->takes_compute_units(); }
  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                 RunControl* control) override;
  void Abort(const std::string& reason) override { inner_->Abort(reason); }

 private:
  const std::shared_ptr<Communicator> inner_;
  ActivityProbe* const probe_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_ACTIVITY_PROBE_H_
