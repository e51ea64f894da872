#include "worker/comm/contract/host_ranks.h"

#include <cstring>
#include <thread>
#include <utility>

#include "worker/device/host_queue.h"

namespace ringattn::worker {
namespace {

class HostRank : public TestRank {
 public:
  explicit HostRank(std::unique_ptr<RingTransport> transport)
      : transport_(std::move(transport)), queue_("test_device") {}

  RingTransport& transport() override { return *transport_; }
  void* Allocate(int64_t bytes) override { return ::operator new(bytes); }
  void Free(void* data) override { ::operator delete(data); }
  void Write(void* data, const void* host, int64_t bytes) override {
    if (bytes > 0) std::memcpy(data, host, bytes);
  }
  void Read(void* host, const void* data, int64_t bytes) override { Write(host, data, bytes); }
  EventRef FillWhen(const std::atomic<bool>* go, void* data, int64_t bytes,
                    uint8_t value) override {
    return queue_.Start(
        [=] {
          while (!go->load()) std::this_thread::yield();
          std::memset(data, value, bytes);
          return absl::OkStatus();
        },
        {}, HostQueue::OnFailure::kRun);
  }

 private:
  const std::unique_ptr<RingTransport> transport_;
  HostQueue queue_;
};

}  // namespace

std::vector<std::unique_ptr<TestRank>> MakeHostRanks(
    const TestRankOptions& options,
    const std::function<std::unique_ptr<RingTransport>(int rank)>& make_transport) {
  std::vector<std::unique_ptr<TestRank>> ranks;
  for (int rank = 0; rank < options.world_size; ++rank) {
    ranks.push_back(std::make_unique<HostRank>(make_transport(rank)));
  }
  return ranks;
}

}  // namespace ringattn::worker
