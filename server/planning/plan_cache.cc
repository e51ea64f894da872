#include "server/planning/plan_cache.h"

#include <utility>

#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

bool Matches(const PlanKey& key, const PlanThis& request) {
  return key.fingerprint == request.fingerprint && key.direction == request.direction &&
         key.choice == request.choice && key.inputs == request.inputs &&
         (key.spec == request.spec || *key.spec == *request.spec);
}

}  // namespace

int64_t KeyBytes(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  return static_cast<int64_t>(sizeof(PlanKey) + sizeof(AttentionSpec) +
                              (shape.cu_seqlens_q.capacity() + shape.cu_seqlens_k.capacity()) *
                                  sizeof(int64_t) +
                              shape.document_rules.capacity() * sizeof(MaskRule) +
                              spec.probability_rows.capacity() * sizeof(ProbabilityRow));
}

PlanCache::Entries::iterator PlanCache::Locate(const PlanThis& request) {
  const auto [begin, end] = by_fingerprint_.equal_range(request.fingerprint);
  for (auto found = begin; found != end; ++found) {
    if (Matches(found->second->key, request)) return found->second;
  }
  return entries_.end();
}

std::optional<SharedPlan> PlanCache::Find(const PlanThis& request) {
  const auto entry = Locate(request);
  if (entry == entries_.end()) return std::nullopt;
  entries_.splice(entries_.begin(), entries_, entry);
  return entry->plan;
}

void PlanCache::Put(const PlanThis& request, SharedPlan plan) {
  if (const auto known = Locate(request); known != entries_.end()) Remove(known);
  Entry entry{
      {request.fingerprint, request.spec, request.direction, request.choice, request.inputs},
      std::move(plan)};
  entry.bytes = KeyBytes(*entry.key.spec) + (entry.plan.ok() ? BytesOf(**entry.plan) : 0);
  if (entry.bytes > max_bytes_) return;
  while (bytes_ > max_bytes_ - entry.bytes) Remove(std::prev(entries_.end()));
  bytes_ += entry.bytes;
  entries_.push_front(std::move(entry));
  by_fingerprint_.emplace(entries_.front().key.fingerprint, entries_.begin());
}

void PlanCache::Remove(Entries::iterator entry) {
  const auto [begin, end] = by_fingerprint_.equal_range(entry->key.fingerprint);
  for (auto found = begin; found != end; ++found) {
    if (found->second != entry) continue;
    by_fingerprint_.erase(found);
    break;
  }
  bytes_ -= entry->bytes;
  entries_.erase(entry);
}

}  // namespace ringattn::server
