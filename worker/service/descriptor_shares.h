// How a worker divides the file descriptors of its process among its listeners, so that clients
// cannot take those of the ring and of the coordinator.
// Tests: worker_test.cc, tests/e2e/test_abuse_process.py
#ifndef RINGATTN_WORKER_SERVICE_DESCRIPTOR_SHARES_H_
#define RINGATTN_WORKER_SERVICE_DESCRIPTOR_SHARES_H_

#include <algorithm>
#include <cstdint>

namespace ringattn::worker {

struct DescriptorShares {
  int64_t client_connections = 0;  // at the client data address
  int64_t local_sockets = 0;       // of clients that share memory
  int64_t data_connections = 0;    // at the data address, from the coordinator
};

// A quarter of the descriptors remains for the ring, the control stream, metrics and logs. The
// largest shares suffice for the limits of common/base/limits.h.
inline DescriptorShares ShareDescriptors(int64_t descriptors) {
  return {.client_connections = std::clamp<int64_t>(descriptors * 3 / 8, 1, 1024),
          .local_sockets = std::clamp<int64_t>(descriptors / 4, 9, 576),
          .data_connections = std::clamp<int64_t>(descriptors / 8, 8, 256)};
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_DESCRIPTOR_SHARES_H_
