#include "worker/kernels/cuda/paged/check/contiguous_forward.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/launch/tensor_map_encoder.h"
#include "worker/kernels/cuda/paged/check/bench_kernels.h"
#include "worker/kernels/cuda/paged/check/reference.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::paged::check {
namespace {

constexpr int64_t kDim = 128;

cuda::sm90::TensorMap Encode(const void* data, int64_t heads, int64_t rows, int box_rows) {
  const auto encode = TensorMapEncoder();
  Check(encode.status());
  const cuuint64_t sizes[4] = {kDim, static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows),
                               1};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(2 * kDim * heads);
  const cuuint64_t strides[3] = {2 * kDim, row_bytes, row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[4] = {64, 1, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  Check(EncodingStatus(
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides,
                box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      "a tensor of the bench"));
  cuda::sm90::TensorMap target;
  std::memcpy(target.bytes, &map, sizeof(map));
  return target;
}

// `count` rows of one head of a device tensor [rows, heads, kDim] in bf16.
std::vector<float> DownloadHead(const void* data, int64_t first_row, int64_t count, int64_t heads,
                                int64_t head) {
  std::vector<uint16_t> bits(count * kDim);
  const size_t row_bytes = static_cast<size_t>(heads * kDim * 2);
  Check(cudaMemcpy2D(bits.data(), kDim * 2,
                     static_cast<const char*>(data) + first_row * row_bytes + head * kDim * 2,
                     row_bytes, kDim * 2, count, cudaMemcpyDeviceToHost),
        "download");
  std::vector<float> values(bits.size());
  ConvertToFloat(DType::kBFloat16, bits.data(), values.data(), count * kDim);
  return values;
}

}  // namespace

ContiguousForwardRun::ContiguousForwardRun(int64_t n, int32_t num_heads, int32_t num_kv_heads,
                                           float softmax_scale, const void* q, const void* k,
                                           const void* v, void* out, float* lse, int sm_count)
    : kernel_(ContiguousForward()), k_(k), v_(v) {
  const int64_t tile_rows = kernel_.tile_rows;
  std::vector<ForwardTile> tiles;
  std::vector<KvRange> ranges;
  // Longest first.
  for (int64_t begin = (n - 1) / tile_rows * tile_rows; begin >= 0; begin -= tile_rows) {
    ForwardTile tile;
    tile.q_row_begin = begin;
    tile.q_rows = static_cast<int32_t>(std::min(tile_rows, n - begin));
    tile.range_begin = static_cast<int32_t>(ranges.size());
    tile.range_end = tile.range_begin + 1;
    tiles.push_back(tile);
    KvRange range;
    range.row_count = static_cast<int32_t>(begin + tile.q_rows);
    range.full_end = static_cast<int32_t>(begin + 1);
    range.limits.first_lower = -(1 << 30);
    range.limits.first_upper = static_cast<int32_t>(begin);
    ranges.push_back(range);
  }
  cuda::sm90::SpanMaps maps;
  maps.k = Encode(k, num_kv_heads, n, kernel_.tile_keys);
  maps.v = Encode(v, num_kv_heads, n, kernel_.tile_keys);

  const size_t tile_bytes = (tiles.size() * sizeof(ForwardTile) + 255) / 256 * 256;
  const size_t range_bytes = (ranges.size() * sizeof(KvRange) + 255) / 256 * 256;
  std::vector<char> tables(256 + sizeof(maps) + tile_bytes + range_bytes);
  char* at = tables.data();
  std::memcpy(at += 256, &maps, sizeof(maps));
  std::memcpy(at += sizeof(maps), tiles.data(), tiles.size() * sizeof(ForwardTile));
  std::memcpy(at += tile_bytes, ranges.data(), ranges.size() * sizeof(KvRange));
  tables_.Reset(tables.size(), 0);
  tables_.Upload(tables);
  char* const device = tables_.get<char>();
  params_.counters = reinterpret_cast<cuda::sm90::WorkCounters*>(device);
  params_.maps = reinterpret_cast<cuda::sm90::SpanMaps*>(device + 256);
  ForwardParams& forward = params_.forward;
  forward.tiles = reinterpret_cast<ForwardTile*>(device + 256 + sizeof(maps));
  forward.ranges = reinterpret_cast<KvRange*>(device + 256 + sizeof(maps) + tile_bytes);

  CommonParams& common = forward.common;
  common.q_rows = n;
  common.batch = 1;
  common.num_heads = num_heads;
  common.num_kv_heads = num_kv_heads;
  common.group_size = num_heads / num_kv_heads;
  common.head_dim = common.head_dim_v = kDim;
  common.softmax_scale = softmax_scale;
  common.scale_log2 = softmax_scale * 1.4426950408889634f;
  forward.q = q;
  forward.out = out;
  forward.lse = lse;
  forward.initial = forward.final = 1;
  forward.tile_rows = kernel_.tile_rows;
  params_.q_map = Encode(q, num_heads, n, kernel_.tile_rows);
  params_.q_box_bytes = static_cast<uint32_t>(tile_rows) * 128;
  params_.tiles = static_cast<int32_t>(tiles.size());
  params_.heads = num_heads;
  // As the family's launcher: heads whose keys and values fit in 32 MiB share a section.
  const int64_t kv_heads = std::max<int64_t>((int64_t{32} << 20) / (n * kDim * 4), 1);
  params_.section_heads =
      static_cast<int32_t>(std::min<int64_t>(kv_heads * common.group_size, num_heads));
  blocks_ = static_cast<int>(std::min<int64_t>(params_.tiles * int64_t{num_heads}, sm_count));
  params_.shifts.first_blocks = static_cast<uint32_t>(blocks_);
  Check(cudaFuncSetAttribute(kernel_.bf16, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel_.shared_bytes),
        "shared memory");
}

void ContiguousForwardRun::Launch(cudaStream_t stream) const {
  void* arguments[] = {const_cast<cuda::sm90::ForwardKernelParams*>(&params_)};
  Check(cudaLaunchKernel(kernel_.bf16, dim3(blocks_), dim3(kernel_.threads), arguments,
                         kernel_.shared_bytes, stream),
        "forward");
}

void ContiguousForwardRun::Verify(cudaStream_t stream) const {
  const CommonParams& common = params_.forward.common;
  const int64_t rows = common.q_rows;
  const int32_t heads = common.num_heads;
  Check(cudaMemset(params_.forward.out, 0xFF, rows * heads * kDim * 2), "fill");  // NaN
  Check(cudaMemset(params_.forward.lse, 0xFF, rows * heads * 4), "fill");
  Launch(stream);
  Check(cudaStreamSynchronize(stream), "forward");
  for (const int64_t row : {int64_t{0}, rows / 2 + 1, rows - 1}) {
    for (const int32_t head : {0, heads - 1}) VerifyRow(row, head);
  }
}

void ContiguousForwardRun::VerifyRow(int64_t row, int32_t head) const {
  const CommonParams& common = params_.forward.common;
  const int32_t kv_head = head / common.group_size;
  const std::vector<float> q = DownloadHead(params_.forward.q, row, 1, common.num_heads, head);
  const std::vector<float> out = DownloadHead(params_.forward.out, row, 1, common.num_heads, head);
  const std::vector<float> k = DownloadHead(k_, 0, row + 1, common.num_kv_heads, kv_head);
  const std::vector<float> v = DownloadHead(v_, 0, row + 1, common.num_kv_heads, kv_head);
  float lse = 0.0f;
  Check(cudaMemcpy(&lse, params_.forward.lse + head * common.q_rows + row, sizeof(lse),
                   cudaMemcpyDeviceToHost),
        "download");
  ReferenceQuery query;
  query.q = q.data();
  query.position = row;
  query.length = row + 1;
  query.softmax_scale = common.softmax_scale;
  const ReferenceRow expected = ComputeReference(
      query, kDim, kDim, [&](int64_t entry, const float** key, const float** value) {
        *key = &k[entry * kDim];
        *value = &v[entry * kDim];
      });
  double error = 0.0, norm = 0.0;
  for (int64_t i = 0; i < kDim; ++i) {
    error += (out[i] - expected.out[i]) * (out[i] - expected.out[i]);
    norm += expected.out[i] * expected.out[i];
  }
  // Negated, so that NaN fails.
  const bool right = std::sqrt(error / norm) < 1e-2 && std::abs(lse - expected.lse) < 1e-2;
  if (right) return;
  std::fprintf(stderr, "FATAL row %lld of head %d of one Forward is wrong: relative error %g\n",
               static_cast<long long>(row), head, std::sqrt(error / norm));
  std::exit(2);
}

}  // namespace ringattn::worker::cuda::paged::check
