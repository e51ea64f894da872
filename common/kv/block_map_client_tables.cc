#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/kv/block_map_impl.h"

namespace ringattn {

void KvBlockMap::Impl::ApplyBlocksRow(int index, const StepRow& row, Sequence* sequence,
                                      RowDone* done) {
  if (row.expected_length != row.keep_length) {
    return Refuse(index, false, RefusalReason::kLengthMismatch, row.keep_length,
                  absl::StrCat("expected_length is ", row.expected_length,
                               "; in BLOCKS numbering it equals keep_length, ", row.keep_length));
  }
  for (const KvTableUpdate& update : row.tables) {
    if (!CheckUpdate(index, update, *sequence)) return;
    WriteTable(update, sequence, done);
  }
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (!CheckBlocks(index, row, static_cast<int>(g), sequence->tables[g])) return;
  }
  sequence->length = sequence->valid = row.end();
}

bool KvBlockMap::Impl::CheckUpdate(int index, const KvTableUpdate& update,
                                   const Sequence& sequence) {
  if (update.group >= static_cast<int>(spec.groups.size())) {
    Refuse(index, false, RefusalReason::kBadRow, 0,
           absl::StrCat("a table names group ", update.group, "; the cache has ",
                        spec.groups.size(), " groups"));
    return false;
  }
  const int64_t size = static_cast<int64_t>(sequence.tables[update.group].blocks.size());
  if (update.first > size) {
    Refuse(index, false, RefusalReason::kBadBlock, 0,
           absl::StrCat("a table of group ", update.group, " starts at ", update.first,
                        "; the sequence's table has ", size, " entries in this epoch"));
    return false;
  }
  const int64_t end = update.first + static_cast<int64_t>(update.blocks.size());
  if (end > CeilDivide(limits.max_tokens, entries_per_block) ||
      table_entries + std::max<int64_t>(0, end - size) > kMaxTableEntries) {
    Refuse(index, false, RefusalReason::kFull, 0, TooManyEntries());
    return false;
  }
  return true;
}

void KvBlockMap::Impl::WriteTable(const KvTableUpdate& update, Sequence* sequence, RowDone* done) {
  if (done->tables.empty()) {
    done->tables.resize(spec.groups.size());
    for (size_t g = 0; g < spec.groups.size(); ++g) {
      done->tables[g].old_size = done->tables[g].kept =
          static_cast<int64_t>(sequence->tables[g].blocks.size());
    }
  }
  TableUndo& undo = done->tables[update.group];
  std::vector<uint32_t>& blocks = sequence->tables[update.group].blocks;
  for (size_t i = 0; i < update.blocks.size(); ++i) {
    const int64_t at = update.first + static_cast<int64_t>(i);
    if (at == static_cast<int64_t>(blocks.size())) {
      blocks.push_back(update.blocks[i]);
      ++table_entries;
      continue;
    }
    if (at < undo.old_size) undo.overwritten.emplace_back(at, blocks[at]);
    blocks[at] = update.blocks[i];
  }
}

bool KvBlockMap::Impl::CheckBlocks(int index, const StepRow& row, int group, const Table& table) {
  const int64_t seen_begin = SeenBegin(spec.groups[group], row.end(), row.q_tokens);
  const int64_t begin = row.append_tokens > 0 ? std::min(seen_begin, row.keep_length) : seen_begin;
  const int64_t last = CeilDivide(row.end(), entries_per_block);
  for (int64_t i = begin / entries_per_block; i < last && begin < row.end(); ++i) {
    if (i >= static_cast<int64_t>(table.blocks.size())) {
      Refuse(index, false, RefusalReason::kBadBlock, 0,
             absl::StrCat("group ", group, " has ", table.blocks.size(),
                          " table entries; the row needs ", last));
      return false;
    }
    const uint32_t block = table.blocks[i];
    if (block >= static_cast<uint64_t>(spec.blocks)) {
      Refuse(index, false, RefusalReason::kBadBlock, 0,
             absl::StrCat("entry ", i, " of group ", group, " names block ", block,
                          "; the cache has ", spec.blocks, " blocks"));
      return false;
    }
    if (row.append_tokens == 0 || (i + 1) * entries_per_block <= row.keep_length) continue;
    if (!step_writes.insert(block).second) {
      Refuse(index, false, RefusalReason::kBlockWrittenTwice, 0,
             absl::StrCat("block ", block, ", entry ", i, " of group ", group,
                          ", is written twice by this step"));
      return false;
    }
  }
  return true;
}

}  // namespace ringattn
