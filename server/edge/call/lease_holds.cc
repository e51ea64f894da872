#include "server/edge/call/lease_holds.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::server {
namespace {

Failure TooManyHolds(const char* method, absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.message =
      absl::StrCat("too many ", method, " streams are open; one stream holds many leases");
  failure.reason = "TOO_MANY_HOLDS";
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

std::optional<Failure> LeaseHolds::Enter(Stream* stream, const Caller& caller,
                                         absl::Duration retry_after) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return ServerEnds(retry_after);
  const int64_t of_client = std::count_if(streams_.begin(), streams_.end(), [&](const auto& each) {
    return each.second.caller.client == caller.client;
  });
  if (static_cast<int64_t>(streams_.size()) >= limits_.max_residual_holds ||
      of_client >= limits_.max_residual_holds_per_client) {
    return TooManyHolds(method_, retry_after);
  }
  streams_[stream].caller = caller;
  return std::nullopt;
}

void LeaseHolds::Hold(Stream* stream, const std::vector<std::string>& ids) {
  absl::MutexLock lock(&mutex_);
  streams_.at(stream).ids.insert(ids.begin(), ids.end());
}

void LeaseHolds::Release(Stream* stream, const std::vector<std::string>& ids) {
  absl::MutexLock lock(&mutex_);
  for (const std::string& id : ids) streams_.at(stream).ids.erase(id);
}

std::optional<Renewal> LeaseHolds::Leave(Stream* stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return std::nullopt;
  const Held held = std::move(found->second);
  streams_.erase(found);
  Renewal left{{}, held.caller.principal, limits_.residual_hold_grace};
  for (const std::string& id : held.ids) {
    const bool others = std::any_of(streams_.begin(), streams_.end(), [&](const auto& each) {
      return each.second.caller.principal == held.caller.principal && each.second.ids.count(id) > 0;
    });
    if (!others) left.ids.push_back(id);
  }
  return left;
}

std::vector<Renewal> LeaseHolds::Due(absl::Time now, const IsKept& is_kept) {
  absl::MutexLock lock(&mutex_);
  if (now < renewed_at_ + limits_.residual_hold_ttl / 3) return {};
  renewed_at_ = now;
  std::map<std::string, std::set<std::string>> by_principal;
  for (auto& [stream, held] : streams_) {
    const std::string& principal = held.caller.principal;
    for (auto next = held.ids.begin(); next != held.ids.end();) {
      const auto id = next++;
      if (is_kept(*id, principal)) {
        by_principal[principal].insert(*id);
      } else {
        held.ids.erase(id);
      }
    }
  }
  std::vector<Renewal> due;
  for (const auto& [principal, ids] : by_principal) {
    due.push_back({{ids.begin(), ids.end()}, principal, limits_.residual_hold_ttl});
  }
  return due;
}

void LeaseHolds::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (const auto& [stream, held] : streams_) stream->OnClosed();
}

int64_t LeaseHolds::streams() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(streams_.size());
}

}  // namespace ringattn::server
