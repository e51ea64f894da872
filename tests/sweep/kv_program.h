// KvProgram: a random program of steps over a K/V cache, and the model of what the cache holds.
// Every result is compared with the fp64 oracle of the plain problem.
//
// By default it runs on the shards of all ranks in this process; calls are cut and joined as
// clients do it. A subclass replaces the ranks (tests/e2e/kv_service_sweep.cc).
#ifndef RINGATTN_TESTS_SWEEP_KV_PROGRAM_H_
#define RINGATTN_TESTS_SWEEP_KV_PROGRAM_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/attention/dtype.h"
#include "common/kv/shard_cut.h"
#include "common/oracle/comparator.h"
#include "common/oracle/generator.h"
#include "common/oracle/oracle.h"
#include "worker/device/device.h"
#include "worker/kv/kv_shard.h"

namespace ringattn::tests {

using worker::KvShard;

enum class Mode {
  kPlain,
  kTwice,  // every message is sent twice
  kCut,    // messages end at a random one; a new writer settles the log and goes on
};
constexpr const char* kModeNames[] = {"plain", "every message twice", "cut and settled"};

// K and V of a sequence in one layer, all heads, as bytes of the cache's dtype.
struct Entries {
  std::string k, v;
};
struct Sequence {
  int64_t length = 0;
  std::map<uint32_t, Entries> layers;
  std::vector<std::vector<uint32_t>> tables;  // BLOCKS numbering, by group
  bool tables_sent = false;                   // in this epoch
};
using Model = std::map<SequenceId, Sequence>;

class KvProgram {
 public:
  // `device` may be null if MakeRanks, SendBegin and SendCall are replaced.
  KvProgram(uint64_t seed, int64_t index, Mode mode, worker::Device* device)
      : random_(seed * 1'000'003 + index),
        mode_(mode),
        device_(device),
        on_gpu_(device == nullptr || device->kv_caches() != nullptr),
        kernels_(on_gpu_ ? nullptr : *device->MakeStepKernels()) {}
  virtual ~KvProgram() = default;

  // Empty, or what failed.
  std::string Run() {
    MakeSpec();
    MakeRanks();
    if (!failure_.empty()) return absl::StrCat(failure_, "\n", Describe());
    const int64_t steps = 3 + Pick(4);
    const int64_t cut = mode_ == Mode::kCut ? Pick(steps) : -1;
    for (int64_t i = 0; i < steps && failure_.empty(); ++i) {
      OneStep(i == cut);
      if (!failure_.empty()) {
        failure_ = absl::StrCat("step ", i, " of ", steps, ": ", failure_, "\n", Describe());
      }
    }
    return failure_;
  }

  int64_t results() const { return results_; }

 protected:
  // Makes the ranks of the cache that spec_ and placement_ describe.
  virtual void MakeRanks() {
    for (int rank = 0; rank < placement_.world_size(); ++rank) {
      auto shard = KvShard::Make(spec_, placement_, rank, device_);
      if (!Check(shard.status(), "make")) return;
      shards_.push_back(*std::move(shard));
      if (!shards_.back()->Zero(never_)) failure_ = "memory was not zeroed";
    }
    Settle(0);
  }

  int64_t Pick(int64_t n) { return static_cast<int64_t>(random_() % n); }
  bool Chance(int64_t one_in) { return Pick(one_in) == 0; }
  template <typename T>
  T OneOf(std::initializer_list<T> list) {
    return list.begin()[Pick(static_cast<int64_t>(list.size()))];
  }

  // ------------------------------------------------------------------------------ the program

