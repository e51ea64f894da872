// HostPin: host memory that a device's copies access without staging while this object exists.
#ifndef RINGATTN_WORKER_DEVICE_HOST_PIN_H_
#define RINGATTN_WORKER_DEVICE_HOST_PIN_H_

namespace ringattn::worker {

// Unpinned on destruction. REQUIRES on destruction: no copy from or to it is in flight.
class HostPin {
 public:
  HostPin() = default;
  virtual ~HostPin() = default;
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_PIN_H_
