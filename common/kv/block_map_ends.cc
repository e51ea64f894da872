#include <algorithm>
#include <variant>

#include "common/kv/block_map_impl.h"

namespace ringattn {

void KvBlockMap::Impl::Clear() {
  begun = false;
  journal.clear();
  taken.clear();
  released.clear();
  dropped.clear();
  seen.clear();
  step_writes.clear();
  rows.clear();
  copies.clear();
  changes.clear();
}

void KvBlockMap::Impl::UndoRow(RowDone& done, bool overwritten) {
  const auto found = sequences.find(done.id);
  Sequence& sequence = *found->second;
  for (size_t g = 0; g < done.tables.size(); ++g) {
    TableUndo& undo = done.tables[g];
    Table& table = sequence.tables[g];
    table_entries += undo.old_size - static_cast<int64_t>(table.blocks.size());
    table.blocks.resize(undo.kept);
    table.first = undo.old_first;
    for (auto entry = undo.overwritten.rbegin(); entry != undo.overwritten.rend(); ++entry) {
      table.blocks[entry->first] = entry->second;
    }
    table.blocks.insert(table.blocks.end(), undo.removed.begin(), undo.removed.end());
  }
  if (done.created) {
    sequences.erase(found);
    return;
  }
  sequence.length = done.length;
  sequence.valid = overwritten ? std::min(done.valid, done.keep) : done.valid;
  sequence.settled = done.settled;
}

void KvBlockMap::Impl::TakeBack(bool overwritten) {
  for (auto entry = journal.rbegin(); entry != journal.rend(); ++entry) {
    if (auto* done = std::get_if<RowDone>(&*entry)) {
      UndoRow(*done, overwritten);
    } else if (auto* drop = std::get_if<Dropped>(&*entry)) {
      sequences.emplace(drop->id, std::move(drop->sequence));
    } else {
      const auto found = sequences.find(std::get<Forked>(*entry).id);
      ReleaseTables(*found->second);
      sequences.erase(found);
    }
  }
  for (const uint32_t block : taken) Release(block);
  Clear();
}

void KvBlockMap::Impl::ReleaseTables(const Sequence& sequence) {
  for (const Table& table : sequence.tables) {
    table_entries -= static_cast<int64_t>(table.blocks.size());
    if (!by_sequences()) continue;
    for (int64_t i = table.first; i < static_cast<int64_t>(table.blocks.size()); ++i) {
      Release(table.blocks[i]);
    }
  }
}

void KvBlockMap::Impl::GiveWindowsBack(const RowDone& done) {
  Sequence& sequence = *sequences.find(done.id)->second;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    Table& table = sequence.tables[g];
    const int64_t end = std::min<int64_t>(
        table.blocks.size(), NeededBegin(spec.groups[g], done.keep) / entries_per_block);
    for (; table.first < end; ++table.first) {
      Release(table.blocks[table.first]);
      table.blocks[table.first] = kNoBlock;
    }
  }
}

}  // namespace ringattn
