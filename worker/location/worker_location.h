// Where this worker runs, for its registration.
// Tests: worker_location_test.cc
#ifndef RINGATTN_WORKER_LOCATION_WORKER_LOCATION_H_
#define RINGATTN_WORKER_LOCATION_WORKER_LOCATION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "ringattn/v1/cluster.pb.h"

namespace ringattn::worker {

struct LocationOptions {
  std::string host_id;             // empty: the kernel's boot id
  std::string accelerator_domain;  // empty: the host
  std::optional<uint64_t> slot;    // unset: that of the device, if known
  std::string zone;
};

// Returns the location, with the machine's network interfaces. `device_slot`: the device's position
// in the machine, if known.
v1::WorkerLocation MakeLocation(const LocationOptions& options,
                                std::optional<uint64_t> device_slot);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_LOCATION_WORKER_LOCATION_H_
