// Virtual time: runs callbacks in order of their times, as fast as it can.
#ifndef RINGATTN_TESTS_SIMULATION_SCHEDULER_H_
#define RINGATTN_TESTS_SIMULATION_SCHEDULER_H_

#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace ringattn::server::simulation {

// Not thread safe. Callbacks of one time run in the order in which they were added.
class Scheduler {
 public:
  absl::Time now() const { return now_; }

  void At(absl::Time time, std::function<void()> callback) {
    queue_.push({std::max(time, now_), ++sequence_, std::move(callback)});
  }
  void After(absl::Duration delay, std::function<void()> callback) {
    At(now_ + delay, std::move(callback));
  }

  // Runs the next callback. False if there is none.
  bool RunOne() {
    if (queue_.empty()) return false;
    std::function<void()> callback = std::move(const_cast<Entry&>(queue_.top()).callback);
    now_ = queue_.top().time;
    queue_.pop();
    callback();
    return true;
  }

 private:
  struct Entry {
    absl::Time time;
    uint64_t sequence;
    std::function<void()> callback;

    bool operator<(const Entry& other) const {  // the queue's top is the greatest
      return std::tie(time, sequence) > std::tie(other.time, other.sequence);
    }
  };

  absl::Time now_ = absl::FromUnixSeconds(1000);
  uint64_t sequence_ = 0;
  std::priority_queue<Entry> queue_;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_SCHEDULER_H_
