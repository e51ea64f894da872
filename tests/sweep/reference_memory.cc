#include "tests/sweep/reference_memory.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/program/lane_check.h"
#include "tests/sweep/reference_parts.h"

namespace ringattn::tests {

absl::Status Broken(int rank, size_t step, const std::string& reason) {
  return absl::InternalError(absl::StrCat("rank ", rank, ", step ", step, ": ", reason));
}

absl::Status ReferenceMemory::Allocate(const TensorMap& inputs) {
  for (int rank = 0; rank < plan_.world_size; ++rank) {
    const Program& program = schedule_.programs[rank];
    buffers_.emplace_back();
    for (const BufferSpec& buffer : program.buffers) buffers_.back().emplace_back(buffer.bytes);
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      const BufferSpec& buffer = program.buffers[id];
      if (!buffer.input.has_value()) continue;
      absl::Status status =
          CopyShard(rank, id, *buffer.input, const_cast<uint8_t*>(inputs.at(*buffer.input).data()),
                    /*to_buffer=*/true);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status ReferenceMemory::CopyShard(int rank, size_t id, TensorId tensor, uint8_t* whole,
                                        bool to_buffer) {
  const TensorLayout layout = LayoutOf(spec_, plan_, tensor);
  const auto tokens = TokensOf(ShardsOf(plan_, layout)[rank]);
  const int64_t rows = static_cast<int64_t>(tokens.size());
  PoisonedBuffer& buffer = buffers_[rank][id];
  const int64_t bytes = layout.outer * rows * layout.inner_bytes;
  // Only what travels may be larger, for another rank's block later on.
  const bool may_grow = to_buffer && (tensor == TensorId::kK || tensor == TensorId::kV ||
                                      tensor == TensorId::kKvSegmentIds);
  if (may_grow ? buffer.bytes() < bytes : buffer.bytes() != bytes) {
    return Broken(rank, 0,
                  absl::StrCat(schedule_.programs[rank].buffers[id].name, " has ", buffer.bytes(),
                               " bytes, its shard ", bytes));
  }
  for (int64_t outer = 0; outer < layout.outer; ++outer) {
    for (int64_t row = 0; row < rows; ++row) {
      uint8_t* local = buffer.data() + (outer * rows + row) * layout.inner_bytes;
      uint8_t* global = whole + (outer * layout.rows + tokens[row]) * layout.inner_bytes;
      std::memcpy(to_buffer ? local : global, to_buffer ? global : local, layout.inner_bytes);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorMap> ReferenceMemory::Collect(size_t steps) {
  TensorMap outputs;
  for (int rank = 0; rank < plan_.world_size; ++rank) {
    const Program& program = schedule_.programs[rank];
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      if (!buffers_[rank][id].guards_intact()) {
        return Broken(rank, steps, absl::StrCat("wrote outside ", program.buffers[id].name));
      }
      if (!program.buffers[id].output.has_value()) continue;
      const TensorId tensor = *program.buffers[id].output;
      std::vector<uint8_t>& whole = outputs[tensor];
      whole.resize(LayoutOf(spec_, tensor).bytes(), PoisonedBuffer::kPoison);
      absl::Status status = CopyShard(rank, id, tensor, whole.data(), /*to_buffer=*/false);
      if (!status.ok()) return status;
    }
  }
  return outputs;
}

absl::Status ReferenceMemory::Exchange(size_t step) {
  // Messages in flight from one rank to another, in order.
  std::map<std::pair<int, int>, std::deque<std::vector<uint8_t>>> wire;
  for (const bool sending : {true, false}) {
    for (int rank = 0; rank < plan_.world_size; ++rank) {
      const Program& program = schedule_.programs[rank];
      if (step >= program.steps.size()) continue;
      for (const Transfer& transfer : EndingAt(program, step)) {
        if ((transfer.kind == Transfer::Kind::kSend) != sending) continue;
        if (transfer.peer < 0 || transfer.peer >= plan_.world_size || transfer.peer == rank) {
          return Broken(rank, step, absl::StrCat("no such peer: ", transfer.peer));
        }
        absl::StatusOr<uint8_t*> data = Address(rank, step, transfer.range);
        if (!data.ok()) return data.status();
        if (sending) {
          wire[{rank, transfer.peer}].emplace_back(*data, *data + transfer.range.bytes);
          continue;
        }
        auto& messages = wire[{transfer.peer, rank}];
        if (messages.empty()) {
          return Broken(rank, step, absl::StrCat("nothing to receive from ", transfer.peer));
        }
        if (static_cast<int64_t>(messages.front().size()) != transfer.range.bytes) {
          return Broken(rank, step,
                        absl::StrCat("receives ", transfer.range.bytes, " bytes from ",
                                     transfer.peer, ", which sends ", messages.front().size()));
        }
        std::copy(messages.front().begin(), messages.front().end(), *data);
        messages.pop_front();
      }
    }
  }
  for (const auto& [pair, messages] : wire) {
    if (!messages.empty()) {
      return Broken(pair.first, step, absl::StrCat("no matching receive at rank ", pair.second));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint8_t*> ReferenceMemory::Address(int rank, size_t step, const ByteRange& range) {
  std::vector<PoisonedBuffer>& buffers = buffers_[rank];
  if (range.buffer < 0 || range.buffer >= static_cast<int>(buffers.size()) || range.offset < 0 ||
      range.bytes < 0 || range.offset + range.bytes > buffers[range.buffer].bytes()) {
    return Broken(rank, step,
                  absl::StrCat("range ", range.offset, " + ", range.bytes, " is not inside buffer ",
                               range.buffer));
  }
  return buffers[range.buffer].data() + range.offset;
}

}  // namespace ringattn::tests
