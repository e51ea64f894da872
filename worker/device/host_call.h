// Prepared calls for devices that compute in host memory.
#ifndef RINGATTN_WORKER_DEVICE_HOST_CALL_H_
#define RINGATTN_WORKER_DEVICE_HOST_CALL_H_

#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "worker/device/device.h"

namespace ringattn::worker {

// Starts a call like Device::Start. The call must outlive the event.
using StartHostCall = std::function<EventRef(const KernelCall& call, std::vector<EventRef> after,
                                             RunControl* control)>;

class HostCall : public PreparedCall {
 public:
  HostCall(KernelCall call, KernelName kernel, StartHostCall start)
      : call_(std::move(call)), kernel_(kernel), start_(std::move(start)) {}

  KernelName kernel() const override { return kernel_; }
  EventRef Start(StartAfter after, RunControl* control) const override {
    return start_(call_, std::move(after).Joined(), control);
  }

 private:
  const KernelCall call_;
  const KernelName kernel_;
  const StartHostCall start_;
};

// Returns the name of the kernel that serves a call. `name_of` returns the family that serves a
// dtype; the class follows from the call.
inline KernelName HostKernelName(const KernelCall& call, KernelName (*name_of)(DType dtype)) {
  KernelName kernel;
  if (const AttentionProblem* problem = ProductProblem(call)) {
    kernel = name_of(problem->dtype);
    kernel.kernel_class = problem->terms.any()                            ? kTermKernelClass
                          : problem->compute == ComputeDType::kFloat8E4M3 ? kFloat8KernelClass
                                                                          : kPlainKernelClass;
  }
  return kernel;
}

// Implements Device::Prepare for such a device. `name_of`: see HostKernelName.
inline PreparedCalls PrepareHostCalls(std::vector<KernelCall> calls,
                                      KernelName (*name_of)(DType dtype),
                                      const StartHostCall& start) {
  PreparedCalls prepared;
  for (KernelCall& call : calls) {
    const KernelName kernel = HostKernelName(call, name_of);
    prepared.push_back(std::make_unique<HostCall>(std::move(call), kernel, start));
  }
  return prepared;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_CALL_H_
