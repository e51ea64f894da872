// The interface between the contract's cases and a transport. A test program links the cases
// (//worker/comm/contract:cases, and :socket_cases for sockets) and defines RingsUnderTest(). Each
// transport has such a program, so the common behaviour is tested by one set of cases.
#ifndef RINGATTN_WORKER_COMM_CONTRACT_RING_UNDER_TEST_H_
#define RINGATTN_WORKER_COMM_CONTRACT_RING_UNDER_TEST_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// One rank's transport and device, as in a separate process. Thread safe.
class TestRank {
 public:
  virtual ~TestRank() = default;

  virtual RingTransport& transport() = 0;

  // Returns memory that transfers may use. Never null, not even for 0 bytes.
  virtual void* Allocate(int64_t bytes) = 0;
  virtual void Free(void* data) = 0;
  // Copies from and to host memory. Written data is visible to every queue on return.
  virtual void Write(void* data, const void* host, int64_t bytes) = 0;
  virtual void Read(void* host, const void* data, int64_t bytes) = 0;

  // Starts device work that fills the memory with `value` as soon as *go is true. Does not block.
  virtual EventRef FillWhen(const std::atomic<bool>* go, void* data, int64_t bytes,
                            uint8_t value) = 0;
};

struct TestRankOptions {
  int world_size = 2;
  absl::Duration step_timeout = absl::Minutes(1);
  int max_ctas = 4;  // for transports that use SMs
  std::function<void(const std::string&)> on_stuck;
};

struct RingUnderTest {
  std::string name;
  // Number of ranks for which this machine has devices.
  int max_world_size = 8;
  // The transport only forms rings of one.
  bool single_rank_only = false;
  // A transfer of this size is practically never complete when it is aborted.
  int64_t long_transfer_bytes = int64_t{64} << 20;
  bool has_step_timeout = true;
  // A group may send from a rank to itself.
  bool sends_to_itself = false;
  // A lost peer ends only the transfers with that peer.
  bool isolates_peers = false;
  // A prepared rank can be reached before it calls Connect.
  bool reaches_prepared_ranks = false;
  // Creates the unprepared ranks of one ring, by rank. They may form several rings.
  std::function<std::vector<std::unique_ptr<TestRank>>(const TestRankOptions&)> make_ranks;
  // Transports over sockets (socket_cases): creates one rank's transport, which listens at `host`.
  std::function<std::unique_ptr<RingTransport>(const std::string& host,
                                               absl::Duration step_timeout)>
      make_transport;
  std::string host = "127.0.0.1";  // for make_transport

  friend std::ostream& operator<<(std::ostream& out, const RingUnderTest& ring) {
    return out << ring.name;
  }
};

// Defined by the program.
std::vector<RingUnderTest> RingsUnderTest();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CONTRACT_RING_UNDER_TEST_H_
