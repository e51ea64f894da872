#include "common/kv/block_map.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/kv/block_set.h"
#include "common/wire/crc32c.h"

namespace ringattn {
namespace {

// The limit of all table entries of a cache in BLOCKS numbering: 256 MiB of numbers. In SEQUENCES
// numbering every entry is a reference to a block, so forks are bounded in the same way.
constexpr int64_t kMaxTableEntries = int64_t{1} << 26;

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One group's block table of a sequence.
struct Table {
  std::vector<uint32_t> blocks;
  int64_t first = 0;  // entries before it were given back and are kNoBlock
};

struct Sequence {
  int64_t length = 0;
  int64_t valid = 0;          // entries that no undone step may have overwritten; at most length
  bool settled = false;       // no row since Settle
  std::vector<Table> tables;  // by group
};

// How to take back what a step did to one table.
struct TableUndo {
  int64_t old_size = 0;
  int64_t old_first = 0;
  int64_t kept = 0;                                       // entries that stayed in the table
  std::vector<uint32_t> removed;                          // entries [kept, old_size)
  std::vector<std::pair<int64_t, uint32_t>> overwritten;  // index and block, of entries below kept
};

struct Forked {
  SequenceId id;
};
struct Dropped {
  SequenceId id;
  std::unique_ptr<Sequence> sequence;
};
struct RowDone {
  SequenceId id;
  bool created = false;
  int64_t keep = 0;
  int64_t length = 0, valid = 0;  // before the step
  bool settled = false;
  std::vector<TableUndo> tables;
};
using JournalEntry = std::variant<Forked, Dropped, RowDone>;

}  // namespace

int64_t SeenBegin(const KvLayerGroup& group, int64_t end, int64_t q_tokens) {
  if (q_tokens == 0) return end;
  if (group.window_left < 0) return 0;
  return std::clamp<int64_t>(end - q_tokens - group.window_left, 0, end);
}

struct KvBlockMap::Impl {
  Impl(const KvCacheSpec& spec, const KvPlacement& placement)
      : spec(spec),
        entries_per_block(EntriesPerTableEntry(spec, placement)),
        free(spec.blocks, spec.numbering == KvNumbering::kSequences),
        written(spec.numbering == KvNumbering::kBlocks ? spec.blocks : 1, false) {
    if (by_sequences()) references.resize(spec.blocks, 0);
  }

  bool by_sequences() const { return spec.numbering == KvNumbering::kSequences; }

  const KvCacheSpec spec;
  const int64_t entries_per_block;
  const Limits limits;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences;
  KvBlockSet free;                   // SEQUENCES
  std::vector<uint32_t> references;  // SEQUENCES: by block
  KvBlockSet written;                // BLOCKS: since Settle
  int64_t table_entries = 0;         // of all sequences

  // The state of the begun step.
  bool begun = false;
  std::vector<JournalEntry> journal;
  std::vector<uint32_t> taken;     // blocks that the step took
  std::vector<uint32_t> released;  // references that end with the step's commit
  absl::flat_hash_set<SequenceId> dropped;
  absl::flat_hash_set<SequenceId> seen;       // sequences with a row
  absl::flat_hash_set<uint32_t> step_writes;  // BLOCKS: written by rows so far
  int64_t free_left = 0;                      // blocks that later rows may still take
  std::vector<Refusal> refusals;
  std::vector<KvRowView> rows;
  std::vector<KvBlockCopy> copies;
  std::vector<uint64_t> changes;  // what the crc covers
  uint32_t crc = 0;

  Sequence* Find(SequenceId id) {
    const auto found = sequences.find(id);
    return found == sequences.end() ? nullptr : found->second.get();
  }

  std::unique_ptr<Sequence> NewSequence() const {
    auto sequence = std::make_unique<Sequence>();
    sequence->tables.resize(spec.groups.size());
    return sequence;
  }

  // ------------------------------------------------------------------------------- blocks

  void Release(uint32_t block) {
    assert(references[block] > 0);
    if (--references[block] == 0) free.Insert(block);
  }

