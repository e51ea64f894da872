// What the contract's cases need of a transport. A test program links the cases
// (//worker/comm/contract:cases) and defines RingsUnderTest(); every transport has one, so
// what they have in common is said once.
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

// One rank's transport and device, as in a process of its own. Thread safe.
class TestRank {
 public:
  virtual ~TestRank() = default;

  virtual RingTransport& transport() = 0;

  // Memory that transfers may name. Never null, also for 0 bytes.
  virtual void* Allocate(int64_t bytes) = 0;
  virtual void Free(void* data) = 0;
  // Host memory to and from it. What is written is there on return, for every queue.
  virtual void Write(void* data, const void* host, int64_t bytes) = 0;
  virtual void Read(void* host, const void* data, int64_t bytes) = 0;

  // Work of the device: fills the memory with `value` as soon as *go. Does not block.
  virtual EventRef FillWhen(const std::atomic<bool>* go, void* data, int64_t bytes,
                            uint8_t value) = 0;
};

struct TestRankOptions {
  int world_size = 2;
  absl::Duration step_timeout = absl::Minutes(1);
  int max_ctas = 4;  // where the transport takes SMs
  std::function<void(const std::string&)> on_stuck;
};

struct RingUnderTest {
  std::string name;
  // Ranks that this machine has devices for.
  int max_world_size = 8;
  // Rings of one are all that it ever forms.
  bool single_rank_only = false;
  // An aborted transfer of that size has hardly ever ended before.
  int64_t long_transfer_bytes = int64_t{64} << 20;
  bool has_step_timeout = true;
  // A group may send from a rank to itself.
  bool sends_to_itself = false;
  // A rank that is prepared can be reached before it calls Connect.
  bool reaches_prepared_ranks = false;
  // The ranks of one ring, by rank, not yet prepared; they may form several rings.
  std::function<std::vector<std::unique_ptr<TestRank>>(const TestRankOptions&)> make_ranks;

  friend std::ostream& operator<<(std::ostream& out, const RingUnderTest& ring) {
    return out << ring.name;
  }
};

// Defined by the program.
std::vector<RingUnderTest> RingsUnderTest();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CONTRACT_RING_UNDER_TEST_H_
