// YieldLoss: the time that the yields of one active wait gave to other threads.
//
// Tests: step_ring_test.cc
#ifndef RINGATTN_COMMON_STEP_RING_YIELD_LOSS_H_
#define RINGATTN_COMMON_STEP_RING_YIELD_LOSS_H_

#include <chrono>

namespace ringattn {

// Not thread safe.
class YieldLoss {
 public:
  // A yield that returns to the same thread takes less than a microsecond.
  static constexpr std::chrono::microseconds kLongYield{20};
  // Interrupts and short work of other threads take tens of microseconds, now and then. A thread
  // that computes keeps the processor for milliseconds.
  static constexpr std::chrono::microseconds kMost{200};

  // Adds a yield. Returns whether processors are scarce.
  bool Add(std::chrono::steady_clock::duration yield) {
    if (yield >= kLongYield) lost_ += yield;
    return lost_ >= kMost;
  }

 private:
  std::chrono::steady_clock::duration lost_{0};
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_STEP_RING_YIELD_LOSS_H_
