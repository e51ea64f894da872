// Which device the launcher gives to which worker.
#ifndef RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_
#define RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_

#include <string>

namespace ringattn::client {

// "cuda" is GPU `index` for worker `index`; everything else is passed on as it is.
// ("auto" is each worker's own decision, the same for all of one machine.)
std::string WorkerDevice(const std::string& device, int index);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_WORKER_DEVICE_H_
