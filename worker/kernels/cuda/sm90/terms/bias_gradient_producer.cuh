// The producer warps of a bias's gradient. One describes the jobs of the thread block and loads q,
// dout, keys and values if they differ from the preceding job's. Another loads the bias. Both walk
// the same jobs.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"
#include "worker/kernels/cuda/sm90/terms/bias_gradient_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_pairs.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct BiasGradientProducer {
  const BiasGradientKernelParams& params;
  char* const memory;     // shared
  const uint32_t shared;  // its address
  const BiasGradientItem item;
  const int lane;

  struct Job {
    int range = -1;  // none
    int row = 0;     // of the key tile, in the range
    int head = 0;
    int batch = 0;
    int kv_head = 0;

    __device__ __forceinline__ bool SameQ(const Job& other) const {
      return range >= 0 && other.range >= 0 && head == other.head && batch == other.batch;
    }
    __device__ __forceinline__ bool SameKv(const Job& other) const {
      return range == other.range && row == other.row && kv_head == other.kv_head &&
             batch == other.batch;
    }
  };

  // Calls visit(before, job, after) for all jobs; before and after are null jobs at the ends.
  // REQUIRES: Any.
  template <typename Visit>
  __device__ __forceinline__ void Walk(const Visit& visit) const {
    Job before, job;
    int passed = params.parts - 1 - item.part;  // key tiles since the block's last one
#pragma unroll 1
    for (int range = item.tile->range_begin; range < item.tile->range_end; ++range) {
      const int count = params.forward.ranges[range].row_count;
#pragma unroll 1
      for (int row = 0; row < count; row += Shape::kKeys) {
        if (++passed < params.parts) continue;
        passed = 0;
#pragma unroll 1
        for (int batch = item.first_batch; batch < item.end_batch; ++batch) {
#pragma unroll 1
          for (int head = item.first_head; head < item.end_head; ++head) {
            const Job after = {range, row, head, batch, head / params.forward.common.group_size};
            if (job.range >= 0) {
              visit(before, job, after);
              before = job;
            }
            job = after;
          }
        }
      }
    }
    visit(before, job, Job());
  }

  // Returns whether the block has a job; the same for all its threads.
  __device__ __forceinline__ bool Any() const {
    int tiles = 0;
#pragma unroll 1
    for (int range = item.tile->range_begin; range < item.tile->range_end; ++range) {
      tiles += (params.forward.ranges[range].row_count + Shape::kKeys - 1) / Shape::kKeys;
    }
    return item.part < tiles;
  }

  __device__ __forceinline__ void Copy(uint32_t target, int panel_bytes, uint32_t barrier,
                                       const TensorMap& map, int head, int row, int batch,
                                       uint64_t policy) const {
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      CopyBox(target + panel * panel_bytes, &map, barrier, panel * kPanelColumns, head, row, batch,
              policy);
    }
  }

  __device__ __forceinline__ void Describe(const Job& before, const Job& job, const Job& after,
                                           int stage) const {
    const TermParams& terms = params.terms;
    const CommonParams& common = params.forward.common;
    const KvRange& range = params.forward.ranges[job.range];
    const TermRange& place = terms.ranges[job.range];
    const int64_t mask_plane = MaskPlane(terms, job.batch, job.head, common.num_heads);
    const PairClasses classes(params.pairs, job.batch, mask_plane);
    const int pair = params.pairs.pair_begin[job.range] + job.row / 128;
    uint32_t checks = classes.Of(pair);
    if ((checks & PairClasses::kSeen) == 0) checks = classes.Everything();  // its pairs get 0
    if (checks & PairClasses::kCheckIds) {
      int32_t* ids =
          reinterpret_cast<int32_t*>(memory + Shape::kIds + stage * Shape::kIdBytes) + lane;
      const int32_t* source =
          place.segment_ids + job.batch * range.block_rows + range.row_begin + job.row + lane;
#pragma unroll
      for (int i = 0; i < Shape::kKeys; i += 32) {
        ids[i] = job.row + lane + i < range.row_count ? source[i] : -1;
      }
    }
    if (lane != 0) return;
    int32_t flags = after.range < 0 ? KeyTile::kLast : 0;
    if (job.row < range.full_begin || job.row + Shape::kKeys > range.full_end) {
      flags |= KeyTile::kMasked;
    }
    if (checks & PairClasses::kCheckIds) flags |= TermKeyTile::kIds;
    if (checks & PairClasses::kCheckMask) flags |= TermKeyTile::kMaskWords;
    if (!job.SameQ(before)) flags |= GradientTile::kNewQ;
    if (!job.SameQ(after)) flags |= GradientTile::kLastQ;
    if (!job.SameKv(before)) flags |= GradientTile::kNewKv;
    if (!job.SameKv(after)) flags |= GradientTile::kLastKv;
    if (job.head == item.first_head && job.batch == item.first_batch) flags |= GradientTile::kFirst;
    if (job.head + 1 == item.end_head && job.batch + 1 == item.end_batch) {
      flags |= GradientTile::kStore;
    }
    GradientTile& target = reinterpret_cast<GradientTile*>(memory + Shape::kTermTiles)[stage];
    target.flags = flags;
    target.lower = range.limits.first_lower - job.row;
    target.upper = range.limits.first_upper - job.row;
    target.columns = range.row_count - job.row;
    target.first_key = place.k_position + int64_t{params.stride} * job.row;
    target.first_query = place.q_position;
    target.first_element = (item.plane * terms.plane_rows + place.plane_row) * terms.columns +
                           place.plane_column + int64_t{params.stride} * job.row;
    target.distance = static_cast<float>(place.q_position + place.shift - target.first_key);
    target.batch_row = terms.packed ? place.document : job.batch;
    target.words = static_cast<const uint32_t*>(params.pairs.mask_words) +
                   (mask_plane * params.pairs.pairs + pair) * (128 * 4);
    target.word_shift = job.row % 128 / 4;
    target.head = job.head;
    target.batch = job.batch;
  }

  // Executed by one whole warp.
  __device__ __forceinline__ void Load() const {
    RingPosition<Shape::kStages> at, kv;
    uint32_t q_phase = 1;
    int mapped = -1;
    const int q_row = static_cast<int>(item.tile->q_row_begin);
    Walk([&](const Job& before, const Job& job, const Job& after) {
      WaitBarrier(shared + Shape::kTileEmpty + 8 * at.stage, at.phase ^ 1);
      Describe(before, job, after, at.stage);
      Arrive(shared + Shape::kTileFull + 8 * at.stage);
      at.Advance();
      if (lane == 0) {
        if (!job.SameQ(before)) {
          WaitBarrier(shared + Shape::kQEmpty, q_phase);
          q_phase ^= 1;
          ArriveExpecting(shared + Shape::kQFull, 2 * Shape::kQBytes);
          Copy(shared + Shape::kQ, Shape::kQPanelBytes, shared + Shape::kQFull, params.q_map,
               job.head, q_row, job.batch, kEvictLast);
          Copy(shared + Shape::kDout, Shape::kQPanelBytes, shared + Shape::kQFull, params.dout_map,
               job.head, q_row, job.batch, kEvictLast);
        }
        if (!job.SameKv(before)) {
          const KvRange& range = params.forward.ranges[job.range];
          const SpanMaps& maps = params.maps[range.piece];
          if (range.piece != mapped) {
            AcquireMap(&maps.k);
            AcquireMap(&maps.v);
            mapped = range.piece;
          }
          const int row = static_cast<int>(range.row_begin) + job.row;
          WaitBarrier(shared + Shape::kKvEmpty + 8 * kv.stage, kv.phase ^ 1);
          const uint32_t k_full = shared + Shape::kKFull + 8 * kv.stage;
          const uint32_t v_full = shared + Shape::kVFull + 8 * kv.stage;
          ArriveExpecting(k_full, Shape::kKvBytes);
          Copy(shared + Shape::kK + kv.stage * Shape::kKvBytes, Shape::kKvPanelBytes, k_full,
               maps.k, job.kv_head, row, job.batch, kEvictLast);
          ArriveExpecting(v_full, Shape::kKvBytes);
          Copy(shared + Shape::kV + kv.stage * Shape::kKvBytes, Shape::kKvPanelBytes, v_full,
               maps.v, job.kv_head, row, job.batch, kEvictLast);
          kv.Advance();
        }
      }
      __syncwarp();
    });
  }

  // Executed by one whole warp: loads the panels of every job, in the order in which the groups
  // read them.
  __device__ __forceinline__ void LoadBias() const {
    const TermParams& terms = params.terms;
    const int element = terms.bias_dtype == DType::kFloat32 ? 4 : 2;
    const int panels = Shape::kKeys * element / kPanelRowBytes;
    RingPosition<Shape::kBiasStages> at;
    Walk([&](const Job&, const Job& job, const Job&) {
      const TermRange& place = terms.ranges[job.range];
      const int column = BiasColumn(params.bias, place.plane_column) + job.row;
      const int row = static_cast<int>(place.plane_row);
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
        if (lane == 0) {
#pragma unroll
          for (int group = 0; group < Shape::kGroups; ++group) {
            const int index = group * Shape::kBiasStages + at.stage;
            const uint32_t full = shared + Shape::kBiasFull + 8 * index;
            WaitBarrier(shared + Shape::kBiasEmpty + 8 * index, at.phase ^ 1);
            ArriveExpecting(full, Shape::kBiasPanelBytes);
            CopyBox(shared + Shape::kBias + index * Shape::kBiasPanelBytes, &params.bias.map, full,
                    column + panel * (kPanelRowBytes / element), 0, row + group * kForwardBiasRows,
                    item.plane, BiasPolicy(params.terms));
          }
        }
        at.Advance();
      }
      __syncwarp();
    });
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PRODUCER_CUH_
