// The part of the CUDA runtime that a ring uses, on host memory and threads, so that the ring's
// logic can be tested without a GPU. Linked into a test, its symbols precede the runtime's. Has
// $FAKE_GPUS devices, by default three.
//
// Unlike a device, it does not check that memory belongs to the current device.
#include "worker/testing/fake_cuda/fake_cuda.h"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "worker/testing/fake_cuda/fake_vmm.h"

namespace {

using Clock = std::chrono::steady_clock;

thread_local int current_device = 0;

int DeviceCount() {
  const char* count = std::getenv("FAKE_GPUS");
  return count == nullptr ? 3 : std::atoi(count);
}

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // number of records
  // Records that no stream has reached. An event may be recorded again on another stream, which may
  // reach it earlier. A wait is for the record before it.
  std::set<uint64_t> pending;
  Clock::time_point time;

  uint64_t Record() {
    const std::lock_guard<std::mutex> lock(mutex);
    pending.insert(++recorded);
    return recorded;
  }
  void Finish(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex);
    pending.erase(ticket);
    if (ticket == recorded) time = Clock::now();
    changed.notify_all();
  }
  Clock::time_point Time() {
    const std::lock_guard<std::mutex> lock(mutex);
    return time;
  }
  void Await(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return pending.count(ticket) == 0; });
  }
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool busy = false;  // running work that is no longer in the queue
  bool closing = false;

  void Loop() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closing || !work.empty(); });
      if (work.empty()) return;
      const std::function<void()> now = std::move(work.front());
      work.pop_front();
      busy = true;
      changed.notify_all();
      lock.unlock();
      now();
      lock.lock();
      busy = false;
    }
  }
};

// Handles are pointers to shared pointers; work on the stream's thread holds copies.
using EventHandle = std::shared_ptr<Event>;
using StreamHandle = std::shared_ptr<Stream>;

EventHandle& Of(cudaEvent_t event) { return *reinterpret_cast<EventHandle*>(event); }
StreamHandle& Of(cudaStream_t stream) { return *reinterpret_cast<StreamHandle*>(stream); }

// Uses the test's library unless the environment names another.
const bool library_named = [] {
  setenv("RINGATTN_NCCL", "worker/comm/nccl/fake/libfake_nccl.so", /*overwrite=*/0);
  return true;
}();

}  // namespace

FakeNcclFaults& Faults() {
  static FakeNcclFaults faults;
  return faults;
}

void FakeCudaEnqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) return work();
  const StreamHandle target = Of(stream);
  const auto is_full = [&] {
    const size_t depth = Faults().stream_depth;
    return depth != 0 && target->work.size() >= depth;
  };
  std::unique_lock<std::mutex> lock(target->mutex);
  if (is_full()) ++Faults().full_streams;
  // The depth may change while waiting.
  while (is_full()) target->changed.wait_for(lock, std::chrono::milliseconds(1));
  target->work.push_back(std::move(work));
  target->changed.notify_all();
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = DeviceCount();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= DeviceCount()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof(*properties));
  properties->uuid.bytes[15] = static_cast<char>(device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error of the fake runtime"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  auto* handle = new StreamHandle(std::make_shared<Stream>());
  std::thread([owned = *handle] { owned->Loop(); }).detach();
  *stream = reinterpret_cast<cudaStream_t>(handle);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

// Like CUDA: returns at once, and work on the stream still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  StreamHandle* handle = &Of(stream);
  {
    const std::lock_guard<std::mutex> lock((*handle)->mutex);
    (*handle)->closing = true;
    (*handle)->changed.notify_all();
  }
  delete handle;
  return cudaSuccess;
}

// Work on the default stream is done synchronously.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;
  const auto event = std::make_shared<Event>();
  FakeCudaEnqueue(stream, [event] { event->Finish(1); });
  event->Await(1);
  return cudaSuccess;
}

