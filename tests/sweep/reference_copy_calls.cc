// Binders of copies, and of what goes between a dilated problem and its parts.
#include <cstdint>
#include <vector>

#include "tests/sweep/reference_calls.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

namespace {

// Rows and heads of a part, by the definition's lists of them.
struct PartLists {
  int64_t rows;
  const std::vector<RowRun>& row_runs;
  const std::vector<int32_t>& head_of;
};

PartLists ListsOf(Operands& operands, const ReferencePart& of) {
  const PartForm& form = operands.call.form;
  const std::vector<int64_t>& rows = (form.of_keys ? of.kv : of.q)[operands.rank].rows;
  std::vector<RowRun>& runs = operands.store.runs.emplace_back();
  for (size_t i = 0; i < rows.size(); ++i) {
    runs.push_back({rows[i], 1, 1, static_cast<int64_t>(i)});
  }
  const std::vector<int64_t> only_head = {0};
  const auto& heads = form.heads_of == PartForm::Heads::kKeyValue ? of.kv_heads
                      : form.heads_of == PartForm::Heads::kQuery  ? of.q_heads
                                                                  : only_head;
  std::vector<int32_t>& head_of = operands.store.heads_of.emplace_back(heads.begin(), heads.end());
  return {static_cast<int64_t>(rows.size()), runs, head_of};
}

int64_t RowsOfWhole(const Operands& operands) {
  const ShardPlan& plan = operands.problems.plan();
  return RowsIn((operands.call.form.of_keys ? plan.kv : plan.q)[operands.rank]);
}

int64_t HeadsOfWhole(const Operands& operands) {
  const AttentionShape& shape = operands.problems.spec().shape;
  const PartForm::Heads heads_of = operands.call.form.heads_of;
  return heads_of == PartForm::Heads::kKeyValue ? shape.num_kv_heads
         : heads_of == PartForm::Heads::kQuery  ? shape.num_heads
                                                : 1;
}

}  // namespace

KernelCall BindCopy(Operands& operands) {
  const ComputeCall& call = operands.call;
  const CopyForm& form = call.copy;
  const auto check = [&](const ByteRange& range, int64_t pitch) {
    if (form.runs < 1 || form.run_bytes < 1 || pitch < form.run_bytes ||
        range.bytes != (form.runs - 1) * pitch + form.run_bytes) {
      operands.Fail("a copy whose runs are not its bytes");
    }
    return operands.Range(range);
  };
  return CopyCall{check(call.target, form.target_pitch),
                  check(call.source, form.source_pitch),
                  form.runs,
                  form.run_bytes,
                  form.source_pitch,
                  form.target_pitch};
}

KernelCall BindGather(Operands& operands) {
  const ComputeCall& call = operands.call;
  GatherCall made;
  if (operands.part == nullptr) {
    operands.Fail("a copy of no part");
    return made;
  }
  const PartLists lists = ListsOf(operands, *operands.part);
  made.heads_first = call.form.heads_first;
  made.outer = call.form.outer;
  made.inner_bytes = call.form.inner_bytes;
  made.rows = RowsOfWhole(operands);
  made.part_rows = lists.rows;
  made.heads = HeadsOfWhole(operands);
  made.part_heads = static_cast<int64_t>(lists.head_of.size());
  made.row_runs = lists.row_runs;
  made.head_of = lists.head_of;
  made.whole =
      operands.Exactly(call.source, made.outer * made.rows * made.heads * made.inner_bytes);
  made.part = operands.Exactly(call.target,
                               made.outer * made.part_rows * made.part_heads * made.inner_bytes);
  return made;
}

KernelCall BindScatter(Operands& operands, bool merges) {
  const ComputeCall& call = operands.call;
  ScatterCall made;
  if (operands.part == nullptr ||
      call.part + call.parts.size() > operands.problems.parts().size()) {
    operands.Fail("results of no part");
    return made;
  }
  const PartForm& form = call.form;
  const AttentionSpec& whole = operands.problems.spec();
  made.merges = merges;
  made.heads_first = form.heads_first;
  made.initial = call.initial;
  made.final = call.final;
  made.dtype = whole.result_dtype();
  made.outer = form.outer;
  made.rows = RowsOfWhole(operands);
  made.heads = HeadsOfWhole(operands);
  made.width = form.inner_bytes / 4;
  for (size_t i = 0; i < call.parts.size(); ++i) {
    const PartLists lists = ListsOf(operands, operands.problems.parts()[call.part + i]);
    const int64_t vectors = made.outer * lists.rows * static_cast<int64_t>(lists.head_of.size());
    ScatterPart& scattered = made.parts.emplace_back();
    scattered.rows = lists.rows;
    scattered.row_runs = lists.row_runs;
    scattered.head_of = lists.head_of;
    scattered.values = operands.Floats(call.parts[i].out, vectors * made.width);
    if (merges) scattered.lse = operands.Floats(call.parts[i].lse, vectors);
  }
  const int64_t vectors = made.outer * made.rows * made.heads;
  const int64_t result_bytes = vectors * made.width * ElementBytes(made.dtype);
  if (!merges) {
    if (!call.initial) made.values = operands.Floats(call.source, vectors * made.width);
    if (call.final) {
      made.result = operands.Exactly(call.target, result_bytes);
    } else {
      made.values = operands.Floats(call.target, vectors * made.width);
    }
    return made;
  }
  if (made.width != whole.shape.head_dim_v) operands.Fail("a merge of other rows than out's");
  made.lse = operands.Floats(call.q.lse, vectors);
  if (!(call.initial && call.final)) {
    made.values = operands.Floats(call.q.out_acc, vectors * made.width);
  }
  if (call.final) made.result = operands.Exactly(call.q.out, result_bytes);
  if (call.final && whole.options.sinks) {
    made.sinks = operands.Floats(call.q.Option(TensorId::kSinks), whole.shape.num_heads);
  }
  return made;
}

}  // namespace ringattn::tests
