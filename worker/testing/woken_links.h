// Transports whose rings count calls of Communicator::WakeLinks.
#ifndef RINGATTN_WORKER_TESTING_WOKEN_LINKS_H_
#define RINGATTN_WORKER_TESTING_WOKEN_LINKS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/comm/communicator_wrapper.h"

namespace ringattn::worker {

class WokenRing : public CommunicatorWrapper {
 public:
  // `count` must outlive the ring.
  WokenRing(std::unique_ptr<Communicator> inner, std::atomic<int>* count)
      : CommunicatorWrapper(std::move(inner)), count_(count) {}

  void WakeLinks() override { ++*count_; }

 private:
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
