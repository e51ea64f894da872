#include "common/schedule/block_slots.h"

#include <cassert>
#include <utility>

namespace ringattn {

const char* const BlockSlots::kKvNames[3] = {"home", "kv_slot1", "kv_slot2"};
const char* const BlockSlots::kGradientNames[5] = {"dkv_slot0", "dkv_slot1", "home", "landing0",
                                                   "landing1"};

bool BlockSlots::Claim(int step) { return std::exchange(claimed_by_[KvSlot(step)], step) != step; }

BlockLocation BlockSlots::InBlock(int slot, int source, int step, const RowRange& rows) const {
  int64_t rows_before = 0;
  for (const RowRange& range : route_.held[step][source]) {
    if (range.begin <= rows.begin && rows.end <= range.end) return {slot, rows_before, range};
    rows_before += range.size();
  }
  assert(false && "rows are not part of the block");
  return {};
}

BlockLocation BlockSlots::Kv(int source, int step, const RowRange& rows) const {
  return InBlock(KvSlot(step), source, step, rows);
}

BlockLocation BlockSlots::Gradients(int source, int step, const RowRange& rows) const {
  return InBlock(step % 2, source, step, rows);
}

BlockLocation BlockSlots::HomeGradients(int source) const {
  return {kGradientHome, 0, {0, route_.kv_rows[source]}};
}

BlockLocation BlockSlots::Landing(int64_t at, const RowRange& rows) {
  return {kLanding + static_cast<int>(at % 2), 0, rows};
}

}  // namespace ringattn
