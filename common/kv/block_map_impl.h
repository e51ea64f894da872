// The state of a KvBlockMap and the parts of a step. Only the block_map*.cc files use it.
#ifndef RINGATTN_COMMON_KV_BLOCK_MAP_IMPL_H_
#define RINGATTN_COMMON_KV_BLOCK_MAP_IMPL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "common/base/limits.h"
#include "common/kv/block_map.h"
#include "common/kv/block_set.h"

namespace ringattn {

// Not thread safe.
struct KvBlockMap::Impl {
  // The limit of all table entries of a cache in BLOCKS numbering: 256 MiB of numbers. In SEQUENCES
  // numbering every entry is a reference to a block, so forks are bounded in the same way.
  static constexpr int64_t kMaxTableEntries = int64_t{1} << 26;

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
    int64_t kept = 0;               // entries that stayed in the table
    std::vector<uint32_t> removed;  // entries [kept, old_size)
    std::vector<std::pair<int64_t, uint32_t>>
        overwritten;  // index and block, of entries below kept
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

  static int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

  // --- Blocks: block_map.cc.

  void Release(uint32_t block);
  // Takes the block after `previous`, or the lowest one. REQUIRES: one is free.
  uint32_t Take(uint32_t previous);

  // Makes the views of the begun step: block_map.cc.
  void MakeViews(const KvStep& step);

  // --- Commands: block_map_commands.cc.

  void Refuse(int index, bool command, RefusalReason reason, int64_t length, std::string detail,
              int64_t blocks_missing = 0);
  void Fork(int index, const KvForkCommand& fork);
  void Drop(int index, const KvDropCommand& drop);
  // The first entry that queries from position `position` on may see.
  static int64_t NeededBegin(const KvLayerGroup& group, int64_t position) {
    if (group.window_left < 0) return 0;
    return std::max<int64_t>(0, position - group.window_left);
  }
  bool HasRoomForSequence() const {
    return static_cast<int64_t>(sequences.size()) < limits.max_sequences;
  }
  std::string TooManySequences() const;
  static std::string TooManyEntries();
  std::string BehindWindow(size_t group, const Sequence& sequence) const;

  // --- Rows of SEQUENCES numbering: block_map_rows.cc.

  // The row's sequence, made if it is new. Null: refused.
  Sequence* FindOrMake(int index, const StepRow& row, RowDone* done);
  void Remember(const Sequence& sequence, RowDone* done) const;
  // Returns false if the row is refused.
  bool CheckLengths(int index, const StepRow& row, const Sequence& sequence);
  // The part of a table that row `row` reuses: entries [0, Kept). The others are new ones.
  int64_t Kept(const StepRow& row, const Table& table) const;
  // Entries below `kept` that the row writes although another sequence has them.
  template <typename Visit>
  void ForSharedWrites(const StepRow& row, const Table& table, int64_t kept, Visit visit) const;
  int64_t BlocksNeeded(const StepRow& row, const Sequence& sequence) const;
  void ApplyToTable(int group, const StepRow& row, Table* table, TableUndo* undo);
  void ApplyRow(int index, const StepRow& row);
  void ApplySequenceRow(int index, const StepRow& row, Sequence* sequence, RowDone* done);

  // --- Rows of BLOCKS numbering, whose tables the client writes: block_map_client_tables.cc.

  void ApplyBlocksRow(int index, const StepRow& row, Sequence* sequence, RowDone* done);
  bool CheckUpdate(int index, const KvTableUpdate& update, const Sequence& sequence);
  void WriteTable(const KvTableUpdate& update, Sequence* sequence, RowDone* done);
  // Checks the table entries that the row sees or writes.
  bool CheckBlocks(int index, const StepRow& row, int group, const Table& table);

  // --- Ends: block_map_ends.cc.

  void Clear();
  void UndoRow(RowDone& done, bool overwritten);
  // `overwritten`: layer calls may have written the rows' entries.
  void TakeBack(bool overwritten);
  void ReleaseTables(const Sequence& sequence);
  void GiveWindowsBack(const RowDone& done);
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_BLOCK_MAP_IMPL_H_
