// KvShard: one rank of a K/V cache: its memory, its step log, and the execution of layer calls.
//
// Memory: for every plane an array of keys and one of values, [blocks * block_tokens] rows of the
// widest group's kv heads and dims (PlaneShapeOfRank). A device with memory of its own keeps it and
// executes the calls (DeviceKvCache). Otherwise the memory is the host's: a layer call appends the
// new keys and values of all rows and then attends for all rows in one packed ForwardCall:
// documents are rows, and pieces of its single KvBlock, the whole plane, are runs of the block
// tables. Pieces are the same for all layers of a group, so they are built once per step and group.
//
// Tests: kv_shard_test.cc, device_cache_test.cc, tests/sweep/kv_sweep_test.cc
#ifndef RINGATTN_WORKER_KV_KV_SHARD_H_
#define RINGATTN_WORKER_KV_KV_SHARD_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "common/kv/step_log.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "worker/device/device.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

// Not thread safe: used on the engine's thread after Make and Zero.
class KvShard {
 public:
  // Allocates the rank's memory, which must be zeroed before use: a block table may name blocks
  // that no step has written. `device` must outlive the shard. RESOURCE_EXHAUSTED if the device has
  // no memory; UNIMPLEMENTED, naming the option, if it cannot serve the cache.
  static absl::StatusOr<std::unique_ptr<KvShard>> Make(KvCacheSpec spec, KvPlacement placement,
                                                       int rank, Device* device);

  // Zeroes all memory. Returns early, with false, once `stop` is set or if the device fails, which
  // loses the cache.
  bool Zero(const std::atomic<bool>& stop);

  // Not OK (DATA_LOSS, KV_LOST) after an error of the device: Begin and Call then return it.
  const absl::Status& lost() const { return lost_; }

  KvStepLog& log() { return log_; }
  const KvStepLog& log() const { return log_; }
  const KvCacheSpec& spec() const { return spec_; }
  // Device memory of the rank.
  int64_t bytes() const { return bytes_; }

  // Begins a step: executes its copies on write. Sets one of `accepted` and `refused` in the
  // response. Errors: as ParseStep and KvStepLog::Begin.
  absl::Status Begin(uint64_t epoch, const v1::StepBegin& begin, v1::StepResponse* response);

  // Executes one layer call of the begun step. Errors: as KvStepLog::StartCall and CheckCallBytes;
  // CANCELLED once `stop` is set; RESOURCE_EXHAUSTED if the device has no scratch memory for the
  // call. After an error the call counts as not computed. `kernels` may be null if the device keeps
  // the memory.
  absl::Status Call(uint64_t epoch, const v1::LayerCall& call, StepKernels* kernels,
                    const std::atomic<bool>& stop, v1::LayerResult* result);

 private:
  struct Plane {
    std::unique_ptr<DeviceBuffer> k, v;
    int64_t k_row_bytes = 0, v_row_bytes = 0;  // of the widest group
  };
  // Rows of a call's k and v that go to consecutive places of a block.
  struct Append {
    int64_t source_row = 0;
    uint32_t block = 0;
    int64_t offset = 0;  // in the block
    int64_t count = 0;
  };
  // State that all layers of one group share in the begun step.
  struct GroupPlan {
    bool ready = false;
    std::vector<Append> appends;
    AttentionProblem problem;
    // The group's rows are as wide as the plane's: one KvBlock, the plane.
    KernelCall flat;
    // They are narrower: a KvBlock for each block.
    KernelCall scattered;
    std::vector<uint32_t> scattered_blocks;
    bool scattered_ready = false;
  };
  // A run of entries that a row sees, in one block.
  struct SeenRun {
    int64_t row = 0;
    uint32_t block = 0;
    int64_t offset = 0;
    int64_t position = 0;
    int64_t count = 0;
  };

  KvShard(KvCacheSpec spec, KvPlacement placement, int rank);

  int position_part() const { return placement_.position_part(rank_); }
  KvHeadRange HeadsOfGroup(int group) const {
    return KvHeadsOf(spec_.groups[group], placement_, rank_);
  }
  int64_t KRowBytes(int group) const;
  int64_t VRowBytes(int group) const;
  bool IsFlat(int group, int plane) const;

  DeviceKvShape DeviceShape() const;
  // Records an error of the device cache and returns what the writer sees.
  absl::Status CheckDevice(const absl::Status& status);
  absl::Status RunOnDevice(const KvLayerLocation& location, const v1::LayerCall& call,
                           const std::atomic<bool>& stop, v1::LayerResult* result);

  void ForgetPlans();
  void CopyOnWrite(const KvBlockCopy& copy);
  GroupPlan& PlanOf(int group);
  void PlanAppends(int group, GroupPlan* plan) const;
  void PlanAttention(int group, GroupPlan* plan) const;
  void PlanScattered(int group, GroupPlan* plan) const;
  template <typename Visit>
  void ForSeenRuns(int group, Visit visit) const;
  void AppendRows(int group, int plane, const GroupPlan& plan, const v1::LayerCall& call);
  absl::Status Attend(const KvLayerLocation& location, GroupPlan* plan, const v1::LayerCall& call,
                      StepKernels* kernels, const std::atomic<bool>& stop, v1::LayerResult* result);

  const KvCacheSpec spec_;
  const KvPlacement placement_;
  const int rank_;
  const Limits limits_;
  int64_t bytes_ = 0;
  std::vector<Plane> planes_;                    // of the host's memory
  std::unique_ptr<DeviceKvCache> device_cache_;  // null: planes_
  absl::Status lost_;
  KvStepLog log_;
  std::vector<GroupPlan> plans_;  // by group, of the begun step
  int64_t own_appends_ = 0;       // new entries of the begun step on this rank
  std::vector<float> lse_;        // of calls that return none
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_KV_SHARD_H_
