// KvProgram: a random program of steps over a K/V cache, and the model of what the cache holds.
// Every result is compared with the fp64 oracle of the plain problem.
//
// By default it runs on the shards of all ranks in this process; calls are cut and joined as
// clients do it. A subclass replaces the ranks (tests/e2e/kv_service_sweep.cc).
#ifndef RINGATTN_TESTS_SWEEP_KV_PROGRAM_H_
#define RINGATTN_TESTS_SWEEP_KV_PROGRAM_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/attention/dtype.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/step.h"
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
  std::string Run();

  int64_t results() const { return results_; }

 protected:
  // Makes the ranks of the cache that spec_ and placement_ describe.
  virtual void MakeRanks();

  int64_t Pick(int64_t n) { return static_cast<int64_t>(random_() % n); }
  bool Chance(int64_t one_in) { return Pick(one_in) == 0; }
  template <typename T>
  T OneOf(std::initializer_list<T> list) {
    return list.begin()[Pick(static_cast<int64_t>(list.size()))];
  }

  // --- What a program does, drawn at random: kv_program_steps.cc.

  virtual void MakeSpec();
  // A step that the current model allows, but for its demand of blocks.
  KvStep MakeStep();
  // BLOCKS: the test is the client that deals blocks out. Blocks of all groups are disjoint.
  void WriteTables(KvStep* step);
  std::vector<v1::LayerCall> MakeCalls(const KvStep& step);
  v1::LayerCall MakeCall(const KvStep& step, uint32_t layer, int64_t stream);
  void Fill(int64_t bytes, int64_t stream, std::string* target);

  // --- Execution: kv_program.cc.

  std::string Describe() const;
  bool Check(const absl::Status& status, absl::string_view what);
  // Sends Begin to a rank. False: failed. Refusals go to `refused`.
  virtual bool SendBegin(int rank, const KvStep& step, v1::StepResponse* response);
  virtual bool SendCall(int rank, const KvStep& step, const v1::LayerCall& call,
                        v1::LayerResult* result);
  void OneStep(bool cut);
  // Only a lack of blocks and windows may refuse what MakeStep makes.
  bool CheckRefusals(const std::vector<v1::StepResponse>& responses);
  void MakeRoom();

  // --- New writers: kv_program_settle.cc.

  // A new writer: fences, asks what ranks have, and settles. A writer that claims to have every
  // answer of the last complete step keeps it; one that does not may lose it.
  void CutAndSettle();
  void Settle(uint64_t step);
  // BLOCKS: no rank keeps lengths. The writer knows the steps after `settled` that it sent: they
  // may have overwritten what their rows did not keep.
  void CutUndoneRows(uint64_t settled);
  // The new writer learns lengths from all ranks and takes the smallest.
  void TakeLengths();

  // --- The model: kv_program_model.cc.

  int64_t KRow(const KvLayerGroup& group) const {
    return group.num_kv_heads * group.head_dim * ElementBytes(spec_.dtype);
  }
  int64_t VRow(const KvLayerGroup& group) const {
    return group.num_kv_heads * group.head_dim_v * ElementBytes(spec_.dtype);
  }
  void Cut(int64_t length, Sequence* sequence) const;
  // The model after the step's commands and cuts; Append adds the entries layer by layer.
  Model Commands(const KvStep& step);
  void Append(const KvStep& step, const v1::LayerCall& call, Model* model) const;
  bool CheckResults(const KvStep& step, const v1::LayerCall& call,
                    const std::vector<v1::LayerResult>& results, const Model& model);

  std::mt19937_64 random_;
  const Mode mode_;
  worker::Device* const device_;
  int world_size_ = 0;  // of every program; 0: drawn
  const bool on_gpu_;   // draws wide heads too, which take a CPU long
  const std::unique_ptr<worker::StepKernels> kernels_;  // null on a GPU
  const std::atomic<bool> never_{false};
  KvCacheSpec spec_;
  KvPlacement placement_;
  int64_t per_entry_ = 0;  // entries of a sequence that one element of a block table covers
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
