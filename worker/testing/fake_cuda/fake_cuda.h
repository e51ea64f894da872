// What the fake CUDA runtime (fake_cuda.cc) offers to the fake NCCL and to tests.
#ifndef RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_CUDA_H_
#define RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_CUDA_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>

// Runs `work` on the stream's thread, behind what was put there before. Waits for room if
// stream_depth says so.
void FakeCudaEnqueue(cudaStream_t stream, std::function<void()> work);

// Faults of the fake NCCL and CUDA; all off at first. Shared by all communicators.
struct FakeNcclFaults {
  std::atomic<int> abort_ms{0};             // ncclCommAbort takes this long
  std::atomic<int> launch_ms{0};            // a group is in progress this long before its launch
  std::atomic<bool> lost_network{false};    // ncclCommGetAsyncError reports ncclRemoteError
  std::atomic<bool> refuse_sends{false};    // ncclSend returns ncclInvalidArgument
  std::atomic<bool> refuse_ipc{false};      // cudaIpcGetMemHandle fails
  std::atomic<bool> refuse_mapping{false};  // cudaIpcOpenMemHandle fails
  std::atomic<bool> no_peer_access{false};  // cudaDeviceCanAccessPeer says no
  std::atomic<bool> hold_mallocs{false};    // cudaMalloc does not return meanwhile
  std::atomic<bool> hold_copies{false};     // cudaMemcpyAsync's copies stand still meanwhile
  std::atomic<int> record_ms{0};            // an event that is recorded takes this long
  std::atomic<size_t> stream_depth{0};      // what a stream holds beside its current work; 0: all
  // No faults: handles that are open, copies and calls that are held, calls that found a
  // stream full, copies enqueued, those of rows, and others.
  std::atomic<int> mapped{0};
  std::atomic<int> held_mallocs{0};
  std::atomic<int> held_copies{0};
  std::atomic<int> full_streams{0};
  std::atomic<int> copies{0};
  std::atomic<int> copies_2d{0};
  std::atomic<int> memory_queries{0};  // cudaMemGetInfo
};
FakeNcclFaults& Faults();

#endif  // RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_CUDA_H_
