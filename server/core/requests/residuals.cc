#include "server/core/requests/residuals.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

// Bytes of the coordinator's record: a few fields, and mostly the document boundaries.
int64_t RecordBytes(const Residual& residual) {
  const AttentionShape& shape = residual.spec->shape;
  return static_cast<int64_t>(sizeof(Residual) + residual.members.size() * sizeof(ResidualMember) +
                              (shape.cu_seqlens_q.size() + shape.cu_seqlens_k.size()) *
                                  sizeof(int64_t) +
                              shape.document_rules.size() * sizeof(MaskRule)) +
         BytesOf(*residual.plan);
}

}  // namespace

const char* ResidualEndName(ResidualEnd end) {
  switch (end) {
    case ResidualEnd::kConsumed:
      return "consumed";
    case ResidualEnd::kDeleted:
      return "deleted";
    case ResidualEnd::kExpired:
      return "expired";
    case ResidualEnd::kLost:
      return "lost";
    case ResidualEnd::kEvicted:
      return "evicted";
  }
  return "";
}

int64_t Residual::bytes() const {
  int64_t bytes = 0;
  for (const ResidualMember& member : members) bytes += member.bytes;
  return bytes;
}

bool Residual::IsOn(ConnectionId connection) const {
  return std::any_of(members.begin(), members.end(),
                     [&](const ResidualMember& member) { return member.connection == connection; });
}

// --------------------------------------------------------------------- keeping

std::string Residuals::Keep(Residual residual, std::optional<int64_t> client_limit,
                            const InUse& in_use) {
  if (std::optional<std::string> why = MakeRoom(residual, client_limit, in_use)) {
    CountRefusal();
    return *std::move(why);
  }
  residual.expires = batch_.now() + residual.ttl;
  ++counts_.residuals;
  ++counts_.kept;
  counts_.bytes += residual.bytes();
  record_bytes_ += RecordBytes(residual);
  for (const ResidualMember& member : residual.members) {
    bytes_by_worker_[member.connection] += member.bytes;
  }
  residual.number = ++last_number_;
  oldest_[residual.number] = residual.handle;
  const std::string handle = residual.handle;
  residuals_[handle] = std::move(residual);
  return "";
}

std::optional<std::string> Residuals::MakeRoom(const Residual& wanted,
                                               std::optional<int64_t> client_limit,
                                               const InUse& in_use) {
  const Limits& limits = config_.limits;
  const int64_t bytes = wanted.bytes();
  const auto why = [&]() -> std::optional<std::string> {
    if (bytes > limits.max_residual_bytes - counts_.bytes) {
      return absl::StrCat("residuals take ", counts_.bytes, " of max_residual_bytes ",
                          limits.max_residual_bytes, ", this one would take ", bytes);
    }
    if (client_limit && bytes > *client_limit - BytesOfClient(wanted.client)) {
      return absl::StrCat("this client's residuals take ", BytesOfClient(wanted.client), " of its ",
                          *client_limit, " bytes (max_residual_bytes), this one would take ",
                          bytes);
    }
    if (counts_.residuals >= limits.max_residuals ||
        record_bytes_ + RecordBytes(wanted) > limits.max_residual_record_bytes) {
      return absl::StrCat("the server has ", counts_.residuals, " residuals and room for no more");
    }
    return std::nullopt;
  };
  std::optional<std::string> reason = why();
  if (!reason) return std::nullopt;
  for (const std::string& handle : EvictionOrder(in_use)) {
    const auto found = residuals_.find(handle);
    if (!found->second.consumed || !found->second.readers.empty()) break;
    Drop(found, ResidualEnd::kConsumed);
    reason = why();
    if (!reason) return std::nullopt;
  }
  return reason;
}

int64_t Residuals::BytesOfClient(const std::string& client) const {
  int64_t bytes = 0;
  for (const auto& [handle, residual] : residuals_) {
    if (residual.client == client) bytes += residual.bytes();
  }
  return bytes;
}

// --------------------------------------------------------------------- reading

std::optional<Failure> Residuals::CheckReadable(const std::string& handle,
                                                const std::string& principal,
                                                const std::string& request_id) const {
  const auto found = residuals_.find(handle);
  if (found != residuals_.end() && found->second.principal == principal) {
    const Residual& residual = found->second;
    if (!residual.consumed) return std::nullopt;
    const bool is_replay = !request_id.empty() && residual.consumed_by == request_id &&
                           batch_.now() <= residual.replay_until;
    if (is_replay) return std::nullopt;
    return ResidualEnded(ResidualEnd::kConsumed);
  }
  const auto ended = ended_.find(handle);
  if (found == residuals_.end() && ended != ended_.end() && ended->second.principal == principal) {
    return ResidualEnded(ended->second.end);
  }
  return ResidualNotFound();
}

const Residual* Residuals::Find(const std::string& handle) const {
  const auto found = residuals_.find(handle);
  return found == residuals_.end() ? nullptr : &found->second;
}

void Residuals::Attach(const std::string& handle, StreamId reader) {
  residuals_.at(handle).readers.insert(reader);
}

