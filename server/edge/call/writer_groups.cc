#include "server/edge/call/writer_groups.h"

#include <algorithm>
#include <variant>

#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "common/request/transport_rules.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/request_call.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {

void WriterGroups::Join(std::shared_ptr<RequestCall> call, WriterHeader header) {
  const WriterKey key = header.key;
  const int index = header.transport.writer->index;
  std::shared_ptr<RequestCall> replaced;
  Calls differing;  // the streams of a group that the header does not match
  std::optional<Group> complete;
  {
    absl::MutexLock lock(&mutex_);
    auto found = groups_.find(key);
    if (found != groups_.end() && found->second.started) {
      // The earlier request ends, because it has lost a writer. Its client retries, or has retried.
      replaced = found->second.calls[std::min<size_t>(index, found->second.calls.size() - 1)];
      groups_.erase(found);
      found = groups_.end();
    } else if (found != groups_.end() && !Matches(found->second, header)) {
      differing = std::move(found->second.calls);
      groups_.erase(found);
    }
    if (differing.empty()) {
      Group& group = groups_[key];
      if (group.count == 0) {
        group.count = header.transport.writer->count;
        group.since = MonotonicNow();
        group.calls.resize(group.count);
        group.choices.resize(group.count);
        group.first = header;
        group.first.transport = {};
      }
      if (group.calls[index] != nullptr) replaced = std::move(group.calls[index]);
      group.calls[index] = call;
      group.choices[index] = std::move(header.transport);
      if (std::find(group.calls.begin(), group.calls.end(), nullptr) == group.calls.end()) {
        group.started = true;
        std::vector<TransportChoice> choices;
        choices.swap(group.choices);
        complete = group;
        complete->choices = std::move(choices);
      }
    }
  }
  if (!differing.empty()) {
    const Failure failure = WritersDiffer(index);
    FailAll(differing, failure);
    return call->FailWriter(failure);
  }
  if (replaced != nullptr) replaced->LeaveWriters(WriterReplaced(index));
  if (complete.has_value()) Start(*std::move(complete), key);
}

bool WriterGroups::Matches(const Group& group, const WriterHeader& header) {
  return group.count == header.transport.writer->count &&
         group.first.fingerprint == header.fingerprint && group.first.direction == header.direction;
}

void WriterGroups::Start(Group group, const WriterKey& key) {
  Violations violations(limits_.max_error_detail_bytes);
  TransportChoice joined =
      JoinWriters(group.choices, group.first.seq_len_q, group.first.seq_len_kv, violations);
  const std::shared_ptr<RequestCall> lead = group.calls[0];
  if (!violations.empty()) {
    End(lead.get(), key);
    const grpc::Status status = ToGrpcStatus(std::move(violations).ToRejection(), limits_);
    for (const std::shared_ptr<RequestCall>& call : group.calls) call->FailWriter(status);
    return;
  }
  LogInfo("all writers joined", {{"request_id", key.request_id},
                                 {"writers", group.count},
                                 {"seconds", absl::ToDoubleSeconds(MonotonicNow() - group.since)}});
  const Calls followers(group.calls.begin() + 1, group.calls.end());
  for (int index = 1; index < group.count; ++index) {
    if (group.calls[index]->Follow(lead)) continue;
    // It ended while the last writer joined.
    End(lead.get(), key);
    return FailAll(group.calls, WriterLost(index, "its stream ended"));
  }
  lead->StartAsLead(std::move(joined), followers);
}

void WriterGroups::Leave(const RequestCall* call, const WriterKey& key, int index,
                         const std::string& why) {
  Calls calls;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = groups_.find(key);
    if (found == groups_.end() || found->second.started) return;
    if (found->second.calls[index].get() != call) return;  // another stream replaced it
    calls = std::move(found->second.calls);
    groups_.erase(found);
  }
  FailAll(calls, WriterLost(index, why));
}

void WriterGroups::End(const RequestCall* lead, const WriterKey& key) {
  absl::MutexLock lock(&mutex_);
  const auto found = groups_.find(key);
  // While a group waits, Leave ends it.
  if (found == groups_.end() || !found->second.started) return;
  if (found->second.calls[0].get() != lead) return;
  groups_.erase(found);
}

void WriterGroups::FailWaiting(const Failure& failure) {
  Calls calls;
  {
    absl::MutexLock lock(&mutex_);
    for (auto entry = groups_.begin(); entry != groups_.end();) {
      if (entry->second.started) {
        ++entry;
        continue;
      }
      for (std::shared_ptr<RequestCall>& call : entry->second.calls) {
        calls.push_back(std::move(call));
      }
      entry = groups_.erase(entry);
    }
  }
  FailAll(calls, failure);
}

void WriterGroups::OnTick(absl::Time now) {
  std::vector<std::pair<Calls, Failure>> late;
  {
    absl::MutexLock lock(&mutex_);
    for (auto entry = groups_.begin(); entry != groups_.end();) {
      Group& group = entry->second;
      if (group.started || now - group.since <= limits_.writer_join_timeout) {
        ++entry;
        continue;
      }
      std::vector<int> missing;
      for (int index = 0; index < group.count; ++index) {
        if (group.calls[index] == nullptr) missing.push_back(index);
      }
      late.emplace_back(std::move(group.calls),
                        WriterMissing(missing, group.count, limits_.writer_join_timeout));
      entry = groups_.erase(entry);
    }
  }
  for (const auto& [calls, failure] : late) FailAll(calls, failure);
}

int64_t WriterGroups::waiting() const {
  absl::MutexLock lock(&mutex_);
  int64_t waiting = 0;
  for (const auto& [key, group] : groups_) {
    if (group.started) continue;
    waiting += static_cast<int64_t>(group.calls.size()) -
               std::count(group.calls.begin(), group.calls.end(), nullptr);
  }
  return waiting;
}

void WriterGroups::FailAll(const Calls& calls, const Failure& failure) {
  for (const std::shared_ptr<RequestCall>& call : calls) {
    if (call != nullptr) call->FailWriter(failure);
  }
}

}  // namespace ringattn::server
