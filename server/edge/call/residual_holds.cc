#include "server/edge/call/residual_holds.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::server {
namespace {

Failure TooManyHolds(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.message = "too many HoldResiduals streams are open; one stream can hold all residuals";
  failure.reason = "TOO_MANY_HOLDS";
  failure.retry_after = retry_after;
  return failure;
}

Failure Closed(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kUnavailable;
  failure.message = "the server is shutting down";
  failure.reason = "SHUTTING_DOWN";
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

std::optional<Failure> ResidualHolds::Enter(Stream* stream, const Caller& caller,
                                            absl::Duration retry_after) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return Closed(retry_after);
  const int64_t of_client = std::count_if(streams_.begin(), streams_.end(), [&](const auto& each) {
    return each.second.caller.client == caller.client;
  });
  if (static_cast<int64_t>(streams_.size()) >= limits_.max_residual_holds ||
      of_client >= limits_.max_residual_holds_per_client) {
    return TooManyHolds(retry_after);
  }
  streams_[stream].caller = caller;
  return std::nullopt;
}

void ResidualHolds::Hold(Stream* stream, const std::vector<std::string>& handles) {
  absl::MutexLock lock(&mutex_);
  streams_.at(stream).handles.insert(handles.begin(), handles.end());
}

void ResidualHolds::Release(Stream* stream, const std::vector<std::string>& handles) {
  absl::MutexLock lock(&mutex_);
  for (const std::string& handle : handles) streams_.at(stream).handles.erase(handle);
}

std::optional<ResidualsRenewed> ResidualHolds::Leave(Stream* stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return std::nullopt;
  const Held held = std::move(found->second);
  streams_.erase(found);
  ResidualsRenewed left{{}, held.caller.principal, limits_.residual_hold_grace};
  for (const std::string& handle : held.handles) {
    const bool others = std::any_of(streams_.begin(), streams_.end(), [&](const auto& each) {
      return each.second.caller.principal == held.caller.principal &&
             each.second.handles.count(handle) > 0;
    });
    if (!others) left.handles.push_back(handle);
  }
  return left;
}

std::vector<ResidualsRenewed> ResidualHolds::Due(absl::Time now, const IsKept& is_kept) {
  absl::MutexLock lock(&mutex_);
  if (now < renewed_at_ + limits_.residual_hold_ttl / 3) return {};
  renewed_at_ = now;
  std::map<std::string, std::set<std::string>> by_principal;
  for (auto& [stream, held] : streams_) {
    const std::string& principal = held.caller.principal;
    for (auto next = held.handles.begin(); next != held.handles.end();) {
      const auto handle = next++;
      if (is_kept(*handle, principal)) {
        by_principal[principal].insert(*handle);
      } else {
        held.handles.erase(handle);
      }
    }
  }
  std::vector<ResidualsRenewed> due;
  for (const auto& [principal, handles] : by_principal) {
    due.push_back({{handles.begin(), handles.end()}, principal, limits_.residual_hold_ttl});
  }
  return due;
}

void ResidualHolds::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (const auto& [stream, held] : streams_) stream->OnClosed();
}

int64_t ResidualHolds::streams() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(streams_.size());
}

}  // namespace ringattn::server
