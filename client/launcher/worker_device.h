// The device that the launcher assigns to each worker.
// Tests: worker_device_test.cc.
#ifndef RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_
#define RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_

#include <string>

namespace ringattn::client {

// "cuda" becomes GPU `index` for worker `index`. Other values are passed on unchanged. ("auto" is
// each worker's own decision, the same for all workers of a machine.)
std::string WorkerDevice(const std::string& device, int index);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_
