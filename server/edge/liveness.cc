#include "server/edge/liveness.h"

#include <algorithm>
#include <utility>

namespace ringattn::server {

Liveness::Liveness(const LivenessOptions& options, Handlers handlers)
    : options_(options), handlers_(std::move(handlers)), thread_([this] { Run(); }) {}

Liveness::~Liveness() {
  stop_.Notify();
  thread_.join();
}

void Liveness::Run() {
  bool alive = true;
  bool dead = false;
  absl::Time failing_since = absl::InfiniteFuture();
  while (true) {
    const absl::Status status = handlers_.probe(options_.probe_timeout);
    const absl::Time now = MonotonicNow();
    failing_since = status.ok() ? absl::InfiniteFuture() : std::min(failing_since, now);
    const bool alive_now = now - failing_since < options_.unhealthy_after;
    if (alive_now != alive) handlers_.on_change(status);
    alive = alive_now;
    if (!dead && now - failing_since >= options_.dead_after) {
      dead = true;
      handlers_.on_dead(status);
    }
    if (stop_.WaitFor(options_.interval)) return;
  }
}

}  // namespace ringattn::server
