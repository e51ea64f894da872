#include <algorithm>
#include <cmath>
#include <utility>

#include "common/kv/shard_cut.h"
#include "common/oracle/generator.h"
#include "tests/sweep/kv_program.h"

namespace ringattn::tests {

void KvProgram::MakeSpec() {
  placement_.head_parts = static_cast<int>(1 + Pick(4));
  placement_.position_parts = static_cast<int>(1 + Pick(4));
  if (world_size_ > 0) {
    while (world_size_ % placement_.head_parts != 0) --placement_.head_parts;
    placement_.position_parts = world_size_ / placement_.head_parts;
  }
  spec_.dtype = OneOf({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  spec_.block_tokens = OneOf<int64_t>({16, 16, 16, 32, 64, 128, 256});
  spec_.numbering = Chance(3) ? KvNumbering::kBlocks : KvNumbering::kSequences;
  per_entry_ = EntriesPerTableEntry(spec_, placement_);
  uint32_t layer = 0;
  const bool same_shape = Chance(2);
  const int64_t groups = 1 + Pick(2);
  for (int64_t g = 0; g < groups; ++g) {
    KvLayerGroup group;
    if (g > 0 && same_shape) group = spec_.groups[0];
    group.layers.clear();
    for (int64_t i = 1 + Pick(2); i > 0; --i) group.layers.push_back(layer++);
    if (g == 0 || !same_shape) {
      group.num_kv_heads = placement_.head_parts * (1 + Pick(2));
      group.num_heads = group.num_kv_heads * (1 + Pick(3));
      group.head_dim = OneOf<int64_t>({8, 16, 40, 64});
      if (on_gpu_ && Chance(2)) group.head_dim = OneOf<int64_t>({36, 72, 96, 128, 192, 256});
      group.head_dim_v = Chance(3) ? OneOf<int64_t>({8, 24, 64}) : group.head_dim;
    }
    group.softmax_scale = Chance(4) ? 0.3 : 1.0 / std::sqrt(static_cast<double>(group.head_dim));
    group.softcap = Chance(3) ? 5.0 : 0.0;
    group.window_left = Chance(2) ? Pick(2 * per_entry_) : -1;
    group.causal = !Chance(4);
    group.sinks.clear();
    if (Chance(3)) {
      for (size_t i = 0; i < group.layers.size() * group.num_heads; ++i) {
        group.sinks.push_back(Chance(5) ? -INFINITY : static_cast<float>(Pick(400)) / 100 - 2);
      }
    }
    spec_.groups.push_back(std::move(group));
  }
  max_length_ = std::clamp<int64_t>(3 * per_entry_, 100, 500);
  spec_.blocks = (6 + Pick(20)) * groups;
  next_step_ = 1;
}

KvStep KvProgram::MakeStep() {
  KvStep step;
  step.number = next_step_;
  std::map<SequenceId, int64_t> lengths;
  for (const auto& [id, sequence] : model_) lengths[id] = sequence.length;
  if (spec_.numbering == KvNumbering::kSequences) {
    for (const auto& [id, sequence] : model_) {
      if (Chance(6)) {
        const int64_t length = Chance(2) ? sequence.length : Pick(sequence.length + 1);
        step.commands.push_back(KvForkCommand{id, next_id_, length});
        lengths[next_id_++] = length;
      } else if (Chance(8)) {
        step.commands.push_back(KvDropCommand{{id}});
        lengths.erase(id);
      }
    }
  } else {
    for (const auto& [id, sequence] : model_) {
      if (!Chance(8)) continue;
      step.commands.push_back(KvDropCommand{{id}});
      lengths.erase(id);
    }
  }
  if (lengths.size() < 4 && !Chance(4)) lengths[next_id_++] = 0;
  const bool reads_only = !model_.empty() && Chance(8);
  for (const auto& [id, length] : lengths) {
    if (Chance(5)) continue;
    StepRow row;
    row.sequence = id;
    row.keep_length = Chance(5) ? Pick(length + 1) : length;
    row.expected_length = spec_.numbering == KvNumbering::kBlocks ? row.keep_length : length;
    const int64_t room = std::max<int64_t>(0, max_length_ - row.keep_length);
    if (!reads_only && room > 0) {
      row.append_tokens = std::min(room, Chance(3) ? Pick(200) : Pick(4));
    }
    row.q_tokens =
        Chance(3) ? Pick(row.append_tokens + 3) : std::min<int64_t>(row.append_tokens, 9);
    if (Chance(6)) row.q_tokens = 0;
    step.rows.push_back(std::move(row));
  }
  if (spec_.numbering == KvNumbering::kBlocks) WriteTables(&step);
  std::shuffle(step.rows.begin(), step.rows.end(), random_);
  return step;
}

void KvProgram::WriteTables(KvStep* step) {
  std::vector<uint32_t> free;
  {
    std::vector<int> users(spec_.blocks, 0);
    for (const auto& [id, sequence] : model_) {
      for (const auto& table : sequence.tables) {
        for (const uint32_t block : table) ++users[block];
      }
    }
    for (uint32_t b = 0; b < users.size(); ++b) {
      if (users[b] == 0) free.push_back(b);
    }
    std::shuffle(free.begin(), free.end(), random_);
  }
  new_tables_.clear();
  std::vector<StepRow> rows;
  for (StepRow& row : step->rows) {
    const auto found = model_.find(row.sequence);
    std::vector<std::vector<uint32_t>> tables(spec_.groups.size());
    if (found != model_.end()) tables = found->second.tables;
    const int64_t size = (row.end() + per_entry_ - 1) / per_entry_;
    bool fits = true;
    for (size_t g = 0; g < tables.size(); ++g) {
      const int64_t old = static_cast<int64_t>(tables[g].size());
      tables[g].resize(std::min(old, size));
      while (static_cast<int64_t>(tables[g].size()) < size && !free.empty()) {
        tables[g].push_back(free.back());
        free.pop_back();
      }
      fits = fits && static_cast<int64_t>(tables[g].size()) == size;
      const bool sent = found != model_.end() && found->second.tables_sent;
      const int64_t first = sent && !Chance(4) ? std::min(old, size) : 0;
      row.tables.push_back(
          {static_cast<int>(g), first, {tables[g].begin() + first, tables[g].end()}});
    }
    if (!fits) continue;
    new_tables_[row.sequence] = std::move(tables);
    rows.push_back(std::move(row));
  }
  step->rows = std::move(rows);
}

v1::LayerCall KvProgram::MakeCall(const KvStep& step, uint32_t layer, int64_t stream) {
  const KvLayerLocation location = *FindLayer(spec_, layer);
  v1::LayerCall call;
  call.set_step(step.number);
  call.set_layer(layer);
  call.set_output(OneOf({v1::KV_OUTPUT_UNSPECIFIED, v1::KV_OUTPUT_OUT, v1::KV_OUTPUT_OUT_AND_LSE,
                         v1::KV_OUTPUT_PARTIAL}));
  if (step.q_tokens() == 0 && Chance(2)) call.set_output(v1::KV_OUTPUT_NONE);
  const KvCallBytes bytes = CallBytes(spec_, step, location.group, call.output());
  Fill(bytes.q, stream, call.mutable_q());
  Fill(bytes.k, stream + 1, call.mutable_k());
  Fill(bytes.v, stream + 2, call.mutable_v());
  return call;
}

void KvProgram::Fill(int64_t bytes, int64_t stream, std::string* target) {
  target->resize(bytes);
  oracle::FillNormal(spec_.dtype, random_(), static_cast<uint64_t>(stream), 0,
                     bytes / ElementBytes(spec_.dtype), 1.0, target->data());
}

std::vector<v1::LayerCall> KvProgram::MakeCalls(const KvStep& step) {
  std::vector<v1::LayerCall> calls;
  int64_t stream = 0;
  for (const KvLayerGroup& group : spec_.groups) {
    for (const uint32_t layer : group.layers) {
      calls.push_back(MakeCall(step, layer, stream += 3));
      if (!Chance(6)) continue;
      calls.push_back(MakeCall(step, layer, stream += 3));  // reads what the first one appended
      calls.back().clear_k();
      calls.back().clear_v();
    }
  }
  return calls;
}

}  // namespace ringattn::tests
