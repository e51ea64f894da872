// Launches prepared kernels in tests and waits for them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {

using Prepared = absl::StatusOr<std::unique_ptr<PreparedKernel>>;

// The memory of keys that arrive after the launch of a call, and hold NaN until then. They come
// from the host by a copy engine, because the call may occupy all multiprocessors.
class LateKeys {
 public:
  LateKeys() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~LateKeys() {
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
    for (const Piece& piece : pieces_) (void)cudaFreeHost(piece.host);
    if (numbers_ != nullptr) (void)cudaFreeHost(numbers_);
  }
  LateKeys(const LateKeys&) = delete;
  LateKeys& operator=(const LateKeys&) = delete;

  // Saves the memory's contents on the host and fills it with NaN. `late`: KvBlock::late, which
  // does not fall from call to call.
  void Take(void* device, size_t bytes, int32_t late) {
    if (bytes == 0) return;
    Piece piece{device, nullptr, bytes, late};
    Check(cudaHostAlloc(&piece.host, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    Check(cudaMemcpy(piece.host, device, bytes, cudaMemcpyDeviceToHost), "late keys");
    Check(cudaMemset(device, 0xFF, bytes), "late keys");
    pieces_.push_back(piece);
  }
  // Enqueues the restoration of the contents, arrival by arrival and each after a millisecond. The
  // arrival's number in the word follows.
  void Come(uint32_t* word) {
    if (numbers_ == nullptr) {
      Check(cudaHostAlloc(reinterpret_cast<void**>(&numbers_), 4 * kMostArrivals,
                          cudaHostAllocDefault),
            "words");
      std::iota(numbers_, numbers_ + kMostArrivals, 1);
    }
    int32_t arrived = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      if (piece.late > arrived) {
        Check(cudaLaunchHostFunc(
                  stream_, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); },
                  nullptr),
              "cudaLaunchHostFunc");
        arrived = piece.late;
      }
      Check(cudaMemcpyAsync(piece.device, piece.host, piece.bytes, cudaMemcpyHostToDevice, stream_),
            "late keys");
      if (i + 1 < pieces_.size() && pieces_[i + 1].late == piece.late) continue;
      Check(cudaMemcpyAsync(word, &numbers_[piece.late - 1], 4, cudaMemcpyHostToDevice, stream_),
            "word");
    }
  }

 private:
  struct Piece {
    void* device;
    void* host;
    size_t bytes;
    int32_t late;
  };
  std::vector<Piece> pieces_;
  uint32_t* numbers_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

// Runs a prepared call with tables and scratch of exactly the stated size. `late`: its late keys,
// which arrive after the launch. REQUIRES: the kernel waits for late keys.
inline void LaunchAndWait(const Prepared& prepared, const uint32_t* stop_word = nullptr,
                          LateKeys* late = nullptr) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  Check(kernel.PlaceScratch(scratch.get()));
  kernel.WriteTables(host.data());
  tables.Upload(host);
  if (late != nullptr) {
    late->Come(reinterpret_cast<uint32_t*>(tables.get<char>() + *kernel.keys_word_offset()));
  }
  Check(kernel.Launch({nullptr, tables.get(), scratch.get(), stop_word, late != nullptr}));
  Check(cudaDeviceSynchronize(), "kernel");
  if (!tables.GuardsIntact() || !scratch.GuardsIntact()) {
    std::fprintf(stderr, "FATAL: tables or scratch overrun\n");
    std::exit(2);
  }
}

// Returns the time of the fastest of `launches` launches, in seconds.
inline double BestSeconds(const Prepared& prepared, int launches) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  kernel.WriteTables(host.data());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  tables.Upload(host);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  float best = INFINITY;
  for (int i = 0; i < launches; ++i) {
    Check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    Check(kernel.Launch({nullptr, tables.get(), scratch.get(), nullptr}));
    Check(cudaEventRecord(end, nullptr), "cudaEventRecord");
    Check(cudaDeviceSynchronize(), "kernel");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  return best / 1e3;
}

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_LAUNCH_AND_WAIT_H_
