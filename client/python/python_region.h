// Shared regions for Python.
// Tests: tests/python/test_regions.py, test_cuda.py.
#ifndef RINGATTN_CLIENT_PYTHON_PYTHON_REGION_H_
#define RINGATTN_CLIENT_PYTHON_PYTHON_REGION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/cuda_region.h"
#include "client/api/region.h"
#include "client/python/python_call.h"

namespace ringattn::python {

// A host region whose memory stays mapped during this object's lifetime. Needs the GIL and releases
// it while waiting.
class PythonRegion {
 public:
  static absl::StatusOr<std::shared_ptr<PythonRegion>> Allocate(ClientHandle& client,
                                                                int64_t bytes);
  // In a forked child, which has neither the memory nor the thread, nothing is released.
  ~PythonRegion();

  PythonRegion(const PythonRegion&) = delete;
  PythonRegion& operator=(const PythonRegion&) = delete;

  uint64_t address() const { return address_; }
  int64_t bytes() const { return bytes_; }
  bool closed() const { return region_ == nullptr; }
  std::vector<std::string> workers() const;
  std::string trouble() const;

  // Detaches the region from the workers; the memory stays mapped. Idempotent.
  void Close();

 private:
  explicit PythonRegion(std::unique_ptr<client::Region> region);

  std::unique_ptr<client::Region> region_;
  std::shared_ptr<const void> mapping_;
  const uint64_t address_;
  const int64_t bytes_;
  const int process_;
};

// A CUDA region. Its memory is freed with this object, so everything that lies in it keeps the
// object alive. Needs the GIL and releases it while waiting.
class PythonCudaRegion {
 public:
  static absl::StatusOr<std::shared_ptr<PythonCudaRegion>> Allocate(ClientHandle& client,
                                                                    int device, int64_t bytes);
  // Waits for all work that this process has submitted to the GPU. After a fork it behaves as
  // PythonRegion's.
  ~PythonCudaRegion();

  PythonCudaRegion(const PythonCudaRegion&) = delete;
  PythonCudaRegion& operator=(const PythonCudaRegion&) = delete;

  uint64_t address() const { return reinterpret_cast<uint64_t>(region_->memory().data()); }
  int64_t bytes() const { return static_cast<int64_t>(region_->memory().size()); }
  int device() const { return region_->device(); }
  std::vector<std::string> workers() const { return region_->workers(); }
  std::string trouble() const { return region_->trouble(); }

 private:
  explicit PythonCudaRegion(std::unique_ptr<client::CudaRegion> region);

  std::unique_ptr<client::CudaRegion> region_;
  const int process_;
};

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PYTHON_REGION_H_
