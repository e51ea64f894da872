#include "server/core/loss/host_losses.h"

#include <algorithm>
#include <utility>

namespace ringattn::server {
namespace {

// Returns whether the host may be the cause.
bool MayBeTheHost(LossReason reason) {
  return reason == LossReason::kDisconnected || reason == LossReason::kSilent ||
         reason == LossReason::kNoAnswer;
}

}  // namespace

void HostLosses::Add(LostWorker loss, const std::string& host) {
  if (host.empty() || !MayBeTheHost(loss.reason)) return Emit("", {std::move(loss)});
  const auto [found, is_new] = waits_.try_emplace(host);
  Wait& wait = found->second;
  if (is_new) {
    // Workers of a dead host become silent within one heartbeat, and a tick notices each.
    wait.until = batch_.now() + config_.heartbeat_interval + 2 * config_.tick_interval;
  }
  wait.lost.push_back(std::move(loss));
  if (HasWorkers(host)) return;
  Emit(host, std::move(wait.lost));
  waits_.erase(found);
}

void HostLosses::Advance() {
  for (auto wait = waits_.begin(); wait != waits_.end();) {
    if (batch_.now() < wait->second.until) {
      ++wait;
      continue;
    }
    for (LostWorker& loss : wait->second.lost) Emit("", {std::move(loss)});
    wait = waits_.erase(wait);
  }
}

bool HostLosses::Settled() const {
  const auto& workers = roster_.workers();
  return std::all_of(waits_.begin(), waits_.end(), [&workers](const auto& wait) {
    return std::all_of(workers.begin(), workers.end(), [&wait](const auto& entry) {
      return entry.second.registration.location().host() == wait.first;
    });
  });
}

void HostLosses::Forgive(absl::Duration pause) {
  for (auto& [host, wait] : waits_) {
    wait.until += pause;
  }
}

bool HostLosses::HasWorkers(const std::string& host) const {
  const auto& workers = roster_.workers();
  return std::any_of(workers.begin(), workers.end(), [&host](const auto& entry) {
    return entry.second.registration.location().host() == host;
  });
}

void HostLosses::Emit(const std::string& host, std::vector<LostWorker> lost) {
  const bool whole = lost.size() > 1;
  batch_.Emit(LossEvent{batch_.now(), whole ? host : "", std::move(lost)});
}

}  // namespace ringattn::server
