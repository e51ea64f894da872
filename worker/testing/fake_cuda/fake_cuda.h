// The fake CUDA runtime's interface (fake_cuda.cc) for the fake NCCL and for tests.
#ifndef RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_CUDA_H_
#define RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_CUDA_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>

// Runs `work` on the stream's thread, after earlier work. Blocks while the stream is full
// (stream_depth).
void FakeCudaEnqueue(cudaStream_t stream, std::function<void()> work);

// Faults of the fake NCCL and CUDA, initially off. Shared by all communicators.
struct FakeNcclFaults {
  std::atomic<int> abort_ms{0};             // ncclCommAbort takes this long
  std::atomic<int> launch_ms{0};            // a group stays in progress this long before its launch
  std::atomic<bool> lost_network{false};    // ncclCommGetAsyncError reports ncclRemoteError
  std::atomic<bool> refuse_sends{false};    // ncclSend returns ncclInvalidArgument
  std::atomic<bool> refuse_ipc{false};      // cudaIpcGetMemHandle fails
  std::atomic<bool> refuse_mapping{false};  // cudaIpcOpenMemHandle fails
  std::atomic<bool> no_peer_access{false};  // cudaDeviceCanAccessPeer returns false
  std::atomic<bool> hold_mallocs{false};    // cudaMalloc blocks while set
  std::atomic<bool> hold_copies{false};     // copies of cudaMemcpyAsync stand still while set
  std::atomic<int> record_ms{0};            // recording an event takes this long
  std::atomic<size_t> stream_depth{
      0};  // how many items a stream holds in addition to its current one; 0: unlimited
  // Counters: open handles, held copies and calls, calls that found a stream full, copies enqueued,
  // row copies, and others.
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
