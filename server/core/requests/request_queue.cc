#include "server/core/requests/request_queue.h"

#include <cassert>
#include <limits>
#include <utility>

namespace ringattn::server {
namespace {

template <typename Value>
void RemoveOne(std::map<Value, int64_t>* counts, Value value) {
  const auto found = counts->find(value);
  assert(found != counts->end());
  if (--found->second == 0) counts->erase(found);
}

}  // namespace

void NeedsExtremes::Add(const QueueNeeds& needs) {
  ++costs_[needs.cost_seconds];
  ++memory_[needs.memory_bytes];
  special_ += needs.is_special;
}

void NeedsExtremes::Remove(const QueueNeeds& needs) {
  RemoveOne(&costs_, needs.cost_seconds);
  RemoveOne(&memory_, needs.memory_bytes);
  special_ -= needs.is_special;
}

QueueNeeds NeedsExtremes::Get() const {
  return {costs_.empty() ? std::numeric_limits<double>::infinity() : costs_.begin()->first,
          memory_.empty() ? 0 : memory_.rbegin()->first, special_ > 0};
}

void RequestQueue::Add(StreamId stream, const std::string& client, int64_t bytes) {
  assert(!Has(stream));
  entries_[stream] = {client, bytes, std::nullopt};
  for (Part* part : {&all_, &by_client_[client]}) {
    ++part->share.requests;
    part->share.bytes += bytes;
  }
}

void RequestQueue::SetNeeds(StreamId stream, const QueueNeeds& needs) {
  const auto entry = entries_.find(stream);
  if (entry == entries_.end()) return;
  std::optional<QueueNeeds>& known = entry->second.needs;
  for (Part* part : {&all_, &by_client_.at(entry->second.client)}) {
    if (known) part->extremes.Remove(*known);
    part->extremes.Add(needs);
  }
  known = needs;
  new_.insert(stream);
}

void RequestQueue::Remove(StreamId stream) {
  const auto entry = entries_.find(stream);
  if (entry == entries_.end()) return;
  const auto client = by_client_.find(entry->second.client);
  for (Part* part : {&all_, &client->second}) {
    --part->share.requests;
    part->share.bytes -= entry->second.bytes;
    if (entry->second.needs) part->extremes.Remove(*entry->second.needs);
  }
  if (client->second.share.requests == 0) by_client_.erase(client);
  entries_.erase(entry);
  new_.erase(stream);
}

QueueShare RequestQueue::Of(const std::string& client) const {
  const auto found = by_client_.find(client);
  return found == by_client_.end() ? QueueShare{} : found->second.share;
}

const RequestQueue::Entry* RequestQueue::Find(StreamId stream) const {
  const auto found = entries_.find(stream);
  return found == entries_.end() ? nullptr : &found->second;
}

std::set<StreamId> RequestQueue::TakeNew() { return std::exchange(new_, {}); }

}  // namespace ringattn::server
