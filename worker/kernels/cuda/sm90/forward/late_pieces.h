// The form of KvRange::piece and KeyRows::piece in forwards that wait for late keys. Plain
// functions; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_LATE_PIECES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_LATE_PIECES_H_

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// The lower bits have the index over all pieces, and the upper ones KvBlock::late. The range's keys
// have arrived once WorkCounters::keys is at least that number.
inline constexpr int kPieceIndexBits = 24;
inline constexpr int32_t kMostPieces = 1 << kPieceIndexBits;
// ForwardKernelParams::first_late_piece of launches that wait.
inline constexpr int32_t kFirstLatePiece = kMostPieces;

#ifdef __CUDACC__
#define RINGATTN_LATE_PIECE __host__ __device__ __forceinline__
#else
#define RINGATTN_LATE_PIECE inline
#endif
RINGATTN_LATE_PIECE int32_t LatePiece(int32_t index, int32_t late) {
  return index | late << kPieceIndexBits;
}
RINGATTN_LATE_PIECE int32_t IndexOfPiece(int32_t piece) { return piece & (kMostPieces - 1); }
RINGATTN_LATE_PIECE int32_t LateOfPiece(int32_t piece) { return piece >> kPieceIndexBits; }
#undef RINGATTN_LATE_PIECE

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_LATE_PIECES_H_
