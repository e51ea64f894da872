#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/kv/block_map_impl.h"

namespace ringattn {

KvBlockMap::Impl::Sequence* KvBlockMap::Impl::FindOrMake(int index, const StepRow& row,
                                                         RowDone* done) {
  if (!seen.insert(row.sequence).second) {
    Refuse(index, false, RefusalReason::kRowTwice, 0,
           absl::StrCat("sequence ", row.sequence, " has an earlier row"));
    return nullptr;
  }
  done->id = row.sequence;
  done->keep = row.keep_length;
  if (Sequence* sequence = Find(row.sequence)) return sequence;
  if (dropped.contains(row.sequence)) {
    Refuse(index, false, RefusalReason::kUnknownSequence, 0,
           absl::StrCat("sequence ", row.sequence, " was dropped by this step"));
    return nullptr;
  }
  if (by_sequences() && row.expected_length != 0) {
    Refuse(index, false, RefusalReason::kUnknownSequence, 0,
           absl::StrCat("sequence ", row.sequence,
                        " does not exist; a row with expected_length 0 creates it"));
    return nullptr;
  }
  if (!HasRoomForSequence()) {
    Refuse(index, false, RefusalReason::kFull, 0, TooManySequences());
    return nullptr;
  }
  done->created = true;
  return sequences.emplace(row.sequence, NewSequence()).first->second.get();
}

void KvBlockMap::Impl::Remember(const Sequence& sequence, RowDone* done) const {
  done->length = sequence.length;
  done->valid = sequence.valid;
  done->settled = sequence.settled;
}

bool KvBlockMap::Impl::CheckLengths(int index, const StepRow& row, const Sequence& sequence) {
  const bool matches = sequence.settled ? row.expected_length <= sequence.valid
                                        : row.expected_length == sequence.length;
  if (!matches) {
    Refuse(index, false, RefusalReason::kLengthMismatch, sequence.valid,
           absl::StrCat("expected_length is ", row.expected_length, "; sequence ", row.sequence,
                        " has ", sequence.valid, " entries"));
    return false;
  }
  if (row.keep_length > row.expected_length) {
    Refuse(index, false, RefusalReason::kKeepBeyondLength, sequence.valid,
           absl::StrCat("keep_length is ", row.keep_length, "; it is at most expected_length, ",
                        row.expected_length));
    return false;
  }
  if (row.keep_length == 0) return true;  // needs no earlier entry
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    const int64_t first_query = std::min(row.keep_length, row.end() - row.q_tokens);
    if (NeededBegin(spec.groups[g], first_query) / entries_per_block >= sequence.tables[g].first)
      continue;
    Refuse(index, false, RefusalReason::kBehindWindow, sequence.valid, BehindWindow(g, sequence));
    return false;
  }
  return true;
}

int64_t KvBlockMap::Impl::Kept(const StepRow& row, const Table& table) const {
  if (row.keep_length == 0 && table.first > 0) return 0;
  return std::min<int64_t>(table.blocks.size(), CeilDivide(row.end(), entries_per_block));
}

template <typename Visit>
void KvBlockMap::Impl::ForSharedWrites(const StepRow& row, const Table& table, int64_t kept,
                                       Visit visit) const {
  if (row.append_tokens == 0) return;
  for (int64_t i = row.keep_length / entries_per_block; i < kept; ++i) {
    if (references[table.blocks[i]] > 1) visit(i);
  }
}

int64_t KvBlockMap::Impl::BlocksNeeded(const StepRow& row, const Sequence& sequence) const {
  int64_t needed = 0;
  for (const Table& table : sequence.tables) {
    const int64_t kept = Kept(row, table);
    needed += CeilDivide(row.end(), entries_per_block) - kept;
    ForSharedWrites(row, table, kept, [&](int64_t) { ++needed; });
  }
  return needed;
}

void KvBlockMap::Impl::ApplyToTable(int group, const StepRow& row, Table* table, TableUndo* undo) {
  std::vector<uint32_t>& blocks = table->blocks;
  undo->old_size = static_cast<int64_t>(blocks.size());
  undo->old_first = table->first;
  undo->kept = Kept(row, *table);
  undo->removed.assign(blocks.begin() + undo->kept, blocks.end());
  for (const uint32_t block : undo->removed) {
    if (block != kNoBlock) released.push_back(block);
  }
  blocks.resize(undo->kept);
  if (undo->kept == 0) table->first = 0;
  const auto previous = [&](int64_t i) { return i == 0 ? kNoBlock : blocks[i - 1]; };
  ForSharedWrites(row, *table, undo->kept, [&](int64_t i) {
    const uint32_t old = blocks[i];
    undo->overwritten.emplace_back(i, old);
    released.push_back(old);
    blocks[i] = Take(previous(i));
    const int64_t keep_here = row.keep_length - i * entries_per_block;
    if (keep_here > 0) copies.push_back({group, old, blocks[i], keep_here});
    changes.insert(changes.end(), {static_cast<uint64_t>(i), blocks[i]});
  });
  const int64_t size = CeilDivide(row.end(), entries_per_block);
  for (int64_t i = undo->kept; i < size; ++i) {
    blocks.push_back(Take(previous(i)));
    changes.push_back(blocks.back());
  }
  changes.push_back(static_cast<uint64_t>(size));
  table_entries += size - undo->old_size;
}

void KvBlockMap::Impl::ApplyRow(int index, const StepRow& row) {
  RowDone done;
  Sequence* const sequence = FindOrMake(index, row, &done);
  if (sequence == nullptr) return;
  Remember(*sequence, &done);
  if (by_sequences()) {
    ApplySequenceRow(index, row, sequence, &done);
  } else {
    ApplyBlocksRow(index, row, sequence, &done);
  }
  journal.push_back(std::move(done));
}

void KvBlockMap::Impl::ApplySequenceRow(int index, const StepRow& row, Sequence* sequence,
                                        RowDone* done) {
  if (!row.tables.empty()) {
    return Refuse(index, false, RefusalReason::kBadRow, sequence->valid,
                  "tables are set; in SEQUENCES numbering the service writes them");
  }
  if (!CheckLengths(index, row, *sequence)) return;
  const int64_t needed = BlocksNeeded(row, *sequence);
  if (needed > free_left) {
    const int64_t missing = needed - free_left;
    free_left = 0;  // so that the sum over rows is what the step lacks
    return Refuse(
        index, false, RefusalReason::kFull, sequence->valid,
        absl::StrCat("the row needs ", needed, " blocks, ", missing, " more than are free"),
        missing);
  }
  free_left -= needed;
  if (table_entries + needed > kMaxTableEntries) {
    return Refuse(index, false, RefusalReason::kFull, sequence->valid, TooManyEntries());
  }
  changes.insert(changes.end(), {row.sequence, static_cast<uint64_t>(row.keep_length),
                                 static_cast<uint64_t>(row.end())});
  done->tables.resize(spec.groups.size());
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    ApplyToTable(static_cast<int>(g), row, &sequence->tables[g], &done->tables[g]);
  }
  sequence->length = sequence->valid = row.end();
  sequence->settled = false;
}

}  // namespace ringattn
