#include "worker/kernels/cuda/sm90/launch/call_bias.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/launch/tensor_map_encoder.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int64_t kRowBytes = 16;  // the copy engine requires multiples of 16

DType DTypeOf(const AttentionProblem& problem) {
  return problem.terms.bias->float32 ? DType::kFloat32 : problem.dtype;
}

// Returns the column of a piece's first key. The following keys are `stride` columns apart.
int64_t ColumnOf(const ScoreTerms& terms, const Piece& piece) {
  return terms.PairColumn(piece.local_begin, piece.PositionOf(0));
}

int64_t FirstColumn(const ScoreTerms& terms, const std::vector<KvBlock>& blocks) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      if (piece.length > 0) first = std::min(first, ColumnOf(terms, piece));
    }
  }
  return first;
}

// Returns whether all pieces begin at whole vectors of columns, counted from `first`.
bool WholeVectors(const ScoreTerms& terms, const std::vector<KvBlock>& blocks, int64_t first,
                  int32_t stride) {
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      if (piece.length > 0 && (ColumnOf(terms, piece) - first) / stride % kBiasKeyAlign != 0) {
        return false;
      }
    }
  }
  return true;
}

// Encodes the map of a tensor [planes, rows, pitch] with `columns` elements in each row. Elements
// outside read as zero.
absl::Status EncodeBiasMap(DType dtype, const void* data, int64_t planes, int64_t rows,
                           int64_t columns, int64_t pitch, int32_t box_rows, TensorMap& target) {
  const auto encode = TensorMapEncoder();
  if (!encode.ok()) return encode.status();
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const int64_t element = ElementBytes(dtype);
  const cuuint64_t sizes[4] = {size(columns), 1, size(rows), size(planes)};
  const cuuint64_t row_bytes = size(pitch * element);
  const cuuint64_t strides[3] = {row_bytes, row_bytes, row_bytes * size(rows)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element), 1,
                             static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result =
      (*encode)(&map, type, 4, const_cast<void*>(data), sizes, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (absl::Status s = EncodingStatus(result, "the bias"); !s.ok()) return s;
  static_assert(sizeof(map) == sizeof(target));
  std::memcpy(target.bytes, &map, sizeof(map));
  return absl::OkStatus();
}

}  // namespace

bool BiasInVectors(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                   int32_t stride) {
  return stride == 1 && problem.terms.columns * ElementBytes(DTypeOf(problem)) % kRowBytes == 0 &&
         WholeVectors(problem.terms, blocks, 0, 1);
}

bool TakesBias(const AttentionProblem& problem, const TermOperands& operands,
               const std::vector<KvBlock>& blocks, int32_t stride) {
  const ScoreTerms& terms = problem.terms;
  if (terms.by_keys && stride != 1) return false;
  if (!terms.bias.has_value()) return true;
  return BiasInVectors(problem, blocks, stride)
             ? Aligned16(operands.bias)
             : WholeVectors(terms, blocks, FirstColumn(terms, blocks), stride);
}

absl::Status CallBias::Init(const AttentionProblem& problem, const TermOperands& operands,
                            int64_t q_rows, const std::vector<KvBlock>& blocks, int32_t stride) {
  if (!problem.terms.bias.has_value()) return absl::OkStatus();
  const ScoreTerms& terms = problem.terms;
  const BiasForm& form = *terms.bias;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  rows_ = terms.PlaneRows(q_rows);
  columns_ = terms.columns;
  if (rows_ > kMost || columns_ > kMost) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a plane of the bias is too large; rows and columns may be at most 2147483647 each: ",
        rows_, " x ", columns_));
  }
  dtype_ = DTypeOf(problem);
  bias_ = operands.bias;
  planes_ = (form.per_batch ? problem.batch : 1) * (form.per_head ? problem.num_heads : 1);
  if (BiasInVectors(problem, blocks, stride)) return absl::OkStatus();

  // The columns from the first key to the last one.
  const int64_t first = FirstColumn(terms, blocks);
  int64_t end = 0;
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      if (piece.length == 0) continue;
      end = std::max(end, ColumnOf(terms, piece) + (piece.length - 1) * stride + 1);
    }
  }
  if (first >= end) return absl::OkStatus();
  bool alike = true;  // all columns have the same residue
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) {
      alike = alike && (piece.length == 0 || (ColumnOf(terms, piece) - first) % stride == 0);
    }
  }
  copy_.rows = planes_ * rows_;
  copy_.columns = columns_;
  copy_.first = first;
  copy_.end = std::min(end, columns_);
  copy_.stride = stride;
  copy_.classes = alike ? 1 : stride;
  const int64_t class_columns = (end - first + stride - 1) / stride;
  copy_.class_columns =
      static_cast<int32_t>((class_columns + kBiasKeyAlign - 1) / kBiasKeyAlign * kBiasKeyAlign);
  const int64_t element = ElementBytes(dtype_);
  const int64_t wanted = int64_t{copy_.classes} * copy_.class_columns;
  copy_.pitch = (wanted * element + kRowBytes - 1) / kRowBytes * kRowBytes / element;
  scratch_bytes_ = AlignUp(copy_.rows * copy_.pitch * element);
  return absl::OkStatus();
}

absl::Status CallBias::Place(void* scratch, int32_t box_rows, cudaStream_t stream,
                             BiasMap& target) const {
  if (planes_ == 0 || rows_ == 0 || columns_ == 0) return absl::OkStatus();
  if (!copies()) {
    return EncodeBiasMap(dtype_, bias_, planes_, rows_, columns_, columns_, box_rows, target.map);
  }
  BiasCopyParams copy = copy_;
  copy.source = bias_;
  copy.target = scratch;
  const absl::Status status = ToStatus(
      LaunchBiasCopy(copy, static_cast<int>(ElementBytes(dtype_)), stream), "bias copy launch");
  if (!status.ok()) return status;
  target.first = copy.first;
  target.stride = copy.stride;
  target.class_columns = copy.class_columns;
  return EncodeBiasMap(dtype_, scratch, planes_, rows_, int64_t{copy.classes} * copy.class_columns,
                       copy.pitch, box_rows, target.map);
}

}  // namespace ringattn::worker::cuda::sm90
