#include "worker/executor/separate_blocks.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

bool IsForward(const ComputeCall& call) { return call.op == ComputeCall::Op::kForward; }

bool Contains(const ByteRange& outer, const ByteRange& inner) {
  return outer.offset <= inner.offset && inner.offset + inner.bytes <= outer.offset + outer.bytes;
}

class Separation {
 public:
  explicit Separation(Program& program) : program_(program) {
    for (size_t step = 0; step < program.steps.size(); ++step) {
      const std::vector<ComputeCall>& calls = program.steps[step].calls;
      if (std::any_of(calls.begin(), calls.end(), IsForward)) last_forward_ = step;
    }
  }

  // Returns false if the program must stay as it was.
  bool Apply() {
    for (size_t step = 0; step < program_.steps.size(); ++step) {
      std::vector<Transfer>& transfers = program_.steps[step].transfers;
      for (Transfer& transfer : transfers) {
        if (transfer.kind == Transfer::Kind::kSend) Follow(transfer.range);
      }
      for (Transfer& transfer : transfers) {
        if (transfer.kind == Transfer::Kind::kReceive) Receive(transfer.range, step);
      }
      for (ComputeCall& call : program_.steps[step].calls) Follow(call);
    }
    return possible_ && separated_;
  }

 private:
  // The contents of a buffer of the original program.
  struct Contents {
    BufferId buffer = kNoBuffer;      // where they are now
    bool read = false;                // by a forward call
    std::vector<ByteRange> received;  // in `buffer`, if it is a new one
  };

  Contents& Of(BufferId original) {
    const auto found = contents_.try_emplace(original, Contents{original, false, {}}).first;
    return found->second;
  }

  void Receive(ByteRange& range, size_t step) {
    const BufferId original = range.buffer;
    Contents& now = Of(original);
    if (now.read && step < last_forward_) {
      const auto id = static_cast<BufferId>(program_.buffers.size());
      BufferSpec buffer;
      buffer.name = absl::StrCat(program_.buffers[original].name, ".", id);
      program_.buffers.push_back(std::move(buffer));
      now = {id, false, {}};
      separated_ = true;
    }
    range.buffer = now.buffer;
    if (now.buffer == original) return;
    now.received.push_back(range);
    int64_t& bytes = program_.buffers[now.buffer].bytes;
    bytes = std::max(bytes, range.offset + range.bytes);
  }

  // Directs an access to the present contents.
  void Follow(ByteRange& range) {
    if (range.buffer == kNoBuffer) return;
    const Contents& now = Of(range.buffer);
    if (now.buffer == range.buffer) return;
    range.buffer = now.buffer;
    const bool complete =
        std::any_of(now.received.begin(), now.received.end(),
                    [&](const ByteRange& received) { return Contains(received, range); });
    possible_ = possible_ && complete;
  }

  void Follow(ComputeCall& call) {
    for (KvOperand& keys : call.kv) {
      for (ByteRange* range : {&keys.k, &keys.v}) {
        if (range->buffer == kNoBuffer) continue;
        if (IsForward(call)) Of(range->buffer).read = true;
        Follow(*range);
      }
      Follow(keys.segment_ids);
    }
    ForEachRange(call, [this](const ByteRange& range) {
      const auto found = contents_.find(range.buffer);
      possible_ = possible_ && (found == contents_.end() || found->second.buffer == range.buffer);
    });
  }

  Program& program_;
  size_t last_forward_ = 0;                // the last step with a forward call
  std::map<BufferId, Contents> contents_;  // by buffer of the original program
  bool possible_ = true;
  bool separated_ = false;
};

}  // namespace

std::optional<Program> SeparateBlocks(Program program) {
  if (!Separation(program).Apply()) return std::nullopt;
  return program;
}

}  // namespace ringattn::worker
