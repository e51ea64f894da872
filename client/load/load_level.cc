#include "client/load/load_level.h"

#include <utility>

#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::load {

LoadLevel::LoadLevel(LoadShape shape, MakeCall call)
    : shape_(shape), call_(std::move(call)), random_(shape.seed) {
  for (int slot = 0; slot < shape_.concurrency; ++slot) {
    threads_.emplace_back([this, slot] { Work(slot); });
  }
}

LoadLevel::~LoadLevel() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Time LoadLevel::NextDue() {
  if (shape_.rate <= 0) return MonotonicNow();
  const absl::Time due = next_due_;
  const double gap = shape_.poisson ? std::exponential_distribution<double>(shape_.rate)(random_)
                                    : 1 / shape_.rate;
  next_due_ = due + absl::Seconds(gap);
  return due;
}

void LoadLevel::Work(int slot) {
  const auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
  while (true) {
    absl::Time due;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      due = NextDue();
      if (AwaitUntil(mutex_, absl::Condition(&stopping), due)) return;
    }
    const absl::Time began = MonotonicNow();
    CallSample sample = call_(slot);
    sample.due = shape_.rate > 0 ? due : began;
    sample.began = began;
    sample.ended = MonotonicNow();
    absl::MutexLock lock(&mutex_);
    ended_.push_back(std::move(sample));
  }
}

std::vector<CallSample> LoadLevel::Take(absl::Time deadline, size_t count) {
  absl::SleepFor(deadline - MonotonicNow());
  const auto enough = [this, count]()
                          ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ended_.size() >= count; };
  absl::MutexLock lock(&mutex_, absl::Condition(&enough));
  return std::exchange(ended_, {});
}

}  // namespace ringattn::client::load
