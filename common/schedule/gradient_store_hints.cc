#include "common/schedule/gradient_store_hints.h"

#include <cstdint>
#include <map>
#include <unordered_set>
#include <vector>

namespace ringattn {
namespace {

using Op = ComputeCall::Op;

// A buffer that a kConvert call reads as a whole.
struct Sum {
  ComputeCall* convert = nullptr;
  std::vector<ComputeCall*> zeros;
  ComputeCall* backward = nullptr;  // the call that adds to it
  int64_t added_bytes = 0;          // by that call; its operands have different keys
  bool shared = false;              // another transfer or call uses it
};

class StoreHints {
 public:
  explicit StoreHints(Program& program) : program_(program) {}

  void Add() {
    FindSums();
    if (sums_.empty()) return;
    for (Step& step : program_.steps) {
      for (const Transfer& transfer : step.transfers) Share(transfer.range);
      for (ComputeCall& call : step.calls) Note(call);
    }
    int store_hint = 0;
    for (Step& step : program_.steps) {
      for (ComputeCall& call : step.calls) {
        if (call.op == Op::kBackward && IsAlone(call)) AddHint(call, store_hint++);
      }
    }
  }

 private:
  void FindSums() {
    for (Step& step : program_.steps) {
      for (ComputeCall& call : step.calls) {
        if (call.op != Op::kConvert) continue;
        Sum& sum = sums_[call.source.buffer];
        const bool whole = call.source.bytes == program_.buffers[call.source.buffer].bytes;
        sum.shared = sum.convert != nullptr || !whole;
        sum.convert = &call;
        const bool is_new = of_result_.emplace(call.target.buffer, &sum).second;
        if (!is_new) sum.shared = of_result_[call.target.buffer]->shared = true;
      }
    }
  }

  Sum* Find(const ByteRange& range) {
    const auto found = sums_.find(range.buffer);
    return found == sums_.end() ? nullptr : &found->second;
  }

  // Marks the sums of the range as shared.
  void Share(const ByteRange& range) {
    if (Sum* sum = Find(range)) sum->shared = true;
    const auto result = of_result_.find(range.buffer);
    if (result != of_result_.end()) result->second->shared = true;
  }

  void Note(ComputeCall& call) {
    if (call.op == Op::kConvert) return;
    Sum* const zeroed = call.op == Op::kZero ? Find(call.target) : nullptr;
    if (zeroed != nullptr) return zeroed->zeros.push_back(&call);
    const std::unordered_set<const ByteRange*> added_to = AddedTo(call);
    ForEachRange(call, [&](const ByteRange& range) {
      if (added_to.count(&range) == 0) return Share(range);
      Sum* const sum = Find(range);
      if (sum == nullptr) return;
      if (sum->backward != nullptr && sum->backward != &call) sum->shared = true;
      sum->backward = &call;
      sum->added_bytes += range.bytes;
    });
  }

  // Returns the ranges that the call adds to, by address. A call may have keys of every rank.
  static std::unordered_set<const ByteRange*> AddedTo(const ComputeCall& call) {
    std::unordered_set<const ByteRange*> ranges;
    if (call.op != Op::kBackward) return ranges;
    for (const KvOperand& keys : call.kv) ranges.insert({&keys.dk, &keys.dv});
    return ranges;
  }

  bool IsAlone(const ComputeCall& call) {
    for (const KvOperand& keys : call.kv) {
      for (const ByteRange& range : {keys.dk, keys.dv}) {
        const Sum* const sum = Find(range);
        if (sum == nullptr || sum->shared || sum->backward != &call ||
            sum->added_bytes != sum->convert->source.bytes) {
          return false;
        }
      }
    }
    return !call.kv.empty();
  }

  ByteRange Take(const ByteRange& range, int store_hint) {
    Sum& sum = *Find(range);
    for (ComputeCall* zero : sum.zeros) zero->store_hint = store_hint;
    sum.convert->store_hint = store_hint;
    const int64_t narrower = sum.convert->source.bytes / sum.convert->target.bytes;
    return {sum.convert->target.buffer, sum.convert->target.offset + range.offset / narrower,
            range.bytes / narrower};
  }

  void AddHint(ComputeCall& call, int store_hint) {
    call.store_hint = store_hint;
    for (KvOperand& keys : call.kv) {
      keys.dk_out = Take(keys.dk, store_hint);
      keys.dv_out = Take(keys.dv, store_hint);
    }
  }

  Program& program_;
  std::map<BufferId, Sum> sums_;
  std::map<BufferId, Sum*> of_result_;  // by the target of the kConvert
};

}  // namespace

void AddStoreHints(Program& program) { StoreHints(program).Add(); }

}  // namespace ringattn
