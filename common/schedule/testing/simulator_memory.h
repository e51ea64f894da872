// The memory of the symbolic ranks of schedule_simulator.h: the contents of each cell (a few bytes)
// of every buffer.
#ifndef RINGATTN_COMMON_SCHEDULE_TESTING_SIMULATOR_MEMORY_H_
#define RINGATTN_COMMON_SCHEDULE_TESTING_SIMULATOR_MEMORY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"

namespace ringattn {

struct Cell {
  enum class State : uint8_t {
    kUnwritten,
    kNumbers,    // numbers without an identity
    kRows,       // of an input, of out, lse or delta
    kPartial,    // of out or lse over some keys
    kGradients,  // sums; identity -1: only zeros
  };
  State state = State::kUnwritten;
  int64_t identity = -1;      // SymbolicMemory::Identity
  uint64_t contributors = 0;  // kPartial, kGradients: ranks that have contributed
};
using Cells = std::vector<Cell>;

// The required contents of an operand: some rows and heads of a rank's shard of a tensor.
struct Block {
  int tensor = 0;  // TensorId, or kDeltaTensor
  int source = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t head_begin = 0;
  int64_t head_count = 1;
  int64_t cells_per_head = 1;
  bool statistic = false;  // [batch, heads, rows], else [batch, rows, heads, ..]
};
inline constexpr int kDeltaTensor = 60;

// Not thread safe.
class SymbolicMemory {
 public:
  // Bytes per cell. Comparisons use the element counts of gradients (fp32) and keys, not their
  // bytes.
  static constexpr int64_t kCellBytes = 2;

  SymbolicMemory(const AttentionSpec& spec, const Schedule& schedule);

  const std::string& error() const { return error_; }
  // Records an error unless an earlier one exists. Returns false.
  bool Fail(std::string what);

  // Returns the cells of a range; returns false with an error if the range leaves the buffer.
  bool Slice(int rank, const ByteRange& range, Cell** begin, int64_t* count);
  // Checks that every cell has been written.
  bool Require(int rank, const ByteRange& range, const char* what);
  bool Write(int rank, const ByteRange& range, Cell value);
  ByteRange Whole(int rank, BufferId id) const;
  const Cells& Of(int rank, BufferId id) const { return memory_[rank][id]; }
  int ranks() const { return static_cast<int>(memory_.size()); }

  // Calls visit(cell, identity) for every cell of a block. Returns false, with an error, if the
  // range has another size or a visit returns false.
  using Visit = std::function<bool(Cell& cell, int64_t identity)>;
  bool ForEach(int rank, const ByteRange& range, const Block& block, const Visit& visit);
  // The same over cells outside any range, all of the block's.
  bool ForEach(Cell* cells, int64_t count, const Block& block, const Visit& visit);
  // Checks that a range holds exactly the block's rows.
  bool CheckRows(int rank, const ByteRange& range, const Block& block);
  bool WriteRows(int rank, const ByteRange& range, const Block& block);
  // Write the cells of a bias or a mask, by number; check that `range` has those of some heads of
  // each plane, if a head's bytes are whole cells.
  bool WritePairs(int rank, const ByteRange& range);
  bool CheckPairs(int rank, const ByteRange& range, int64_t head_bytes, int64_t num_heads,
                  int64_t head_begin, int64_t head_count);

 private:
  int64_t Identity(const Block& block, int64_t batch, int64_t row, int64_t inner) const;

  const AttentionSpec& spec_;
  const Schedule& schedule_;
  std::string error_;
  std::vector<std::vector<Cells>> memory_;  // [rank][buffer]
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_TESTING_SIMULATOR_MEMORY_H_