  virtual void MakeSpec() {
    placement_.head_parts = static_cast<int>(1 + Pick(4));
    if (head_parts_ > 0) placement_.head_parts = head_parts_;
    placement_.position_parts = static_cast<int>(1 + Pick(4));
    if (on_gpu_) placement_.position_parts = 1;
    spec_.dtype = OneOf({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
    spec_.block_tokens = OneOf<int64_t>({16, 16, 16, 32, 64, 128, 256});
    spec_.numbering = Chance(3) ? KvNumbering::kBlocks : KvNumbering::kSequences;
    const int64_t per_entry = EntriesPerTableEntry(spec_, placement_);
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
      group.window_left = Chance(2) ? Pick(2 * per_entry) : -1;
      group.causal = !Chance(4);
      group.sinks.clear();
      if (Chance(3)) {
        for (size_t i = 0; i < group.layers.size() * group.num_heads; ++i) {
          group.sinks.push_back(Chance(5) ? -INFINITY : static_cast<float>(Pick(400)) / 100 - 2);
        }
      }
      spec_.groups.push_back(std::move(group));
    }
    max_length_ = std::clamp<int64_t>(3 * per_entry, 100, 500);
    spec_.blocks = (6 + Pick(20)) * groups;
    next_step_ = 1;
  }

  std::string Describe() const {
    return absl::StrCat(ToProto(spec_).ShortDebugString().substr(0, 900), " parts ",
                        placement_.head_parts, " x ", placement_.position_parts);
  }

  // A step that the current model allows, but for its demand of blocks.
  KvStep MakeStep() {
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

  // BLOCKS: the test is the client that deals blocks out. Blocks of all groups are disjoint.
  void WriteTables(KvStep* step) {
    const int64_t per_entry = EntriesPerTableEntry(spec_, placement_);
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
      const int64_t size = (row.end() + per_entry - 1) / per_entry;
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

  // -------------------------------------------------------------------------------- execution

  v1::LayerCall MakeCall(const KvStep& step, uint32_t layer, int64_t stream) {
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

  void Fill(int64_t bytes, int64_t stream, std::string* target) {
    target->resize(bytes);
    oracle::FillNormal(spec_.dtype, random_(), static_cast<uint64_t>(stream), 0,
                       bytes / ElementBytes(spec_.dtype), 1.0, target->data());
  }

  bool Check(const absl::Status& status, absl::string_view what) {
    if (status.ok()) return true;
    failure_ = absl::StrCat(what, ": ", status.ToString());
    return false;
  }

  // Sends Begin to a rank. False: failed. Refusals go to `refused`.
  virtual bool SendBegin(int rank, const KvStep& step, v1::StepResponse* response) {
    for (int i = 0; i < (mode_ == Mode::kTwice ? 2 : 1); ++i) {
      response->Clear();
      if (!Check(shards_[rank]->Begin(epoch_, ToProto(step), response), "begin")) return false;
    }
    return true;
  }

  virtual bool SendCall(int rank, const KvStep& step, const v1::LayerCall& call,
                        v1::LayerResult* result) {
    const v1::LayerCall cut = CutCall(spec_, placement_, step, call, rank);
    for (int i = 0; i < (mode_ == Mode::kTwice ? 2 : 1); ++i) {
      result->Clear();
      if (!Check(shards_[rank]->Call(epoch_, cut, kernels_.get(), never_, result), "call")) {
        return false;
      }
    }
    return true;
  }

  void OneStep(bool cut) {
    KvStep step = MakeStep();
    recent_.push_back(step);
    if (recent_.size() > 2) recent_.erase(recent_.begin());
    const int ranks = placement_.world_size();
    std::vector<v1::LayerCall> calls = MakeCalls(step);
    // Messages that each rank still gets: Begin, then calls.
    std::vector<size_t> budget(ranks, calls.size() + 1);
    if (cut && !Chance(4)) {
      for (size_t& messages : budget) messages = Pick(static_cast<int64_t>(calls.size()) + 2);
    }
    std::vector<v1::StepResponse> begun(ranks);
    bool refused = false, accepted = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (budget[rank] == 0) continue;
      if (!SendBegin(rank, step, &begun[rank])) return;
      (begun[rank].has_refused() ? refused : accepted) = true;
    }
    if (refused && accepted) {
      failure_ = "some ranks refuse the step and others do not";
      return;
    }
    if (refused) {
      if (!CheckRefusals(begun)) return;
      // The step before is committed; so is nothing of this one.
      if (cut) CutAndSettle();
      if (failure_.empty()) MakeRoom();
      return;
    }
    uint32_t crc = 0;
    bool first = true;
    for (int rank = 0; rank < ranks; ++rank) {
      if (budget[rank] == 0) continue;
      if (!first && begun[rank].accepted().tables_crc32c() != crc) {
        failure_ = "the tables of two ranks differ";
        return;
      }
      crc = begun[rank].accepted().tables_crc32c();
      first = false;
    }
    Model after = Commands(step);
    for (size_t c = 0; c < calls.size(); ++c) {
      std::vector<v1::LayerResult> results(ranks);
      bool all = true;
      for (int rank = 0; rank < ranks; ++rank) {
        if (budget[rank] <= c + 1) {
          all = false;
          continue;
        }
        if (!SendCall(rank, step, calls[c], &results[rank])) return;
      }
      if (!calls[c].k().empty()) Append(step, calls[c], &after);
      if (all && !CheckResults(step, calls[c], results, after)) return;
    }
    const bool complete =
        std::all_of(budget.begin(), budget.end(), [&](size_t b) { return b == calls.size() + 1; });
    if (!cut || complete) {
      previous_ = std::exchange(model_, std::move(after));
      next_step_ = step.number + 1;
    }
    if (cut) CutAndSettle();
  }

  std::vector<v1::LayerCall> MakeCalls(const KvStep& step) {
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

  // Only a lack of blocks and windows may refuse what MakeStep makes.
  bool CheckRefusals(const std::vector<v1::StepResponse>& responses) {
    for (const v1::StepResponse& response : responses) {
      for (const v1::RowRefusal& row : response.refused().rows()) {
        if (row.reason() == "KV_FULL" || row.reason() == "BEHIND_WINDOW") continue;
        if (row.reason() == "UNKNOWN_SEQUENCE" && !response.refused().rows(0).reason().empty() &&
            response.refused().rows(0).command()) {
          continue;  // the target of a fork that was refused
        }
        failure_ = absl::StrCat("refused: ", row.ShortDebugString());
        return false;
      }
    }
    return true;
  }

  void MakeRoom() {
    if (model_.empty()) return;
    auto victim = std::next(model_.begin(), Pick(static_cast<int64_t>(model_.size())));
    KvStep step;
    step.number = next_step_;
    if (spec_.numbering == KvNumbering::kSequences || victim->second.tables_sent) {
      step.commands.push_back(KvDropCommand{{victim->first}});
    }
    for (int rank = 0; rank < placement_.world_size(); ++rank) {
      v1::StepResponse response;
      if (!SendBegin(rank, step, &response)) return;
      if (response.has_refused()) {
        failure_ = absl::StrCat("a drop is refused: ", response.ShortDebugString());
        return;
      }
    }
    previous_ = model_;
    model_.erase(victim);
    ++next_step_;
  }

  // A new writer: fences, asks what ranks have, and settles. A writer that claims to have every
  // answer of the last complete step keeps it; one that does not may lose it.
  void CutAndSettle() {
    ++epoch_;
    uint64_t step = 0;
    for (auto& shard : shards_) {
      if (!Check(shard->log().Open(epoch_), "open")) return;
      step = std::max(step, shard->log().committed());
    }
    if (Chance(2)) step = next_step_ - 1;
    for (auto& shard : shards_) {
      if (shard->log().complete() < step) {
        failure_ = absl::StrCat("a rank has completed ", shard->log().complete(), ", not ", step);
        return;
      }
    }
    Settle(step);
    if (!failure_.empty()) return;
    if (step + 1 < next_step_) model_ = previous_;
    next_step_ = step + 1;
    if (spec_.numbering == KvNumbering::kBlocks) CutUndoneRows(step);
    TakeLengths();
  }

  void Settle(uint64_t step) {
    for (auto& shard : shards_) {
      if (epoch_ == 1 && !Check(shard->log().Open(epoch_), "open")) return;
      if (!Check(shard->log().Settle(epoch_, step), "settle")) return;
    }
  }

  // BLOCKS: no rank keeps lengths. The writer knows the steps after `settled` that it sent: they
  // may have overwritten what their rows did not keep.
  void CutUndoneRows(uint64_t settled) {
    for (const KvStep& step : recent_) {
      if (step.number <= settled) continue;
      for (const StepRow& row : step.rows) {
        const auto found = model_.find(row.sequence);
        if (found == model_.end()) continue;
        Cut(std::min(row.keep_length, found->second.length), &found->second);
      }
    }
  }

  // The new writer learns lengths from all ranks and takes the smallest.
  void TakeLengths() {
    for (auto& [id, sequence] : model_) sequence.tables_sent = false;
    if (spec_.numbering == KvNumbering::kBlocks) return;
    for (auto& shard : shards_) {
      const auto list = shard->log().blocks().sequences();
      if (list.size() != model_.size()) {
        failure_ = absl::StrCat("a rank has ", list.size(), " sequences, not ", model_.size());
        return;
      }
      for (const auto& [id, length] : list) {
        const auto found = model_.find(id);
        if (found == model_.end() || length > found->second.length) {
          // Lengths only shrink here: an earlier rank may have been the shortest.
          if (found != model_.end() && shrunk_.contains(id)) continue;
          failure_ = absl::StrCat("sequence ", id, " has ", length, " entries after settling");
          return;
        }
        if (length < found->second.length) shrunk_.insert(id);
        Cut(length, &found->second);
      }
    }
    shrunk_.clear();
  }

  // ------------------------------------------------------------------------------------ model

  int64_t KRow(const KvLayerGroup& group) const {
    return group.num_kv_heads * group.head_dim * ElementBytes(spec_.dtype);
  }
  int64_t VRow(const KvLayerGroup& group) const {
    return group.num_kv_heads * group.head_dim_v * ElementBytes(spec_.dtype);
  }

  void Cut(int64_t length, Sequence* sequence) const {
    sequence->length = length;
    for (auto& [layer, entries] : sequence->layers) {
      const KvLayerGroup& group = spec_.groups[FindLayer(spec_, layer)->group];
      entries.k.resize(std::min<size_t>(entries.k.size(), length * KRow(group)));
      entries.v.resize(std::min<size_t>(entries.v.size(), length * VRow(group)));
    }
  }

  // The model after the step's commands and cuts; Append adds the entries layer by layer.
  Model Commands(const KvStep& step) {
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

  void Append(const KvStep& step, const v1::LayerCall& call, Model* model) const {
    const KvLayerGroup& group = spec_.groups[FindLayer(spec_, call.layer())->group];
    int64_t at = 0;
    for (const StepRow& row : step.rows) {
      Entries& entries = (*model)[row.sequence].layers[call.layer()];
      entries.k.append(call.k(), at * KRow(group), row.append_tokens * KRow(group));
      entries.v.append(call.v(), at * VRow(group), row.append_tokens * VRow(group));
      at += row.append_tokens;
    }
  }

  bool CheckResults(const KvStep& step, const v1::LayerCall& call,
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

  std::mt19937_64 random_;
  const Mode mode_;
  worker::Device* const device_;
  int head_parts_ = 0;  // of every program; 0: drawn
  const bool on_gpu_;   // a GPU serves wide heads and no position parts
  const std::unique_ptr<worker::StepKernels> kernels_;  // null on a GPU
  const std::atomic<bool> never_{false};
  KvCacheSpec spec_;
  KvPlacement placement_;
  std::vector<std::unique_ptr<KvShard>> shards_;
  int64_t max_length_ = 0;
  uint64_t epoch_ = 1;
  uint64_t next_step_ = 1;
  SequenceId next_id_ = 1;
  Model model_;
  Model previous_;              // before the last step
  std::vector<KvStep> recent_;  // the last two that were sent
  std::map<SequenceId, std::vector<std::vector<uint32_t>>> new_tables_;  // of the step being made
  std::set<SequenceId> shrunk_;
  std::string failure_;
  int64_t results_ = 0;
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_KV_PROGRAM_H_
