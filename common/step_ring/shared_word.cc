#include "common/step_ring/shared_word.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

#include "common/step_ring/yield_loss.h"

namespace ringattn {
namespace {

using Clock = std::chrono::steady_clock;

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4);

// Reads of the word between two yields: about a microsecond at first, then up to 10. Each yield
// pushes code of this process out of the first-level cache.
constexpr int kLeastReads = 32;
constexpr int kMostReads = 256;
constexpr int kSleepyWaits = 64;

std::atomic<uint32_t>* WordAt(uint8_t* memory) {
  return reinterpret_cast<std::atomic<uint32_t>*>(memory);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the other side is another process. May return at any time.
void FutexWait(std::atomic<uint32_t>* word, uint32_t value, absl::Duration timeout) {
  const timespec relative = absl::ToTimespec(timeout);
  syscall(SYS_futex, word, FUTEX_WAIT, value, &relative, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

SharedWord::SharedWord(uint8_t* memory) : counter_(WordAt(memory)), sleeping_(WordAt(memory + 4)) {}

void SharedWord::Store(uint32_t value) {
  counter_->store(value);
  if (sleeping_->load() != 0) FutexWakeAll(counter_);
}

void SharedWord::Interrupt() { FutexWakeAll(counter_); }

bool SharedWord::WaitActively(absl::FunctionRef<bool()> ended, absl::Duration spin,
                              const std::atomic<bool>* stop) {
  if (spin <= absl::ZeroDuration()) return false;
  if (sleepy_waits_ > 0) {
    --sleepy_waits_;
    return false;
  }
  Clock::time_point now = Clock::now();
  const Clock::time_point end = now + absl::ToChronoNanoseconds(spin);
  YieldLoss loss;
  int reads = kLeastReads;
  while (now < end) {
    for (int i = 0; i < reads; ++i) {
      if (ended()) return true;
      Pause();
    }
    if (stop != nullptr && stop->load()) return false;
    const Clock::time_point before = Clock::now();
    sched_yield();
    now = Clock::now();
    reads = std::min(2 * reads, kMostReads);
    if (!loss.Add(now - before)) continue;
    sleepy_waits_ = kSleepyWaits;
    return ended();
  }
  return false;
}

SharedWord::Wake SharedWord::Wait(uint32_t value, absl::Duration spin, absl::Duration sleep,
                                  const std::atomic<bool>* stop) {
  const auto changed = [&] { return Load() != value; };
  if (changed() || WaitActively(changed, spin, stop)) return Wake::kActive;
  return Sleep(value, sleep, stop);
}

SharedWord::Wake SharedWord::WaitOr(absl::FunctionRef<bool()> other, uint32_t value,
                                    absl::Duration spin, absl::Duration sleep) {
  const auto ended = [&] { return Load() != value || other(); };
  if (ended() || WaitActively(ended, spin, nullptr)) return Wake::kActive;
  return Sleep(value, sleep, nullptr);
}

SharedWord::Wake SharedWord::Sleep(uint32_t value, absl::Duration sleep,
                                   const std::atomic<bool>* stop) {
  const Clock::time_point end = Clock::now() + absl::ToChronoNanoseconds(sleep);
  Wake wake = Wake::kTimeout;
  sleeping_->store(1);
  while (true) {
    if (Load() != value) {
      wake = Wake::kAsleep;
      break;
    }
    const Clock::duration left = end - Clock::now();
    if ((stop != nullptr && stop->load()) || left <= Clock::duration::zero()) break;
    FutexWait(counter_, value, absl::FromChrono(left));
  }
  sleeping_->store(0);
  return wake;
}

}  // namespace ringattn
