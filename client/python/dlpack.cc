#include "client/python/dlpack.h"

#include <memory>

#include "client/python/gil_released.h"

namespace ringattn::python {

namespace py = pybind11;

// dlpack.h's DLManagedTensor, member for member.
struct DlManagedTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t axes;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
  void* context;
  void (*deleter)(DlManagedTensor*);
};
static_assert(sizeof(DlManagedTensor) == 64);

namespace {

constexpr char kName[] = "dltensor";
constexpr char kUsedName[] = "used_dltensor";
constexpr int32_t kCudaDevice = 2;

DlManagedTensor* TakeFrom(const py::capsule& capsule) {
  auto* const managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  if (managed == nullptr) throw py::error_already_set();
  if (PyCapsule_SetName(capsule.ptr(), kUsedName) != 0) throw py::error_already_set();
  return managed;
}

// The state of a tensor of MakeCudaDlpack.
struct Owned {
  DlManagedTensor tensor = {};
  std::vector<int64_t> shape;
  PyObject* owner = nullptr;
};

// Consumers may call this on any thread, and while or after the interpreter ends. Then the owner is
// leaked.
void Delete(DlManagedTensor* tensor) {
  auto* const owned = static_cast<Owned*>(tensor->context);
  if (Py_IsInitialized() != 0 && !IsFinalizing()) {
    const GilTaken held;
    Py_DECREF(owned->owner);
  }
  delete owned;
}

void DeleteUnused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kName) == 0) return;
  Delete(static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kName)));
}

}  // namespace

DlpackTensor::DlpackTensor(const py::capsule& capsule) : managed_(TakeFrom(capsule)) {}

DlpackTensor::~DlpackTensor() {
  if (managed_->deleter != nullptr) managed_->deleter(managed_);
}

uint64_t DlpackTensor::address() const {
  return reinterpret_cast<uint64_t>(managed_->data) + managed_->byte_offset;
}
int DlpackTensor::device_type() const { return managed_->device_type; }
int DlpackTensor::device() const { return managed_->device_id; }
std::vector<int64_t> DlpackTensor::shape() const {
  return {managed_->shape, managed_->shape + managed_->axes};
}
std::vector<int> DlpackTensor::dtype() const {
  return {managed_->dtype_code, managed_->dtype_bits, managed_->dtype_lanes};
}

bool DlpackTensor::is_contiguous() const {
  if (managed_->strides == nullptr) return true;
  const std::vector<int64_t> sizes = shape();
  for (const int64_t size : sizes) {
    if (size == 0) return true;
  }
  int64_t distance = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    if (sizes[axis] != 1 && managed_->strides[axis] != distance) return false;
    distance *= sizes[axis];
  }
  return true;
}

py::capsule MakeCudaDlpack(const py::object& owner, uint64_t address, int device,
                           const std::vector<int64_t>& shape, int dtype_code, int dtype_bits) {
  auto owned = std::make_unique<Owned>();
  owned->shape = shape;
  owned->tensor = {reinterpret_cast<void*>(address),
                   kCudaDevice,
                   device,
                   static_cast<int32_t>(shape.size()),
                   static_cast<uint8_t>(dtype_code),
                   static_cast<uint8_t>(dtype_bits),
                   1,
                   owned->shape.data(),
                   nullptr,
                   0,
                   owned.get(),
                   &Delete};
  PyObject* const capsule = PyCapsule_New(&owned->tensor, kName, &DeleteUnused);
  if (capsule == nullptr) throw py::error_already_set();
  owned->owner = py::object(owner).release().ptr();
  static_cast<void>(owned.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace ringattn::python
