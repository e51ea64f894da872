// DLPack's tensors, given and taken: https://dmlc.github.io/dlpack/latest/c_api.html, the form
// without a version, which all libraries speak.
#ifndef RINGATTN_CLIENT_PYTHON_DLPACK_H_
#define RINGATTN_CLIENT_PYTHON_DLPACK_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ringattn::python {

struct DlManagedTensor;

// A tensor that a capsule brought; its producer hears when this is gone. Needs the GIL.
class DlpackTensor {
 public:
  // The capsule is used up. Throws: it is none, or is used up already.
  explicit DlpackTensor(const pybind11::capsule& capsule);
  ~DlpackTensor();
  DlpackTensor(const DlpackTensor&) = delete;
  DlpackTensor& operator=(const DlpackTensor&) = delete;

  uint64_t address() const;  // of its first element
  int device_type() const;
  int device() const;
  std::vector<int64_t> shape() const;
  bool is_contiguous() const;      // row-major, without gaps
  std::vector<int> dtype() const;  // DLDataTypeCode, bits, lanes

 private:
  DlManagedTensor* const managed_;
};

// A capsule of a contiguous tensor on CUDA device `device`, which keeps `owner` alive.
pybind11::capsule MakeCudaDlpack(const pybind11::object& owner, uint64_t address, int device,
                                 const std::vector<int64_t>& shape, int dtype_code, int dtype_bits);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_DLPACK_H_
