// HostPin: host memory that a device's copies reach without staging, for as long as this is there.
#ifndef RINGATTN_WORKER_DEVICE_HOST_PIN_H_
#define RINGATTN_WORKER_DEVICE_HOST_PIN_H_

namespace ringattn::worker {

// Given back on destruction. REQUIRES on destruction: no copy from or to it is under way.
class HostPin {
 public:
  HostPin() = default;
  virtual ~HostPin() = default;
  HostPin(const HostPin&) = delete;
  HostPin& operator=(const HostPin&) = delete;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_PIN_H_
