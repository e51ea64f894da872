// SharedWord: a 32-bit counter in memory that two processes share. One side stores the counter, and
// the other side waits until it changes, first actively and then asleep on a futex.
//
// Memory: 8 bytes at a multiple of 8. Bytes 0 to 3 are the counter, the futex word. Bytes 4 to 7
// are not zero while the waiting side sleeps; the storing side wakes it only then. Each word should
// have a separate cache line.
//
// Memory order: everything that the storing side wrote before Store is visible to the other side
// after Load or Wait has returned the stored value. Both fields are accessed with sequential
// consistency. So either the storing side sees the sleeper, or the sleeper sees the new value
// before it sleeps.
//
// The other process may write any value at any time. It can then lose its own wake-ups and cause
// superfluous ones, which Wait hides; the time of a Wait stays bounded.
//
// Tests: step_ring_test.cc
#ifndef RINGATTN_COMMON_STEP_RING_SHARED_WORD_H_
#define RINGATTN_COMMON_STEP_RING_SHARED_WORD_H_

#include <atomic>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace ringattn {

// Thread safe for one storing and one waiting thread; Interrupt may run on any thread.
class SharedWord {
 public:
  static constexpr int64_t kBytes = 8;

  // How a wait ended.
  enum class Wake {
    kActive,   // the value had changed, or changed during the active wait
    kAsleep,   // the value changed while this thread slept
    kTimeout,  // it has not changed, or `stop` was set
  };

  // `memory` must outlive this object.
  explicit SharedWord(uint8_t* memory);

  uint32_t Load() const { return counter_->load(); }
  // Publishes all earlier writes of this thread, and wakes the other side if it sleeps.
  void Store(uint32_t value);

  // Waits until the counter is not `value`: actively for `spin`, then asleep for at most `sleep`.
  // The active wait yields the processor to other threads. If they keep it for long (YieldLoss),
  // processors are scarce: this wait sleeps at once, and so do the next ones for a while. Returns
  // early once `stop`, which may be null, is set; after Interrupt at once, otherwise before the
  // time is over.
  Wake Wait(uint32_t value, absl::Duration spin, absl::Duration sleep,
            const std::atomic<bool>* stop = nullptr);
  // The same without `stop`, but the active wait also ends, with kActive, once `other` returns
  // true.
  Wake WaitOr(absl::FunctionRef<bool()> other, uint32_t value, absl::Duration spin,
              absl::Duration sleep);
  // Wakes a sleeping Wait of this process. A Wait that is about to sleep may miss it.
  void Interrupt();

 private:
  // Returns true if `ended` did. Waiting thread only.
  bool WaitActively(absl::FunctionRef<bool()> ended, absl::Duration spin,
                    const std::atomic<bool>* stop);
  // Waits without an active wait.
  Wake Sleep(uint32_t value, absl::Duration sleep, const std::atomic<bool>* stop);

  std::atomic<uint32_t>* const counter_;
  std::atomic<uint32_t>* const sleeping_;
  int sleepy_waits_ = 0;  // so many waits sleep at once
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_STEP_RING_SHARED_WORD_H_
