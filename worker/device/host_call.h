// Prepared calls of a device whose memory is the host's: the call itself.
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

// Starts a call as Device::Start does. The call outlives the event.
using StartHostCall = std::function<EventRef(const KernelCall& call, std::vector<EventRef> after,
                                             RunControl* control)>;

class HostCall : public PreparedCall {
 public:
  HostCall(KernelCall call, std::string_view family, StartHostCall start)
      : call_(std::move(call)), family_(family), start_(std::move(start)) {}

  std::string_view family() const override { return family_; }
  EventRef Start(std::vector<EventRef> after, RunControl* control) const override {
    return start_(call_, std::move(after), control);
  }

 private:
  const KernelCall call_;
  const std::string_view family_;
  const StartHostCall start_;
};

// Device::Prepare of such a device. `family_of` names the family that serves a forward or
// backward call of a dtype, a literal.
inline PreparedCalls PrepareHostCalls(std::vector<KernelCall> calls,
                                      std::string_view (*family_of)(DType dtype),
                                      const StartHostCall& start) {
  PreparedCalls prepared;
  for (KernelCall& call : calls) {
    std::string_view family;
    if (const auto* forward = std::get_if<ForwardCall>(&call)) {
      family = family_of(forward->problem->dtype);
    } else if (const auto* backward = std::get_if<BackwardCall>(&call)) {
      family = family_of(backward->problem->dtype);
    }
    prepared.push_back(std::make_unique<HostCall>(std::move(call), family, start));
  }
  return prepared;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_CALL_H_
