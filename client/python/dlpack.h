// DLPack tensors, imported and exported: https://dmlc.github.io/dlpack/latest/c_api.html, in the
// unversioned form that all libraries support.
// Tests: tests/python/test_cuda.py.
#ifndef RINGATTN_CLIENT_PYTHON_DLPACK_H_
#define RINGATTN_CLIENT_PYTHON_DLPACK_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ringattn::python {

struct DlManagedTensor;

// An imported tensor. Its destruction releases it to the producer. Needs the GIL.
class DlpackTensor {
 public:
  // Consumes the capsule. Throws if it is not a DLPack capsule or has been consumed.
  explicit DlpackTensor(const pybind11::capsule& capsule);
  ~DlpackTensor();
  DlpackTensor(const DlpackTensor&) = delete;
  DlpackTensor& operator=(const DlpackTensor&) = delete;

  uint64_t address() const;  // of the first element
  int device_type() const;
  int device() const;
  std::vector<int64_t> shape() const;
  bool is_contiguous() const;      // row-major, without gaps
  std::vector<int> dtype() const;  // DLDataTypeCode, bits, lanes

 private:
  DlManagedTensor* const managed_;
};

// Returns a capsule of a contiguous tensor on CUDA device `device` that keeps `owner` alive.
pybind11::capsule MakeCudaDlpack(const pybind11::object& owner, uint64_t address, int device,
                                 const std::vector<int64_t>& shape, int dtype_code, int dtype_bits);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_DLPACK_H_
