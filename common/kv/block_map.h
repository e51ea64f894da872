// KvBlockMap: the sequences of a cache, their lengths and block tables, as a pure state machine.
// Equal commands give equal tables, so the ranks of a cache agree without talking to one another.
//
// Workers, the client library's checks, tests and the simulation use the same class.
//
//   Begin(step) -> refusals, or the step is begun: commands executed, rows cut to keep_length and
//                  extended, blocks of all groups taken, blocks to copy on write listed
//   Commit()    -> the begun step is final: blocks of drops, cuts and passed windows are free
//   Undo()      -> tables, sequences and free blocks are as before Begin. A rank may have
//                  overwritten entries from keep_length on, so the sequence's valid length is now
//                  at most keep_length.
//   Settle()    -> a new writer begins. Ranks that undid a step and ranks that never began it have
//                  equal tables but different valid lengths, so the writer takes the minimum over
//                  ranks, and the first row of each sequence may expect fewer entries than the
//                  tables hold. BLOCKS: forgets all tables; the new writer sends them again.
//
// Blocks are table entries (placement.h): with S position parts, one covers S * block_tokens
// entries. Allocation: the number after the sequence's last block if it is free, else the lowest
// free one, so that tables consist of long ascending runs. Windows: Commit frees blocks that lie
// wholly before the window of keep_length, for every group separately; a later row or fork that
// needs them is refused with kBehindWindow. Blocks that a step gives up are free from the next step
// on.
#ifndef RINGATTN_COMMON_KV_BLOCK_MAP_H_
#define RINGATTN_COMMON_KV_BLOCK_MAP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/step.h"

namespace ringattn {

// One row of the begun step, as kernels need it.
struct KvRowView {
  SequenceId sequence = 0;
  int64_t keep_length = 0;  // entries before the row's own
  int64_t append_tokens = 0;
  int64_t q_tokens = 0;
  // By group: block numbers from table entry 0 on. Entries before a group's window may be kNoBlock,
  // or any number in BLOCKS numbering; SeenBegin is the first one that may be read.
  std::vector<absl::Span<const uint32_t>> tables;

  int64_t end() const { return keep_length + append_tokens; }
};
inline constexpr uint32_t kNoBlock = 0xffffffff;

// The first entry that a query of the row sees in `group`: every query sees entries of
// [SeenBegin, end) only. end() if the row has no queries.
int64_t SeenBegin(const KvLayerGroup& group, int64_t end, int64_t q_tokens);

// Entries [0, entries) of block `source` are to be copied to block `target` in every plane of the
// group's layers, before any layer call of the step. `entries` counts entries of the table entry.
struct KvBlockCopy {
  int group = 0;
  uint32_t source = 0;
  uint32_t target = 0;
  int64_t entries = 0;
};

// Not thread safe.
class KvBlockMap {
 public:
  KvBlockMap(const KvCacheSpec& spec, const KvPlacement& placement);
  ~KvBlockMap();
  KvBlockMap(KvBlockMap&&) noexcept;
  KvBlockMap& operator=(KvBlockMap&&) noexcept;

  // Empty: the step is begun. REQUIRES: no step is begun.
  std::vector<Refusal> Begin(const KvStep& step);
  // REQUIRES: a step is begun.
  void Commit();
  void Undo();
  bool begun() const;
  // REQUIRES: no step is begun.
  void Settle();

  // The rows of the begun step; valid until Commit or Undo.
  const std::vector<KvRowView>& rows() const;
  const std::vector<KvBlockCopy>& copies() const;
  // CRC-32C over the changes of tables and lengths by the begun step. 0 in BLOCKS numbering, where
  // the client writes the tables.
  uint32_t tables_crc32c() const;

  // BLOCKS: blocks that no step has written since Settle count as free.
  int64_t blocks_free() const;
  int64_t blocks_used() const;
  int64_t num_sequences() const;
  // SEQUENCES: by number, with valid lengths.
  std::vector<std::pair<SequenceId, int64_t>> sequences() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_BLOCK_MAP_H_