  // Takes the block after `previous`, or the lowest one. REQUIRES: one is free.
  uint32_t Take(uint32_t previous) {
    const uint64_t next = uint64_t{previous} + 1;
    const uint32_t block = previous != kNoBlock && next < static_cast<uint64_t>(spec.blocks) &&
                                   free.Contains(static_cast<uint32_t>(next))
                               ? static_cast<uint32_t>(next)
                               : free.Lowest();
    free.Remove(block);
    references[block] = 1;
    taken.push_back(block);
    return block;
  }

  // ----------------------------------------------------------------------------- commands

  void Refuse(int index, bool command, RefusalReason reason, int64_t length, std::string detail,
              int64_t blocks_missing = 0) {
    refusals.push_back({index, command, reason, length, blocks_missing, std::move(detail)});
  }

  void Fork(int index, const KvForkCommand& fork) {
    const auto refuse = [&](RefusalReason reason, int64_t length, std::string detail) {
      Refuse(index, true, reason, length, std::move(detail));
    };
    if (!by_sequences()) {
      return refuse(RefusalReason::kBadRow, 0, "a cache in BLOCKS numbering has no forks");
    }
    const Sequence* source = Find(fork.source);
    if (source == nullptr) {
      return refuse(RefusalReason::kUnknownSequence, 0,
                    absl::StrCat("source ", fork.source, " does not exist"));
    }
    if (sequences.contains(fork.target) || dropped.contains(fork.target)) {
      return refuse(RefusalReason::kSequenceExists, 0,
                    absl::StrCat("target ", fork.target, " exists, or was dropped by this step"));
    }
    if (fork.length > source->valid) {
      return refuse(RefusalReason::kLengthMismatch, source->valid,
                    absl::StrCat("length is ", fork.length, "; source ", fork.source, " has ",
                                 source->valid, " entries"));
    }
    if (!HasRoomForSequence()) return refuse(RefusalReason::kFull, 0, TooManySequences());
    const int64_t count = CeilDivide(fork.length, entries_per_block);
    if (table_entries + count * static_cast<int64_t>(spec.groups.size()) > kMaxTableEntries) {
      return refuse(RefusalReason::kFull, 0, TooManyEntries());
    }
    for (size_t g = 0; g < spec.groups.size() && fork.length > 0; ++g) {
      if (NeededBegin(spec.groups[g], fork.length) / entries_per_block < source->tables[g].first) {
        return refuse(RefusalReason::kBehindWindow, source->valid, BehindWindow(g, *source));
      }
    }
    auto target = NewSequence();
    target->length = target->valid = fork.length;
    for (size_t g = 0; g < spec.groups.size(); ++g) {
      const Table& from = source->tables[g];
      Table& to = target->tables[g];
      to.blocks.assign(from.blocks.begin(), from.blocks.begin() + count);
      to.first = std::min(from.first, count);
      for (int64_t i = to.first; i < count; ++i) ++references[to.blocks[i]];
      table_entries += count;
    }
    changes.insert(changes.end(), {fork.source, fork.target, static_cast<uint64_t>(fork.length)});
    sequences.emplace(fork.target, std::move(target));
    journal.push_back(Forked{fork.target});
  }

  void Drop(int index, const KvDropCommand& drop) {
    for (const SequenceId id : drop.sequences) {
      auto found = sequences.find(id);
      if (found == sequences.end()) {
        Refuse(index, true, RefusalReason::kUnknownSequence, 0,
               absl::StrCat("sequence ", id, " does not exist"));
        continue;
      }
      journal.push_back(Dropped{id, std::move(found->second)});
      sequences.erase(found);
      dropped.insert(id);
      changes.push_back(id);
    }
  }

  // The first entry that queries from position `position` on may see.
  static int64_t NeededBegin(const KvLayerGroup& group, int64_t position) {
    if (group.window_left < 0) return 0;
    return std::max<int64_t>(0, position - group.window_left);
  }

