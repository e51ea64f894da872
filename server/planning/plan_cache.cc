#include "server/planning/plan_cache.h"

#include <utility>

#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

template <typename Inputs>
bool Matches(const PlanKey& key, const Inputs& of) {
  return key.fingerprint == of.fingerprint && key.direction == of.direction &&
         key.choice == of.choice && key.inputs == of.inputs &&
         (key.spec == of.spec || *key.spec == *of.spec);
}

}  // namespace

PlanKey KeyOf(const PlanThis& request) {
  return {request.fingerprint, request.spec, request.direction, request.choice, request.inputs};
}

int64_t BytesOf(const PlanKey& key) {
  const AttentionShape& shape = key.spec->shape;
  return static_cast<int64_t>(sizeof(PlanKey) + sizeof(AttentionSpec) +
                              (shape.cu_seqlens_q.capacity() + shape.cu_seqlens_k.capacity()) *
                                  sizeof(int64_t) +
                              shape.document_rules.capacity() * sizeof(MaskRule) +
                              key.spec->probability_rows.capacity() * sizeof(ProbabilityRow));
}

template <typename Inputs>
PlanCache::Entries::iterator PlanCache::Locate(const Inputs& inputs) {
  const auto [begin, end] = by_fingerprint_.equal_range(inputs.fingerprint);
  for (auto found = begin; found != end; ++found) {
    if (Matches(found->second->key, inputs)) return found->second;
  }
  return entries_.end();
}

std::optional<SharedPlan> PlanCache::Find(const PlanThis& request) {
  const auto entry = Locate(request);
  if (entry == entries_.end()) return std::nullopt;
  entries_.splice(entries_.begin(), entries_, entry);
  return entry->plan;
}

void PlanCache::Put(PlanKey key, SharedPlan plan) {
  if (const auto known = Locate(key); known != entries_.end()) Remove(known);
  Entry entry{std::move(key), std::move(plan)};
  entry.bytes = BytesOf(entry.key) + (entry.plan.ok() ? BytesOf(**entry.plan) : 0);
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
