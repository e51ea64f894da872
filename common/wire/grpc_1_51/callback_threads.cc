#include "common/wire/grpc_1_51/callback_threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace ringattn::wire {
namespace {

std::atomic<unsigned> reported_processors{0};  // 0: the machine's

unsigned Processors() {
  static const unsigned machine =
      static_cast<unsigned>(std::max(1L, sysconf(_SC_NPROCESSORS_CONF)));
  return machine;
}

}  // namespace

void SetCallbackThreads(int threads) {
  reported_processors.store(2 * static_cast<unsigned>(threads));
}

int DefaultCallbackThreads(int processors) {
  return std::clamp(std::max(std::min(processors / 2, 4), processors / 4), kLeastCallbackThreads,
                    kMostCallbackThreads);
}

int ServingCallbackThreads(int processors) { return processors <= 2 ? 1 : 2; }

int ServingCallbackThreads() { return ServingCallbackThreads(static_cast<int>(Processors())); }

int DefaultCallbackThreads() { return DefaultCallbackThreads(static_cast<int>(Processors())); }

}  // namespace ringattn::wire

// gRPC sizes arrays by this number and indexes them by the one below.
extern "C" unsigned gpr_cpu_num_cores(void) {
  const unsigned reported = ringattn::wire::reported_processors.load(std::memory_order_relaxed);
  return reported > 0 ? reported : ringattn::wire::Processors();
}

extern "C" unsigned gpr_cpu_current_cpu(void) {
  const int processor = sched_getcpu();
  return processor < 0 ? 0 : static_cast<unsigned>(processor) % gpr_cpu_num_cores();
}
