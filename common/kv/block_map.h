// KvBlockMap: the sequences of a cache, their lengths and block tables, as a pure state machine.
// Equal commands give equal tables, so the ranks of a cache agree without talking to one another.
//
// Workers, the client library's checks, tests and the simulation use the same class.
//
//   Begin(step) -> refusals, or the step is begun: commands executed, rows cut to keep_length and
//                  extended, blocks of all groups taken, blocks to copy on write listed
//   Commit()    -> the begun step is final: blocks of drops, cuts and passed windows are free
//   Undo()      -> the begun step is taken back. Rows keep keep_length entries, not
//                  expected_length: entries between the two may be overwritten already.
//
// Blocks are table entries (placement.h): with S position parts, one covers S * block_tokens
// entries. Allocation: the number after the sequence's last block if it is free, else the lowest
// free one, so that tables consist of long ascending runs. Windows: Commit frees blocks that lie
// wholly before the window of keep_length of every group separately; a later row or fork that needs
// them is refused with kBehindWindow.
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
  // By group: block numbers from table entry 0 on. Entries before a group's window may be kNoBlock.
  std::vector<absl::Span<const uint32_t>> tables;
};
inline constexpr uint32_t kNoBlock = 0xffffffff;

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
  std::vector<Refusal> Begin(const Step& step);
  // REQUIRES: a step is begun.
  void Commit();
  void Undo();
  bool begun() const;

  // Of the begun step; valid until Commit or Undo.
  const std::vector<KvRowView>& rows() const;
  const std::vector<KvBlockCopy>& copies() const;
  // CRC-32C over the tables and lengths that the begun step changed.
  uint32_t tables_crc32c() const;

  int64_t blocks_free() const;
  int64_t blocks_used() const;
  int64_t num_sequences() const;
  // SEQUENCES: by number, with committed lengths.
  std::vector<std::pair<SequenceId, int64_t>> sequences() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_BLOCK_MAP_H_
