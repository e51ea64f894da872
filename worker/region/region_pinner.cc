#include "worker/region/region_pinner.h"

#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log.h"

namespace ringattn::worker {
namespace {

constexpr size_t kMaxKnown = 1024;
// A wait for operations is this long at a time, and so is a wait of the destructor.
constexpr absl::Duration kWaitSlice = absl::Milliseconds(10);

}  // namespace

class RegionPinner::Budget {
 public:
  Budget(int64_t max_bytes, std::function<void(int64_t)> on_pinned)
      : max_bytes_(max_bytes), on_pinned_(std::move(on_pinned)) {}

  bool Take(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    if (bytes > max_bytes_ - pinned_bytes_) return false;
    Change(bytes);
    return true;
  }
  void Give(int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    Change(-bytes);
  }
  // The owner of the metric is being destroyed.
  void Close() {
    absl::MutexLock lock(&mutex_);
    on_pinned_ = nullptr;
  }
  int64_t pinned_bytes() const {
    absl::MutexLock lock(&mutex_);
    return pinned_bytes_;
  }

 private:
  void Change(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    pinned_bytes_ += bytes;
    if (on_pinned_) on_pinned_(pinned_bytes_);
  }

  const int64_t max_bytes_;
  mutable absl::Mutex mutex_;
  std::function<void(int64_t)> on_pinned_ ABSL_GUARDED_BY(mutex_);
  int64_t pinned_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

class RegionPinner::CountedPin : public HostPin {
 public:
  CountedPin(std::unique_ptr<HostPin> pin, int64_t bytes, std::shared_ptr<Budget> budget)
      : pin_(std::move(pin)), bytes_(bytes), budget_(std::move(budget)) {}
  ~CountedPin() override {
    pin_.reset();
    budget_->Give(bytes_);
  }

 private:
  std::unique_ptr<HostPin> pin_;
  const int64_t bytes_;
  const std::shared_ptr<Budget> budget_;
};

RegionPinner::RegionPinner(Device* device, int64_t max_bytes,
                           std::function<void(int64_t bytes)> on_pinned,
                           AwaitNoPeers await_no_peers)
    : device_(device),
      budget_(std::make_shared<Budget>(max_bytes, std::move(on_pinned))),
      await_no_peers_(std::move(await_no_peers)) {
  thread_ = std::thread([this] { Run(); });
}

RegionPinner::~RegionPinner() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
  budget_->Close();
}

int64_t RegionPinner::pinned_bytes() const { return budget_->pinned_bytes(); }

void RegionPinner::Schedule(const std::shared_ptr<Region>& region) {
  absl::MutexLock lock(&mutex_);
  if (unsupported_ || region->released()) return;
  if (std::find(known_.begin(), known_.end(), region->id()) != known_.end()) return;
  known_.push_back(region->id());
  if (known_.size() > kMaxKnown) known_.pop_front();
  scheduled_.push_back(region);
}

void RegionPinner::Run() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !scheduled_.empty();
  };
  while (true) {
    std::shared_ptr<Region> region;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (stopping_) return;
      region = scheduled_.front().lock();
      scheduled_.pop_front();
    }
    if (region != nullptr && !PinWhole(*region)) return;
  }
}

bool RegionPinner::PinWhole(Region& region) {
  // Pins all of a region or nothing, so that all tensors of a region are copied in the same way.
  if (!budget_->Take(region.bytes())) {
    LogInfo("a region is not pinned, because the limit is reached (--pin_local_memory)",
            {{"bytes", region.bytes()}});
    return true;
  }
  bool stopping = false;
  while (!stopping && region.pinned_bytes() < region.bytes() && !region.released()) {
    stopping = !AwaitTurn(region);
    if (stopping || region.released()) break;
    const absl::Time begin = MonotonicNow();
    if (!PinNextPiece(region)) break;
    // Pauses for as long as the pin took, so that others can use the driver.
    const absl::Duration pause = MonotonicNow() - begin;
    absl::MutexLock lock(&mutex_);
    stopping = mutex_.AwaitWithTimeout(absl::Condition(&stopping_), pause);
  }
  budget_->Give(region.bytes() - region.pinned_bytes());
  return !stopping;
}

bool RegionPinner::AwaitTurn(const Region& region) {
  const absl::Time end = MonotonicNow() + kLongestWait;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return false;
    }
    const absl::Time now = MonotonicNow();
    if (now >= end || region.released()) return true;
    if (await_no_peers_(std::min(end, now + kWaitSlice))) return true;
  }
}

bool RegionPinner::PinNextPiece(Region& region) {
  const int64_t begin = region.pinned_bytes();
  const int64_t bytes = std::min(Region::kPinBytes, region.bytes() - begin);
  absl::StatusOr<std::unique_ptr<HostPin>> pin = device_->PinHost(region.data() + begin, bytes);
  if (pin.ok()) {
    region.AddPin(std::make_unique<CountedPin>(*std::move(pin), bytes, budget_));
    return true;
  }
  if (absl::IsUnimplemented(pin.status())) {
    absl::MutexLock lock(&mutex_);
    unsupported_ = true;
    scheduled_.clear();
  } else {
    LogWarning("a region cannot be pinned; its copies are staged",
               {{"bytes", region.bytes()}, {"reason", std::string(pin.status().message())}});
  }
  return false;
}

}  // namespace ringattn::worker
