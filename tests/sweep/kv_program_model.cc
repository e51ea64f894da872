#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/kv/shard_cut.h"
#include "common/oracle/comparator.h"
#include "common/oracle/oracle.h"
#include "tests/sweep/kv_program.h"

namespace ringattn::tests {

void KvProgram::Cut(int64_t length, Sequence* sequence) const {
  sequence->length = length;
  for (auto& [layer, entries] : sequence->layers) {
    const KvLayerGroup& group = spec_.groups[FindLayer(spec_, layer)->group];
    entries.k.resize(std::min<size_t>(entries.k.size(), length * KRow(group)));
    entries.v.resize(std::min<size_t>(entries.v.size(), length * VRow(group)));
  }
}

Model KvProgram::Commands(const KvStep& step) {
  Model after = model_;
  for (const KvCommand& command : step.commands) {
    if (const auto* fork = std::get_if<KvForkCommand>(&command)) {
      after[fork->target] = after.at(fork->source);
      Cut(fork->length, &after[fork->target]);
    } else {
      after.erase(std::get<KvDropCommand>(command).sequences[0]);
    }
  }
  for (const StepRow& row : step.rows) {
    Sequence& sequence = after[row.sequence];
    Cut(row.keep_length, &sequence);
    sequence.length = row.end();
    if (spec_.numbering == KvNumbering::kBlocks) {
      sequence.tables = new_tables_.at(row.sequence);
      sequence.tables_sent = true;
    }
  }
  return after;
}

void KvProgram::Append(const KvStep& step, const v1::LayerCall& call, Model* model) const {
  const KvLayerGroup& group = spec_.groups[FindLayer(spec_, call.layer())->group];
  int64_t at = 0;
  for (const StepRow& row : step.rows) {
    Entries& entries = (*model)[row.sequence].layers[call.layer()];
    entries.k.append(call.k(), at * KRow(group), row.append_tokens * KRow(group));
    entries.v.append(call.v(), at * VRow(group), row.append_tokens * VRow(group));
    at += row.append_tokens;
  }
}

bool KvProgram::CheckResults(const KvStep& step, const v1::LayerCall& call,
                             const std::vector<v1::LayerResult>& results, const Model& model) {
  const auto joined = JoinResults(spec_, placement_, step, call, results);
  if (!Check(joined.status(), "join")) return false;
  if (step.q_tokens() == 0) return true;
  const KvLayerLocation location = *FindLayer(spec_, call.layer());
  const KvLayerGroup& group = spec_.groups[location.group];
  const bool partial = call.output() == v1::KV_OUTPUT_PARTIAL;
  AttentionSpec plain;
  plain.dtype = spec_.dtype;
  plain.fp32_results = partial;
  plain.options.softmax_scale = group.softmax_scale;
  plain.options.softcap = group.softcap;
  plain.options.causal = group.causal;
  plain.options.window_left = group.window_left;
  plain.options.sinks = !partial && !group.sinks.empty();
  plain.shape.packed = true;
  plain.shape.num_heads = group.num_heads;
  plain.shape.num_kv_heads = group.num_kv_heads;
  plain.shape.head_dim = group.head_dim;
  plain.shape.head_dim_v = group.head_dim_v;
  plain.shape.cu_seqlens_q = plain.shape.cu_seqlens_k = {0};
  std::string k, v;
  for (const StepRow& row : step.rows) {
    const Sequence& sequence = model.at(row.sequence);
    plain.shape.seq_len_q += row.q_tokens;
    plain.shape.seq_len_kv += row.end();
    plain.shape.cu_seqlens_q.push_back(plain.shape.seq_len_q);
    plain.shape.cu_seqlens_k.push_back(plain.shape.seq_len_kv);
    if (row.end() == 0) continue;
    k += sequence.layers.at(call.layer()).k;
    v += sequence.layers.at(call.layer()).v;
  }
  const std::vector<float> sinks =
      plain.options.sinks
          ? std::vector<float>(group.sinks.begin() + location.plane * group.num_heads,
                               group.sinks.begin() + (location.plane + 1) * group.num_heads)
          : std::vector<float>();
  const oracle::Result expected =
      oracle::EvaluateAll(plain, {.q = call.q().data(),
                                  .k = k.data(),
                                  .v = v.data(),
                                  .sinks = plain.options.sinks ? sinks.data() : nullptr});
  oracle::Outputs outputs;
  outputs.out = joined->out().data();
  if (!joined->lse().empty()) {
    outputs.lse = reinterpret_cast<const float*>(joined->lse().data());
  }
  const oracle::Report report = oracle::Compare(plain, expected, outputs);
  ++results_;
  if (report.passed()) return true;
  failure_ = absl::StrCat("layer ", call.layer(), ", output ", static_cast<int>(call.output()),
                          ":\n", report.ToString(), ToProto(step).ShortDebugString());
  return false;
}

}  // namespace ringattn::tests