  bool HasRoomForSequence() const {
    return static_cast<int64_t>(sequences.size()) < limits.max_sequences;
  }
  std::string TooManySequences() const {
    return absl::StrCat("the cache has ", sequences.size(), " sequences, the maximum; drop some");
  }
  static std::string TooManyEntries() {
    return absl::StrCat("the block tables of all sequences would have more than ", kMaxTableEntries,
                        " entries; drop sequences");
  }
  std::string BehindWindow(size_t group, const Sequence& sequence) const {
    return absl::StrCat("group ", group, " has given back entries below ",
                        sequence.tables[group].first * entries_per_block);
  }

  // --------------------------------------------------------------------------------- rows

  // The row's sequence, made if it is new. Null: refused.
  Sequence* FindOrMake(int index, const StepRow& row, RowDone* done) {
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

  void Remember(const Sequence& sequence, RowDone* done) const {
    done->length = sequence.length;
    done->valid = sequence.valid;
    done->settled = sequence.settled;
  }

  // Returns false if the row is refused.
  bool CheckLengths(int index, const StepRow& row, const Sequence& sequence) {
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

  // The part of a table that row `row` reuses: entries [0, Kept). The others are new ones.
  int64_t Kept(const StepRow& row, const Table& table) const {
    if (row.keep_length == 0 && table.first > 0) return 0;
    return std::min<int64_t>(table.blocks.size(), CeilDivide(row.end(), entries_per_block));
  }

  // Entries below `kept` that the row writes although another sequence has them.
  template <typename Visit>
  void ForSharedWrites(const StepRow& row, const Table& table, int64_t kept, Visit visit) const {
    if (row.append_tokens == 0) return;
    for (int64_t i = row.keep_length / entries_per_block; i < kept; ++i) {
      if (references[table.blocks[i]] > 1) visit(i);
    }
  }

  int64_t BlocksNeeded(const StepRow& row, const Sequence& sequence) const {
    int64_t needed = 0;
    for (const Table& table : sequence.tables) {
      const int64_t kept = Kept(row, table);
      needed += CeilDivide(row.end(), entries_per_block) - kept;
      ForSharedWrites(row, table, kept, [&](int64_t) { ++needed; });
    }
    return needed;
  }

  void ApplyToTable(int group, const StepRow& row, Table* table, TableUndo* undo) {
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

  void ApplyRow(int index, const StepRow& row) {
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

  void ApplySequenceRow(int index, const StepRow& row, Sequence* sequence, RowDone* done) {
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

  // ------------------------------------------------------------------- rows, BLOCKS numbering

  void ApplyBlocksRow(int index, const StepRow& row, Sequence* sequence, RowDone* done) {
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

  bool CheckUpdate(int index, const KvTableUpdate& update, const Sequence& sequence) {
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

  void WriteTable(const KvTableUpdate& update, Sequence* sequence, RowDone* done) {
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

  // Checks the table entries that the row sees or writes.
  bool CheckBlocks(int index, const StepRow& row, int group, const Table& table) {
    const int64_t seen_begin = SeenBegin(spec.groups[group], row.end(), row.q_tokens);
    const int64_t begin =
        row.append_tokens > 0 ? std::min(seen_begin, row.keep_length) : seen_begin;
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

  // ----------------------------------------------------------------------------------- ends

  void Clear() {
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

  void UndoRow(RowDone& done, bool overwritten) {
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

  // `overwritten`: layer calls may have written the rows' entries.
  void TakeBack(bool overwritten) {
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

  void ReleaseTables(const Sequence& sequence) {
    for (const Table& table : sequence.tables) {
      table_entries -= static_cast<int64_t>(table.blocks.size());
      if (!by_sequences()) continue;
      for (int64_t i = table.first; i < static_cast<int64_t>(table.blocks.size()); ++i) {
        Release(table.blocks[i]);
      }
    }
  }

  void GiveWindowsBack(const RowDone& done) {
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

  void MakeViews(const KvStep& step) {
    rows.reserve(step.rows.size());
    for (const StepRow& row : step.rows) {
      KvRowView& view = rows.emplace_back();
      view.sequence = row.sequence;
      view.keep_length = row.keep_length;
      view.append_tokens = row.append_tokens;
      view.q_tokens = row.q_tokens;
      for (const Table& table : Find(row.sequence)->tables) view.tables.push_back(table.blocks);
    }
  }
};

KvBlockMap::KvBlockMap(const KvCacheSpec& spec, const KvPlacement& placement)
    : impl_(std::make_unique<Impl>(spec, placement)) {}
KvBlockMap::~KvBlockMap() = default;
KvBlockMap::KvBlockMap(KvBlockMap&&) noexcept = default;
KvBlockMap& KvBlockMap::operator=(KvBlockMap&&) noexcept = default;

std::vector<Refusal> KvBlockMap::Begin(const KvStep& step) {
  Impl& impl = *impl_;
  assert(!impl.begun);
  impl.free_left = impl.free.size();
  impl.refusals.clear();
  for (size_t i = 0; i < step.commands.size(); ++i) {
    const int index = static_cast<int>(i);
    if (const auto* fork = std::get_if<KvForkCommand>(&step.commands[i])) {
      impl.Fork(index, *fork);
    } else {
      impl.Drop(index, std::get<KvDropCommand>(step.commands[i]));
    }
  }
  for (size_t i = 0; i < step.rows.size(); ++i) {
    impl.ApplyRow(static_cast<int>(i), step.rows[i]);
  }
  if (!impl.refusals.empty()) {
    impl.TakeBack(/*overwritten=*/false);
    return std::move(impl.refusals);
  }
  impl.begun = true;
  impl.MakeViews(step);
  impl.crc = impl.by_sequences()
                 ? wire::Crc32c(impl.changes.data(), impl.changes.size() * sizeof(impl.changes[0]))
                 : 0;
  return {};
}

void KvBlockMap::Commit() {
  Impl& impl = *impl_;
  assert(impl.begun);
  for (const uint32_t block : impl.released) impl.Release(block);
  for (const JournalEntry& entry : impl.journal) {
    if (const auto* drop = std::get_if<Dropped>(&entry)) {
      impl.ReleaseTables(*drop->sequence);
    } else if (const auto* done = std::get_if<RowDone>(&entry); done && impl.by_sequences()) {
      impl.GiveWindowsBack(*done);
    }
  }
  for (const uint32_t block : impl.step_writes) impl.written.Insert(block);
  impl.Clear();
}

void KvBlockMap::Undo() {
  assert(impl_->begun);
  impl_->TakeBack(/*overwritten=*/true);
}

bool KvBlockMap::begun() const { return impl_->begun; }

void KvBlockMap::Settle() {
  Impl& impl = *impl_;
  assert(!impl.begun);
  if (impl.by_sequences()) {
    for (auto& [id, sequence] : impl.sequences) sequence->settled = true;
    return;
  }
  impl.sequences.clear();
  impl.table_entries = 0;
  impl.written = KvBlockSet(impl.spec.blocks, false);
}

const std::vector<KvRowView>& KvBlockMap::rows() const { return impl_->rows; }
const std::vector<KvBlockCopy>& KvBlockMap::copies() const { return impl_->copies; }
uint32_t KvBlockMap::tables_crc32c() const { return impl_->crc; }

int64_t KvBlockMap::blocks_free() const { return impl_->spec.blocks - blocks_used(); }
int64_t KvBlockMap::blocks_used() const {
  return impl_->by_sequences() ? impl_->spec.blocks - impl_->free.size() : impl_->written.size();
}
int64_t KvBlockMap::num_sequences() const { return static_cast<int64_t>(impl_->sequences.size()); }

std::vector<std::pair<SequenceId, int64_t>> KvBlockMap::sequences() const {
  std::vector<std::pair<SequenceId, int64_t>> list;
  if (!impl_->by_sequences()) return list;
  list.reserve(impl_->sequences.size());
  for (const auto& [id, sequence] : impl_->sequences) list.emplace_back(id, sequence->valid);
  std::sort(list.begin(), list.end());
  return list;
}

}  // namespace ringattn
