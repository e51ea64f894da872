// Memory that workers share, for Python.
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

// A region whose memory stays mapped for as long as this lives. Needs the GIL, which it gives up
// where it waits.
class PythonRegion {
 public:
  static absl::StatusOr<std::shared_ptr<PythonRegion>> Allocate(ClientHandle& client,
                                                                int64_t bytes);
  // In a forked child, which has neither the memory nor its thread, nothing is touched.
  ~PythonRegion();

  PythonRegion(const PythonRegion&) = delete;
  PythonRegion& operator=(const PythonRegion&) = delete;

  uint64_t address() const { return address_; }
  int64_t bytes() const { return bytes_; }
  bool closed() const { return region_ == nullptr; }
  std::vector<std::string> workers() const;
  std::string trouble() const;

  // Workers let go of it; the memory stays. Idempotent.
  void Close();

 private:
  explicit PythonRegion(std::unique_ptr<client::Region> region);

  std::unique_ptr<client::Region> region_;
  std::shared_ptr<const void> mapping_;
  const uint64_t address_;
  const int64_t bytes_;
  const int process_;
};

// The same on a GPU: freed with this object, which therefore is kept by all that lies in it. Needs
// the GIL, which it gives up where it waits.
class PythonCudaRegion {
 public:
  static absl::StatusOr<std::shared_ptr<PythonCudaRegion>> Allocate(ClientHandle& client,
                                                                    int device, int64_t bytes);
  // Behind everything that this process has put on the GPU's streams. As PythonRegion's after a
  // fork.
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