void Residuals::Detach(const std::string& handle, StreamId reader) {
  const auto found = residuals_.find(handle);
  if (found != residuals_.end()) found->second.readers.erase(reader);
}

void Residuals::Read(const std::string& handle, const std::string& request_id, bool keep) {
  ++counts_.reads;
  const auto found = residuals_.find(handle);
  if (found == residuals_.end() || keep) return;
  Consume(found->second, request_id, batch_.now() + config_.residual_replay_time);
}

void Residuals::Consume(Residual& residual, const std::string& request_id,
                        absl::Time replay_until) {
  consumed_ += !residual.consumed;
  residual.consumed = true;
  residual.consumed_by = request_id;
  residual.replay_until = replay_until;
}

// --------------------------------------------------------------------- endings

void Residuals::Renew(const std::string& handle, const std::string& principal, absl::Duration ttl) {
  const auto found = residuals_.find(handle);
  if (found == residuals_.end() || found->second.principal != principal) return;
  if (!found->second.consumed) found->second.expires = batch_.now() + ttl;
}

// Requests that named it earlier may still read it.
void Residuals::Delete(const std::string& handle, const std::string& principal,
                       const InUse& in_use) {
  const auto found = residuals_.find(handle);
  if (found == residuals_.end() || found->second.principal != principal) return;
  if (found->second.readers.empty() && in_use.count(handle) == 0) {
    Drop(found, found->second.consumed ? ResidualEnd::kConsumed : ResidualEnd::kDeleted);
    return;
  }
  Consume(found->second, "", batch_.now());
}

std::vector<StreamId> Residuals::OnWorkerLost(ConnectionId connection) {
  std::vector<StreamId> readers;
  for (auto next = residuals_.begin(); next != residuals_.end();) {
    const auto residual = next++;
    if (!residual->second.IsOn(connection)) continue;
    const std::vector<StreamId> its = Drop(residual, ResidualEnd::kLost, connection);
    readers.insert(readers.end(), its.begin(), its.end());
  }
  return readers;
}

std::vector<StreamId> Residuals::Lose(const std::string& handle) {
  const auto found = residuals_.find(handle);
  if (found == residuals_.end()) return {};
  return Drop(found, ResidualEnd::kLost);
}

std::vector<std::string> Residuals::EvictionOrder(const InUse& in_use) const {
  // has readers, not consumed, age
  std::vector<std::tuple<bool, bool, int64_t, std::string>> order;
  int64_t age = 0;
  for (const auto& [number, handle] : oldest_) {
    const auto found = residuals_.find(handle);
    if (found == residuals_.end() || in_use.count(handle) > 0) continue;
    order.emplace_back(!found->second.readers.empty(), !found->second.consumed, age++, handle);
  }
  std::sort(order.begin(), order.end());
  std::vector<std::string> handles;
  for (auto& [has_readers, not_consumed, at, handle] : order) handles.push_back(std::move(handle));
  return handles;
}

std::vector<StreamId> Residuals::Evict(const std::string& handle) {
  const auto found = residuals_.find(handle);
  if (found == residuals_.end()) return {};
  const bool consumed = found->second.consumed;
  return Drop(found, consumed ? ResidualEnd::kConsumed : ResidualEnd::kEvicted);
}

void Residuals::CheckTimers(const InUse& in_use) {
  for (auto next = residuals_.begin(); next != residuals_.end();) {
    const auto entry = next++;
    const Residual& residual = entry->second;
    if (!residual.readers.empty() || in_use.count(entry->first) > 0) continue;
    if (residual.consumed && residual.replay_until < batch_.now()) {
      Drop(entry, ResidualEnd::kConsumed);
    } else if (!residual.consumed && residual.expires <= batch_.now()) {
      Drop(entry, ResidualEnd::kExpired);
    }
  }
}

void Residuals::Forgive(absl::Duration pause) {
  for (auto& [handle, residual] : residuals_) {
    residual.expires += pause;
    residual.replay_until += pause;
  }
}

std::vector<StreamId> Residuals::Drop(Entries::iterator entry, ResidualEnd end,
                                      std::optional<ConnectionId> except) {
  const Residual residual = std::move(entry->second);
  residuals_.erase(entry);
  oldest_.erase(residual.number);
  for (const ResidualMember& member : residual.members) {
    int64_t& bytes = bytes_by_worker_[member.connection];
    bytes -= member.bytes;
    if (bytes == 0) bytes_by_worker_.erase(member.connection);
    if (except && member.connection == *except) continue;
    batch_.SendDrop(member.connection)->add_operation_ids(residual.operation_id);
  }
  consumed_ -= residual.consumed;
  --counts_.residuals;
  counts_.bytes -= residual.bytes();
  record_bytes_ -= RecordBytes(residual);
  ++counts_.ended[static_cast<size_t>(end)];

  ended_[residual.handle] = {residual.handle, residual.principal, end};
  ended_order_.push_back(residual.handle);
  while (static_cast<int64_t>(ended_order_.size()) > config_.limits.ended_residuals_kept) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
  return {residual.readers.begin(), residual.readers.end()};
}

}  // namespace ringattn::server
