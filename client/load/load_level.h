// LoadLevel: makes calls at one level of load during its lifetime.
// Tests: load_test.cc.
#ifndef RINGATTN_CLIENT_LOAD_LOAD_LEVEL_H_
#define RINGATTN_CLIENT_LOAD_LOAD_LEVEL_H_

#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/load/call_sample.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client::load {

struct LoadShape {
  // Calls in flight, each followed by the next one. With a rate: the maximum.
  int concurrency = 1;
  // Above 0: calls start at this rate per second, whether or not earlier calls have ended.
  double rate = 0;
  // With a rate: exponentially distributed gaps, as from independent clients, instead of equal
  // ones.
  bool poisson = false;
  uint32_t seed = 1;
};

// Makes one call and returns its sample. `slot` is exclusive to the call, 0 <= slot < concurrency.
// LoadLevel fills in due, began and ended.
using MakeCall = std::function<CallSample(int slot)>;

class LoadLevel {
 public:
  // Starts at once, on new threads.
  LoadLevel(LoadShape shape, MakeCall call);
  // Waits for the calls in flight.
  ~LoadLevel();

  LoadLevel(const LoadLevel&) = delete;
  LoadLevel& operator=(const LoadLevel&) = delete;

  // Waits until `deadline` has passed and at least `count` calls have ended since the last Take,
  // and returns those. The caller must bound the duration of calls.
  std::vector<CallSample> Take(absl::Time deadline, size_t count) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Work(int slot) ABSL_LOCKS_EXCLUDED(mutex_);
  // When the next call of the schedule is due; now, without a schedule.
  absl::Time NextDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LoadShape shape_;
  const MakeCall call_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time next_due_ ABSL_GUARDED_BY(mutex_) = MonotonicNow();
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallSample> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last, because they use the others
};

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LOAD_LEVEL_H_