// For programs that use no other stream.
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const StreamHandle& target = Of(stream);
  const std::lock_guard<std::mutex> lock(target->mutex);
  return target->work.empty() && !target->busy ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new EventHandle(std::make_shared<Event>()));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &Of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const EventHandle owned = Of(event);
  const uint64_t ticket = owned->Record();
  FakeCudaEnqueue(stream, [owned, ticket, pause = Faults().record_ms.load()] {
    if (pause > 0) std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    owned->Finish(ticket);
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const EventHandle& target = Of(event);
  const std::lock_guard<std::mutex> lock(target->mutex);
  return target->pending.count(target->recorded) == 0 ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const std::chrono::duration<float, std::milli> elapsed = Of(end)->Time() - Of(begin)->Time();
  *milliseconds = elapsed.count();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  const EventHandle owned = Of(event);
  uint64_t ticket;
  {
    const std::lock_guard<std::mutex> lock(owned->mutex);
    ticket = owned->recorded;
  }
  FakeCudaEnqueue(stream, [owned, ticket] { owned->Await(ticket); });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  FakeCudaEnqueue(stream, [function, data] { function(data); });
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (Faults().hold_mallocs) ++Faults().held_mallocs;
  while (Faults().hold_mallocs) std::this_thread::sleep_for(std::chrono::microseconds(100));
  *data = std::malloc(bytes);
  if (*data != nullptr) FakeVmmNote(*data, bytes);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  FakeVmmNote(data, 0);
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  ++Faults().copies;
  FakeCudaEnqueue(stream, [to, from, bytes] {
    if (Faults().hold_copies) ++Faults().held_copies;
    while (Faults().hold_copies) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}

// Copies rows, in the way of cudaMemcpyAsync.
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (to_pitch < width || from_pitch < width) return cudaErrorInvalidPitchValue;
  ++Faults().copies_2d;
  FakeCudaEnqueue(stream, [=] {
    if (Faults().hold_copies) ++Faults().held_copies;
    while (Faults().hold_copies) std::this_thread::sleep_for(std::chrono::microseconds(100));
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch,
                  static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
  return cudaSuccess;
}

// Handles contain the address, and the size if it is known, because all ranks are threads of one
// process.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  if (Faults().refuse_ipc) return cudaErrorNotSupported;
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &data, sizeof(data));
  CUdeviceptr base = 0;
  size_t bytes = 0;
  if (cuMemGetAddressRange(&base, &bytes, reinterpret_cast<CUdeviceptr>(data)) == CUDA_SUCCESS) {
    std::memcpy(handle->reserved + sizeof(data), &bytes, sizeof(bytes));
  }
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned int) {
  if (Faults().refuse_mapping) return cudaErrorMapBufferObjectFailed;
  std::memcpy(data, &handle, sizeof(*data));
  size_t bytes = 0;
  std::memcpy(&bytes, handle.reserved + sizeof(*data), sizeof(bytes));
  if (bytes > 0) FakeVmmNote(*data, bytes);
  ++Faults().mapped;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void*) {
  --Faults().mapped;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = Faults().no_peer_access ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return cudaSuccess; }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);
  const Operation write = [](CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int) {
    FakeCudaEnqueue(stream, [address, value] {
      __atomic_store_n(reinterpret_cast<cuuint64_t*>(address), value, __ATOMIC_RELEASE);
    });
    return CUDA_SUCCESS;
  };
  const Operation wait = [](CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int) {
    FakeCudaEnqueue(stream, [address, value] {
      const auto* word = reinterpret_cast<const cuuint64_t*>(address);
      while (static_cast<int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    });
    return CUDA_SUCCESS;
  };
  static const auto* const functions = new std::map<std::string, void*>{
      {"cuStreamWriteValue64", reinterpret_cast<void*>(write)},
      {"cuStreamWaitValue64", reinterpret_cast<void*>(wait)},
      {"cuGetErrorName", reinterpret_cast<void*>(&cuGetErrorName)},
      {"cuDeviceGet", reinterpret_cast<void*>(&cuDeviceGet)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(&cuDeviceGetAttribute)},
      {"cuMemCreate", reinterpret_cast<void*>(&cuMemCreate)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&cuMemExportToShareableHandle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&cuMemImportFromShareableHandle)},
      {"cuMemGetAllocationPropertiesFromHandle",
       reinterpret_cast<void*>(&cuMemGetAllocationPropertiesFromHandle)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&cuMemGetAllocationGranularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&cuMemAddressReserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&cuMemAddressFree)},
      {"cuMemMap", reinterpret_cast<void*>(&cuMemMap)},
      {"cuMemUnmap", reinterpret_cast<void*>(&cuMemUnmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&cuMemSetAccess)},
      {"cuMemRelease", reinterpret_cast<void*>(&cuMemRelease)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&cuMemGetAddressRange)}};
  const auto entry = functions->find(symbol);
  *found =
      entry == functions->end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = entry == functions->end() ? nullptr : entry->second;
  return cudaSuccess;
}

cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  FakeCudaEnqueue(stream, [data, value, bytes] { std::memset(data, value, bytes); });
  return cudaSuccess;
}

}  // extern "C"
