// LoadLevel: calls at one level of load, for as long as the value lives.
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

namespace ringattn::client::load {

struct LoadShape {
  // So many calls in flight, each followed by the next. With a rate: at most so many.
  int concurrency = 1;
  // Above 0: calls begin at this rate, per second, whether or not earlier ones have ended.
  double rate = 0;
  // Of a rate: gaps are drawn from an exponential distribution, as of independent clients, rather
  // than all equal.
  bool poisson = false;
  uint32_t seed = 1;
};

// Makes one call and says how it went; `slot` is the caller's own while it runs, 0 <= slot <
// concurrency. due, began and ended are filled in by LoadLevel.
using MakeCall = std::function<CallSample(int slot)>;

class LoadLevel {
 public:
  // Begins at once, on threads of its own.
  LoadLevel(LoadShape shape, MakeCall call);
  // Waits for the calls in flight.
  ~LoadLevel();

  LoadLevel(const LoadLevel&) = delete;
  LoadLevel& operator=(const LoadLevel&) = delete;

  // Waits until `deadline` has passed and `count` calls or more have ended since the last Take, and
  // gives them. Calls that take for ever are the caller's to bound.
  std::vector<CallSample> Take(absl::Time deadline, size_t count) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Work(int slot) ABSL_LOCKS_EXCLUDED(mutex_);
  // When the next call of a schedule is due; the present without one.
  absl::Time NextDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LoadShape shape_;
  const MakeCall call_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time next_due_ ABSL_GUARDED_BY(mutex_) = absl::Now();
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  std::vector<CallSample> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last: they use the others
};

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LOAD_LEVEL_H_
