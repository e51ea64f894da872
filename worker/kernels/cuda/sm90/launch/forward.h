// Prepares and launches the sm_90a forward.
//
// Tables in the order of WriteTables: work counters (including the word for late keys), tickets,
// tiles, key ranges, combine tiles, tensor maps, split parts, score terms. Counters and tickets
// begin as zeros, and each launch leaves them zero. The kernel writes the counters, so a prepared
// call runs on one stream at a time.
//
// Thread-safe: no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FORWARD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/launch/split_keys.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/launch/call_bias.h"
#include "worker/kernels/cuda/sm90/launch/call_terms.h"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

inline constexpr std::string_view kName = "sm90";

// Returns how many packs of heads share a section (WorkCounters), for the plan's first `tiles`
// tiles.
int32_t SectionHeads(const ForwardCall& call, const ForwardPlan& plan, int64_t tiles,
                     int64_t packs_per_kv_head, int64_t heads, int64_t sm_count,
                     int64_t element_bytes);

// Returns the split part of each of the plan's first `tiles` tiles, all of which have keys.
std::vector<SplitPart> SplitPartsOf(const ForwardPlan& plan, size_t tiles);

// Serves 16-bit tensors whose rows the copy engine can read, on compute capability 9.0. head_dim
// and head_dim_v are multiples of 8, at most 576 and 512, and one of them is above 32; with smaller
// ones the tensor cores would mostly multiply padding. With score terms both are at most 128.
bool ServesForward(const AttentionProblem& problem, const DeviceInfo& device);

// Returns whether the kernels can take the call's addresses (multiples of 16) and pieces (all of
// one stride).
bool TakesForward(const ForwardCall& call);

// Returns whether the call's kernel waits for late keys. Kernels for head dims up to 256 without
// score terms and e4m3 do.
// REQUIRES: ServesForward and TakesForward.
bool TakesLateKeys(const ForwardCall& call);

// All kernels of the forward.
std::vector<KernelEntry> ForwardEntries();

class PreparedForward : public PreparedKernel {
 public:
  // REQUIRES: ServesForward and TakesForward.
  static absl::StatusOr<std::unique_ptr<PreparedForward>> Create(const ForwardCall& call,
                                                                 const DeviceInfo& device,
                                                                 const KernelTuning& tuning);

  // Returns false for calls that write nothing.
  bool has_work() const { return params_.tiles + keyless_tiles_ > 0 && params_.heads > 0; }
  void WriteTables(void* target) const override;
  void DropTables() override {
    plan_ = {};
    maps_ = {};
    parts_ = {};
    terms_.DropTables();
  }
  std::optional<int64_t> keys_word_offset() const override;
  absl::Status Launch(const TableLaunch& launch) const override;

 private:
  explicit PreparedForward(std::string_view kernel_class) : PreparedKernel(kName, kernel_class) {}
  // How the work is divided into items, each a tile of q rows in a pack of heads.
  struct Division {
    ForwardTileShape shape;
    int32_t blocks = 1;  // thread blocks of an item, a cluster if more than one
    int32_t pack = 1;    // heads of an item
    int32_t items_at_once = 1;
  };

  // The steps of Init, in this order.
  absl::Status Init(const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning);
  // Chooses the kernel by the problem alone.
  Division Choose(const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning);
  // Makes the plan, and chooses a kernel that suits it better if there is one.
  void Plan(const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning,
            Division& division);
  // Sets the number of items, their order and the thread blocks that process them.
  absl::Status Divide(const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning,
                      const Division& division);
  absl::Status MapTensors(const ForwardCall& call, const Division& division);
  // Sets the offsets of tables and scratch memory.
  absl::Status LayOut(const ForwardCall& call, const Division& division);

  ForwardKernel kernel_;
  DType dtype_ = DType::kBFloat16;
  TermForwardKernelParams params_;  // without tables and partials; plain kernels use a part of it
  CallTerms terms_;
  CallBias bias_;
  ForwardPlan plan_;
  std::vector<SpanMaps> maps_;
  bool for_parts_ = false;        // the kernel is the class's split_kernel
  bool merges_ = false;           // the kernel is split_kernel and merges the parts
  std::vector<SplitPart> parts_;  // empty with other kernels
  std::array<SpanMaps, kNearMaps> near_maps_;
  int32_t blocks_ = 0;
  int32_t keyless_tiles_ = 0;
  int32_t first_late_piece_ = kNoLatePiece;
  SplitKeys split_;
  int64_t tickets_offset_ = 0;  // in the tables, bytes
  int64_t tiles_offset_ = 0;
  int64_t ranges_offset_ = 0;
  int64_t combines_offset_ = 0;
  int64_t maps_offset_ = 0;
  int64_t parts_offset_ = 0;
  int64_t terms_offset_ = 0;
  int64_t terms_scratch_offset_ = 0;  // in the scratch memory, bytes
  int64_t bias_scratch_offset_ = 0;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FORWARD_H_
