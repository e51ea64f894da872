#include "client/cli/bench/word_ping_pong.h"

#include <chrono>
#include <cstdint>
#include <thread>

#include "absl/time/time.h"
#include "common/step_ring/shared_word.h"

namespace ringattn::client::cli {
namespace {

using PingPongClock = std::chrono::steady_clock;

constexpr absl::Duration kPingPongSleep = absl::Seconds(1);

// The other thread can run on a machine with one processor.
constexpr int kLoadsPerYield = 1024;
// On a busy machine a round trip may take milliseconds.
constexpr std::chrono::milliseconds kPingPongTime{250};
constexpr uint32_t kPingPongEnd = UINT32_MAX;

// Waits until the word is not `value`, and returns it.
uint32_t AwaitChange(SharedWord* word, uint32_t value, bool sleeps) {
  int loads = 0;
  while (word->Load() == value) {
    if (sleeps) {
      word->Wait(value, absl::ZeroDuration(), kPingPongSleep);
    } else if (++loads % kLoadsPerYield == 0) {
      std::this_thread::yield();
    }
  }
  return word->Load();
}

}  // namespace

std::vector<double> MeasureWordRoundTrips(int count, bool sleeps) {
  alignas(64) uint8_t memory[128] = {};  // a cache line for each word
  SharedWord ping(memory), pong(memory + 64);
  std::thread other([&] {
    for (uint32_t seen = 0; seen != kPingPongEnd;) {
      seen = AwaitChange(&ping, seen, sleeps);
      pong.Store(seen);
    }
  });
  std::vector<double> seconds;
  const auto end = PingPongClock::now() + kPingPongTime;
  for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
    const auto begun = PingPongClock::now();
    if (i > 0 && begun > end) break;
    ping.Store(i + 1);
    AwaitChange(&pong, i, sleeps);
    seconds.push_back(std::chrono::duration<double>(PingPongClock::now() - begun).count());
  }
  ping.Store(kPingPongEnd);
  other.join();
  return seconds;
}

}  // namespace ringattn::client::cli
