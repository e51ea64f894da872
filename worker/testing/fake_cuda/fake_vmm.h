// Open handles and injected faults of the fake driver's virtual memory (fake_vmm.cc), for tests.
#ifndef RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_VMM_H_
#define RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_VMM_H_

#include <atomic>
#include <cstddef>

struct FakeVmmState {
  std::atomic<int> handles{0};       // allocations that are held or mapped
  std::atomic<int> mappings{0};      // cuMemMap without cuMemUnmap
  std::atomic<int> reservations{0};  // cuMemAddressReserve without cuMemAddressFree
  std::atomic<bool> hold_imports{
      false};                        // cuMemImportFromShareableHandle does not return meanwhile
  std::atomic<int> held_imports{0};  // calls that have been held
  std::atomic<bool> refuse_access{false};  // cuMemSetAccess fails
  std::atomic<bool> no_vmm{false};         // cuDeviceGetAttribute reports no support
  std::atomic<bool> refuse_create{false};  // cuMemCreate is not permitted
  std::atomic<bool> hold_creates{false};   // cuMemCreate blocks while set
  std::atomic<int> held_creates{0};        // calls that have been held
};
FakeVmmState& FakeVmm();

// Records cudaMalloc memory for cuMemGetAddressRange; 0 bytes: it was freed.
void FakeVmmNote(void* base, size_t bytes);

#endif  // RINGATTN_WORKER_TESTING_FAKE_CUDA_FAKE_VMM_H_
