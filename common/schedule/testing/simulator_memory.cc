#include "common/schedule/testing/simulator_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {

SymbolicMemory::SymbolicMemory(const AttentionSpec& spec, const Schedule& schedule)
    : spec_(spec), schedule_(schedule) {
  for (const Program& program : schedule.programs) {
    memory_.emplace_back();
    for (const BufferSpec& buffer : program.buffers) {
      memory_.back().emplace_back((buffer.bytes + kCellBytes - 1) / kCellBytes);
    }
  }
}

bool SymbolicMemory::Fail(std::string what) {
  if (error_.empty()) error_ = std::move(what);
  return false;
}

ByteRange SymbolicMemory::Whole(int rank, BufferId id) const {
  return {id, 0, schedule_.programs[rank].buffers[id].bytes};
}

bool SymbolicMemory::Slice(int rank, const ByteRange& range, Cell** begin, int64_t* count) {
  if (range.buffer < 0 || range.buffer >= static_cast<int>(memory_[rank].size())) {
    return Fail("no such buffer");
  }
  Cells& cells = memory_[rank][range.buffer];
  const BufferSpec& buffer = schedule_.programs[rank].buffers[range.buffer];
  if (range.offset < 0 || range.bytes < 0 || range.offset + range.bytes > buffer.bytes) {
    return Fail(absl::StrCat("range outside buffer ", buffer.name));
  }
  *begin = cells.data() + range.offset / kCellBytes;
  *count = (range.bytes + kCellBytes - 1) / kCellBytes;
  return true;
}

bool SymbolicMemory::Require(int rank, const ByteRange& range, const char* what) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (cells[i].state == Cell::State::kUnwritten) {
      return Fail(absl::StrCat(what, " reads unwritten bytes of ",
                               schedule_.programs[rank].buffers[range.buffer].name));
    }
  }
  return true;
}

bool SymbolicMemory::Write(int rank, const ByteRange& range, Cell value) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  std::fill(cells, cells + count, value);
  return true;
}

int64_t SymbolicMemory::Identity(const Block& block, int64_t batch, int64_t row,
                                 int64_t inner) const {
  const int64_t rows = std::max(spec_.shape.seq_len_q, spec_.shape.seq_len_kv) + 1;
  int64_t identity = int64_t{block.tensor} * 64 + block.source;
  identity = identity * spec_.shape.batch + batch;
  identity = identity * rows + row;
  return identity * 4096 + inner;
}

bool SymbolicMemory::ForEach(Cell* cells, int64_t count, const Block& block, const Visit& visit) {
  const int64_t rows = block.row_end - block.row_begin;
  if (count != spec_.shape.batch * rows * block.head_count * block.cells_per_head) {
    return Fail("an operand of a wrong size");
  }
  const int64_t outer = block.statistic ? block.head_count : rows;
  const int64_t inner = block.statistic ? rows : block.head_count;
  for (int64_t batch = 0; batch < spec_.shape.batch; ++batch) {
    for (int64_t i = 0; i < outer; ++i) {
      for (int64_t j = 0; j < inner; ++j) {
        const int64_t row = block.row_begin + (block.statistic ? j : i);
        const int64_t head = block.head_begin + (block.statistic ? i : j);
        for (int64_t cell = 0; cell < block.cells_per_head; ++cell) {
          const int64_t identity = Identity(block, batch, row, head * block.cells_per_head + cell);
          if (!visit(*cells++, identity)) return false;
        }
      }
    }
  }
  return true;
}

bool SymbolicMemory::ForEach(int rank, const ByteRange& range, const Block& block,
                             const Visit& visit) {
  Cell* cells;
  int64_t count;
  return Slice(rank, range, &cells, &count) && ForEach(cells, count, block, visit);
}

bool SymbolicMemory::CheckRows(int rank, const ByteRange& range, const Block& block) {
  return ForEach(rank, range, block, [&](Cell& cell, int64_t identity) {
    if (cell.state == Cell::State::kRows && cell.identity == identity) return true;
    return Fail(
        absl::StrCat("rank ", rank, ": ", schedule_.programs[rank].buffers[range.buffer].name,
                     " does not hold rows of tensor ", block.tensor, " of rank ", block.source));
  });
}

bool SymbolicMemory::WritePairs(int rank, const ByteRange& range) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  for (int64_t i = 0; i < count; ++i) cells[i] = {Cell::State::kNumbers, i, 0};
  return true;
}

bool SymbolicMemory::CheckPairs(int rank, const ByteRange& range, int64_t head_bytes,
                                int64_t num_heads, int64_t head_begin, int64_t head_count) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  if (head_bytes % kCellBytes != 0) return Require(rank, range, "a call with score terms");
  const int64_t run = head_count * head_bytes / kCellBytes;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t plane = i / run;
    const int64_t expected = (plane * num_heads + head_begin) * head_bytes / kCellBytes + i % run;
    if (cells[i].state != Cell::State::kNumbers || cells[i].identity != expected) {
      return Fail("a bias or a mask of other heads");
    }
  }
  return true;
}

bool SymbolicMemory::WriteRows(int rank, const ByteRange& range, const Block& block) {
  return ForEach(rank, range, block, [&](Cell& cell, int64_t identity) {
    cell = {Cell::State::kRows, identity, 0};
    return true;
  });
}

}  // namespace ringattn
