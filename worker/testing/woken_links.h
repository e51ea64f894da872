// Transports whose rings count how often their links were to be waked (Communicator::WakeLinks).
#ifndef RINGATTN_WORKER_TESTING_WOKEN_LINKS_H_
#define RINGATTN_WORKER_TESTING_WOKEN_LINKS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringattn::worker {

class WokenRing : public Communicator {
 public:
  // `count` outlives the ring.
  WokenRing(std::unique_ptr<Communicator> inner, std::atomic<int>* count)
      : inner_(std::move(inner)), count_(count) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string transport() const override { return inner_->transport(); }
  bool takes_compute_units() const override { return inner_->takes_compute_units(); }
  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                 RunControl* control) override {
    return inner_->Start(std::move(group), std::move(after), control);
  }
  void WakeLinks() override { ++*count_; }
  void Abort(const std::string& reason) override { inner_->Abort(reason); }

 private:
  const std::unique_ptr<Communicator> inner_;
  std::atomic<int>* const count_;
};

class WokenLinks : public RingTransport {
 public:
  explicit WokenLinks(std::unique_ptr<RingTransport> inner) : inner_(std::move(inner)) {}

  int count() const { return count_; }

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    return inner_->Prepare(generation, rank, world_size);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override {
    auto ring = inner_->Connect(generation, blobs, deadline);
    if (!ring.ok()) return ring.status();
    return std::make_unique<WokenRing>(*std::move(ring), &count_);
  }
  void Cancel() override { inner_->Cancel(); }

 private:
  const std::unique_ptr<RingTransport> inner_;
  std::atomic<int> count_{0};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_WOKEN_LINKS_H_
