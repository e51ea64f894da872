#include "worker/device/cuda/tables/kv_resident_tables.h"

#include <algorithm>
#include <cstring>

namespace ringattn::worker {
namespace {

// memcmp compares these faster than a loop that looks for the element.
constexpr int64_t kStride = 1024;

int64_t FirstDifference(const uint32_t* a, const uint32_t* b, int64_t count) {
  int64_t at = 0;
  while (count - at > kStride && std::memcmp(a + at, b + at, kStride * 4) == 0) at += kStride;
  while (at < count && a[at] == b[at]) ++at;
  return at;
}

// Returns the end of the last difference. REQUIRES: there is one.
int64_t EndOfDifferences(const uint32_t* a, const uint32_t* b, int64_t count) {
  while (count > kStride &&
         std::memcmp(a + count - kStride, b + count - kStride, kStride * 4) == 0) {
    count -= kStride;
  }
  while (a[count - 1] == b[count - 1]) --count;
  return count;
}

int64_t SizeOf(const DeviceKvRow& row) { return static_cast<int64_t>(row.table.size()); }

}  // namespace

void KvResidentTables::Place(absl::Span<const DeviceKvRow> rows) {
  bool fit = rows.size() <= slots_.size();
  for (size_t i = 0; fit && i < rows.size(); ++i) fit = SizeOf(rows[i]) <= slots_[i].count;
  if (!fit) Divide(rows);
  for (size_t i = 0; i < rows.size(); ++i) Update(slots_[i], rows[i].table);
  JoinChanges();
}

void KvResidentTables::Forget() {
  slots_.clear();
  elements_.clear();
  changes_.clear();
}

void KvResidentTables::Divide(absl::Span<const DeviceKvRow> rows) {
  int64_t spacious = 0;
  const auto spacious_count = [](const DeviceKvRow& row) {
    return SizeOf(row) + SizeOf(row) / 8 + 16;
  };
  for (const DeviceKvRow& row : rows) spacious += spacious_count(row);
  slots_.clear();
  int64_t end = 0;
  for (const DeviceKvRow& row : rows) {
    slots_.push_back({end, spacious <= max_elements_ ? spacious_count(row) : SizeOf(row)});
    end += slots_.back().count;
  }
  const auto held = static_cast<int64_t>(elements_.size());
  if (end <= held) return;
  elements_.resize(end);
  changes_.push_back({held, end - held});
}

void KvResidentTables::Update(const Run& slot, absl::Span<const uint32_t> table) {
  uint32_t* const held = elements_.data() + slot.first;
  const auto size = static_cast<int64_t>(table.size());
  const int64_t first = FirstDifference(held, table.data(), size);
  if (first == size) return;
  const int64_t end = EndOfDifferences(held, table.data(), size);
  std::memcpy(held + first, table.data() + first, (end - first) * 4);
  changes_.push_back({slot.first + first, end - first});
}

void KvResidentTables::JoinChanges() {
  if (changes_.size() < 2) return;
  std::sort(changes_.begin(), changes_.end(),
            [](const Run& a, const Run& b) { return a.first < b.first; });
  const auto join = [this](int64_t distance) {
    size_t last = 0;
    for (size_t i = 1; i < changes_.size(); ++i) {
      Run& run = changes_[last];
      const Run next = changes_[i];
      if (next.first - (run.first + run.count) <= distance) {
        run.count = std::max(run.first + run.count, next.first + next.count) - run.first;
      } else {
        changes_[++last] = next;
      }
    }
    changes_.resize(last + 1);
  };
  join(kNear);
  if (changes_.size() > kMostRuns) join(max_elements_);
}

}  // namespace ringattn::worker
